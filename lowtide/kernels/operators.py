"""All operators of lowtide's own: torch knows `lowtide::...` once this is imported, which takes as much memory as a network."""

from lowtide.kernels import bits, data_shapes, layers, optimizers, parts

__all__ = ["bits", "data_shapes", "layers", "optimizers", "parts"]
