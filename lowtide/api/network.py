"""A network for a small device, from an ONNX file or a PyTorch model, and a plan for it, run in exactly its bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lowtide.edge.graph import EdgeGraph
from lowtide.edge.interpret import interpret as interpret  # `lowtide.interpret` is found here

if TYPE_CHECKING:
    import torch


def network(
    source: str | os.PathLike[str] | torch.nn.Module,
    example: tuple[Any, ...] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    views: Literal["none", "reshape"] = "reshape",
    stored: Mapping[str, str] | None = None,
    groups: bool = True,
) -> EdgeGraph:
    """The network of an ONNX file, or of a PyTorch model for the shapes of an example.

    source: a path, or a module in `eval()`.
    example: the arguments of the module's forward.
    sizes: extents that the file names by symbols, `{"batch": 1}`; an axis without a name is "input:axis".
    views: which results of a file are taken to be their input's bytes. "reshape" for Reshape and its like, "none" for none.
    stored: dtypes of a file's tensors by name that memory holds as another: `{"conv1": "int8"}` for whole numbers in float32.
    groups: whether an operator of a file and what makes integers of its results are one node, as devices compute them.

    Raises ImportError where onnx is not installed, OSError for a file that cannot be read, TypeError for another kind of source.
    Raises FormatError, which names node and tensor, for a file that cannot be planned for, and CaptureError for such a model.
    """
    if isinstance(source, str | os.PathLike):
        from lowtide.edge.onnx import read_onnx

        if example is not None:
            raise TypeError("example: expected none for an ONNX file, which has its own shapes")
        if views not in ("none", "reshape"):  # a file's reader knows parts of tensors as well, those who plan do not
            raise TypeError(f"views: expected none or reshape, got {views!r}")
        return read_onnx(source, sizes=sizes, views=views, stored=stored, groups=groups)
    from lowtide.edge.aten import read_torch

    if not isinstance(example, tuple) or not hasattr(source, "forward"):
        raise TypeError(f"source: expected the path of an ONNX file, or a module and a tuple as its example, got {type(source).__name__}")
    if sizes or stored or views != "reshape" or not groups:
        raise TypeError("sizes, views, stored and groups are of ONNX files: a model has the shapes of its example")
    return read_torch(source, example)
