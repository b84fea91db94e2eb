"""Graphs into other graphs that compute the same. A rewrite returns the new graph and a forward map; it never judges."""
