"""What could run in parts: the dimensions of a whole graph, the sets that one of them runs through, and trees of such sets.

`dimensions` finds what is one dimension through a graph (MAGIS, section 4.1), and `names` tells it. `regions` makes a set of nodes into a
legal one, and says what becomes of the values at its border (4.2). `heat` says where splitting helps: the dominators of what stands at the
peak (4.3); `candidates` chooses by it, and `tree` holds what was chosen and what of it is split (5.1). Nothing here changes a graph.
"""
