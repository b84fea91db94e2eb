"""Clusters of simple operators of a whole step, for another compiler: norms, activations, element-wise chains, updates."""
