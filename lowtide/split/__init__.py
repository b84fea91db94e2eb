"""Splits (MAGIS's fission), whole: what of a graph could run in parts, the graph in which it does, and the search for what pays.

One chain of nouns. `dimensions` finds what is one dimension through a graph (section 4.1), and `names` tells it. `sets` makes a set of
nodes into a legal one, and says what becomes of the values at its border (4.2). `proposals` says where splitting helps: `dominators` of
what stands at the peak (4.3). `rewrite` makes the graph in which a set runs in `parts`, by the `roles` that its values have, as one node
with a body. `judge` says what a loop takes, and what a graph's peak may become, `search` chooses, and `graphs` is the verb.
"""
