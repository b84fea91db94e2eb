"""Divide and conquer (AGO, section V): clusters are split into parts, and parts joined where that is predicted or measured to win.

    parts   what conventional fusion makes one kernel: at most one complex operator, and the simple ones around it
    chain   parts of one cluster, each of which is all that reads the result of the one before
    group   parts that run as one kernel, and the scheme by which they do; a part alone has none

`reform(partition, costs)` gives the groups of a graph in an order in which they can run. No torch, no measuring: `costs` knows.
"""
