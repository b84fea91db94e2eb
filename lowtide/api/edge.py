"""The verbs for networks on small devices: a graph of an ONNX file or a PyTorch model, its plan, and a run in exactly the plan's bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from lowtide.base.messages import bytes_text
from lowtide.edge.cuts import with_inputs_outside
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.interpret import interpret as interpret  # `lowtide.interpret` is found here
from lowtide.edge.plan import EdgePlan, Space
from lowtide.edge.solve import EdgeAnswer, EdgeEffort, EdgeRequest, least_bytes, misfit, of_any_size, solve, solve_cut, with_cut_parts
from lowtide.errors import BudgetError, FormatError

if TYPE_CHECKING:
    import torch


def network(
    source: str | os.PathLike[str] | torch.nn.Module,
    example: tuple[Any, ...] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    views: Literal["none", "reshape", "slices"] = "reshape",
    stored: Mapping[str, str] | None = None,
    groups: bool = True,
) -> EdgeGraph:
    """The network of an ONNX file, or of a PyTorch model for the shapes of an example.

    source: a path, or a module in `eval()`.
    example: the arguments of the module's forward.
    sizes: extents that the file names by symbols, `{"batch": 1}`; an axis without a name is "input:axis".
    views: which results of a file are taken to be their input's bytes. "reshape" for Reshape and its like, "none" for none.
        "slices": Concat and Split along the outermost axis, too, where a runtime has parts written where they will lie.
    stored: dtypes of a file's tensors by name that memory holds as another: `{"conv1": "int8"}` for whole numbers in float32.
    groups: whether an operator of a file and what makes integers of its results are one node, as devices compute them.

    Raises ImportError where onnx is not installed, OSError for a file that cannot be read, TypeError for another kind of source.
    Raises FormatError, which names node and tensor, for a file that cannot be planned for, and CaptureError for such a model.
    """
    if isinstance(source, str | os.PathLike):
        from lowtide.edge.onnx import read_onnx

        if example is not None:
            raise TypeError("example: expected none for an ONNX file, which has its own shapes")
        return read_onnx(source, sizes=sizes, views=views, stored=stored, groups=groups)
    from lowtide.edge.aten import read_torch

    if not isinstance(example, tuple) or not hasattr(source, "forward"):
        raise TypeError(f"source: expected the path of an ONNX file, or a module and a tuple as its example, got {type(source).__name__}")
    if sizes or stored or views != "reshape" or not groups:
        raise TypeError("sizes, views, stored and groups are of ONNX files: a model has the shapes of its example")
    return read_torch(source, example)


def plan_edge(
    graph: EdgeGraph | str | os.PathLike[str],
    memories: Sequence[Space],
    *,
    dma: bool = False,
    macs_per_s: float | None = None,
    constants_bytes_per_s: float | None = None,
    constants: Space | None = None,
    least: str | None = None,
    within_us: float | None = None,
    sizes: Mapping[str, int] | None = None,
    views: Literal["none", "reshape", "slices"] = "reshape",
    cut: bool = False,
    extra_macs: float | None = 0.0,
    inputs_outside: bool = False,
    effort: EdgeEffort | None = None,
) -> EdgePlan:
    """A network's order, and where each tensor lies: what `lowtide edge` prints. The plan went through its check.

    graph: the network, or the path of its ONNX file, which needs the extra `onnx`.
    memories: one, whose bytes are made least, or several with rates: then the time is made least within their sizes.
    dma: whether blocks are copied while operators run.
    macs_per_s: how fast the device multiplies; left out, only memory takes time.
    constants_bytes_per_s: how fast weights are read from flash; left out, that takes no time.
    constants: the memory of weights, `Space("flash", 2**20, 5e7)`, without a rate to write. Weights that save time elsewhere lie in one of
        `memories` throughout, from before the first step. In place of `constants_bytes_per_s`; left out, all lie in flash.
    least: the name of a memory whose bytes are made least in place of the time. Its size, where it has one, holds all the same.
    within_us: the time for that, in microseconds; left out, any.
    sizes: extents of symbolic axes of a file, such as `{"batch": 1}`.
    views: which results of a file are taken to be their input's bytes, as in `lowtide.network`.
    cut: whether runs of convolutions and their like work slice by slice, with rings of a few slices between them. A proof is then over
        runs of up to 64 operators, each in slices of one size. Bands of one operator by itself are in no search.
    extra_macs: the share of multiplications that cuts may do again, 0.1 for a tenth. None: as few as the memory's size asks for, in
        several memories as many as the time allows.
    inputs_outside: whether what the caller gives is read from where the caller has it (a camera, flash), and lies in no memory.
    effort: how far to search.

    Raises FormatError for a network or numbers that make no sense. Raises BudgetError where nothing fits: which operator or space is
    short, by how much, and sizes that would do.
    """
    network = _network(graph, sizes, views)
    for name, flag in (("cut", cut), ("inputs_outside", inputs_outside)):
        if not isinstance(flag, bool):
            raise FormatError(f"{name}: expected True or False, got {flag!r}")
    if extra_macs is not None and (isinstance(extra_macs, bool) or not (isinstance(extra_macs, Real) and 0 <= extra_macs < 1e9)):
        raise FormatError(f"extra_macs: expected a share of 0 or more, or None, got {extra_macs!r}")
    if extra_macs != 0 and not cut:
        raise FormatError(f"extra_macs: expected it together with cut=True, got {extra_macs!r} without")
    if constants is not None and constants_bytes_per_s is not None:
        raise FormatError("constants: expected it without constants_bytes_per_s, as the memory has a rate of its own")
    request = EdgeRequest.of(
        with_inputs_outside(network) if inputs_outside else network,
        memories,
        macs_per_s=macs_per_s,
        constants_bytes_per_s=constants_bytes_per_s,
        dma=dma,
        constants=constants,
        effort=effort,
    )
    if cut:
        request = with_cut_parts(request, extra_macs)
    answer = solve_cut(request, extra_macs) if cut and least is None and within_us is None else _answer(request, least, within_us)
    if answer.plan is None:
        raise misfit(request, answer)
    return answer.plan


def _network(
    graph: EdgeGraph | str | os.PathLike[str], sizes: Mapping[str, int] | None, views: Literal["none", "reshape", "slices"]
) -> EdgeGraph:
    if isinstance(graph, EdgeGraph):
        return graph
    if not isinstance(graph, (str, os.PathLike)):
        raise TypeError(f"graph: expected a lowtide.EdgeGraph, or the path of an ONNX file, got {graph!r:.80}")
    from lowtide.edge.onnx import read_onnx  # with onnx, which most do without

    return read_onnx(graph, sizes=sizes, views=views)


def _answer(request: EdgeRequest, least: str | None, within_us: float | None) -> EdgeAnswer:
    names = [memory.name for memory in request.problem.spaces]
    if least is None and within_us is not None:
        raise FormatError("within_us: expected together with `least`, the memory whose bytes are made least")
    if least is None:
        return solve(request)
    if least not in names:
        raise FormatError(f"least: expected one of the memories {', '.join(names)}, got {least!r}")
    if within_us is not None and not 0 <= within_us < 1e18:
        raise FormatError(f"within_us: expected a time of 0 or more, got {within_us!r}")
    if len(names) == 1:
        raise FormatError("least: expected with several memories: of a single one the bytes are made least anyway")
    space = names.index(least)
    answer = least_bytes(request, space, None if within_us is None else round(within_us * 10**6))
    if answer.plan is None and within_us is not None and least_bytes(request, space).plan is not None:
        raise BudgetError(f"no plan within {within_us} us was found{_slow(request, space, within_us)}", 0)
    return answer


def _slow(request: EdgeRequest, space: int, within_us: float) -> str:
    """What would be enough for the time: a larger memory, where that was found."""
    memory = request.problem.spaces[space]
    if memory.capacity_bytes is None:
        return f", however large {memory.name} is: allow more time"
    answer = least_bytes(of_any_size(request, space), space, round(within_us * 10**6))
    if answer.plan is None:
        return f", however large {memory.name} is: allow more time"
    needed = bytes_text(answer.plan.arena_bytes[space])
    return f" with {memory.name}={bytes_text(memory.capacity_bytes)}: allow more time, or {memory.name}={needed}"
