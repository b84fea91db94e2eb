"""Inference by generated kernels: regions of a graph compiled, and made ready to be called."""
