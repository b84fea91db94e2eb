"""Which sets of nodes to split, and into how many parts (MAGIS, sections 4.3 and 5.1)."""
