"""A graph with regions that inductor has compiled, and what runs them.

    takes   a graph
    leaves  the graph with those clusters as regions whose compiled body was tried and found to be right and faster than torch's operators

Bodies that compute the same are one, whatever their values are called. Those that move most bytes, over all places, are compiled, and only
so many: each takes a second. They are compiled beside one another (`workers`), and then tried one by one.

Inductor takes a body as a torch.fx module of its arguments in their order, which returns its results; numbers are given as tensors of no
dimensions. An operator whose argument must be a number takes none that differs from call to call: such a one is written in sums and
products.

`serve` is the other end of `workers`: a process that does nothing but have inductor compile bodies, one at a time, as it is asked to.
"""

from __future__ import annotations

import gc
import hashlib
import operator as python
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx

from lowtide.base.messages import warn
from lowtide.cost.cache import Cache
from lowtide.cost.operators import argument, operator
from lowtide.cost.profiler import measure_memory_of_each
from lowtide.cost.trial_process import Reply, answer_all
from lowtide.cpu.comparison import is_faster, made_up, measured_ns
from lowtide.errors import LowtideError
from lowtide.ir.bodies import Region, is_by_inductor
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import functional_base, writes_in_place
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.lower.python import lower
from lowtide.plan.contents import Decision
from lowtide.regions.clusters import Compiled, clusters, numbered, with_compiled
from lowtide.regions.inductor import ModuleGroup, Run, TensorSpec, circumstances, compile_all, compiled, is_compiled, number, warm_up
from lowtide.runtime.libraries import NativeError
from lowtide.runtime.program import Program

_aten = torch.ops.aten
_NORM = "aten.native_batch_norm.default"  # whose schema does not say that it writes statistics


def module_of(body: Graph) -> fx.GraphModule:
    graph = fx.Graph()
    names: dict[Value, Any] = {value: graph.placeholder(f"v{at}") for at, value in enumerate(body.inputs)}
    for node in body.nodes:
        result = _call(graph, node, names)
        values = [value for value in node.outputs if value is not None]
        if len(node.outputs) == 1 and values and not isinstance(operator(node.op)._schema.returns[0].type, torch.ListType):
            names[values[0]] = result
        else:
            names |= {
                value: graph.call_function(python.getitem, (result, at)) for at, value in enumerate(node.outputs) if value is not None
            }
        names |= {after: names[before] for before, after in node.writes}
    graph.output(tuple(names[value] for value in body.outputs))
    return fx.GraphModule({}, graph)


def _call(graph: fx.Graph, node: Node, names: dict[Value, Any]) -> Any:
    if any(value.dtype == "scalar" for value in node.inputs):
        return _scaled(graph, node, names)
    target = _aten._native_batch_norm_legit.default if node.op == _NORM and node.writes else operator(node.op)
    return graph.call_function(
        target, tuple(argument(arg, names) for arg in node.args), {key: argument(arg, names) for key, arg in node.kwargs}
    )


def _scaled(graph: fx.Graph, node: Node, names: dict[Value, Any]) -> Any:
    """A call with numbers that differ from call to call: `a + s * b` and the like, in the memory of `a` where the operator works there."""
    args, kwargs = [argument(arg, names) for arg in node.args], {key: argument(arg, names) for key, arg in node.kwargs}
    call, name = graph.call_function, functional_base(node.op).removeprefix("aten.")
    in_place = writes_in_place(node.op)
    if name in ("mul", "div"):
        return call(getattr(_aten, f"{name}_" if in_place else name).Tensor, tuple(args))
    if name == "lerp":
        more = call(_aten.mul.Tensor, (call(_aten.sub.Tensor, (args[1], args[0])), args[2]))
    elif name in ("addcmul", "addcdiv"):
        pair = call(_aten.mul.Tensor if name == "addcmul" else _aten.div.Tensor, (args[1], args[2]))
        more = call(_aten.mul.Tensor, (pair, kwargs.get("value", 1)))
    else:
        more = call(_aten.mul.Tensor, (args[1], kwargs["alpha"])) if "alpha" in kwargs else args[1]
    base = _aten.sub if name == "sub" else _aten.add
    inplace_base = _aten.sub_ if name == "sub" else _aten.add_
    return call((inplace_base if in_place else base).Tensor, (args[0], more))


_MOST = 64  # bodies that are compiled for a program, of all its graphs together
_LEAST_SHARE = 1 / 250  # of the bytes that all bodies move, in any graph, for one to be worth compiling
_NEAR = 1e-2  # of the largest number of a result: what a wrong kernel passes
_BLOCK = 2**18  # elements that are compared at once, so that they stay in the processor's cache


def compiled_graphs(graphs: Sequence[Graph], say: Callable[[float], object]) -> list[Graph | None]:
    """Each graph with compiled regions; None where there are none. Where nothing can be compiled a warning says why.

    The graphs compute the same, so that most bodies are in several: each is compiled and tried once.
    """
    regions = [[Compiled.of(each) for each in clusters(graph)] for graph in graphs]
    texts = {each: to_text(numbered(each.body)) for those in regions for each in those}
    heaviest = {text: numbered(body) for text, body in _heaviest(regions, texts).items()}
    taken = _tried(heaviest, say)
    return [
        with_compiled(graph, [(each, taken[texts[each]]) for each in those if texts[each] in taken])
        for graph, those in zip(graphs, regions, strict=True)
    ]


def _heaviest(regions: Sequence[Sequence[Compiled]], texts: Mapping[Compiled, str]) -> dict[str, Graph]:
    """The bodies that move most in any of the graphs, by text, the heaviest first: without those that hardly matter."""
    shares, bodies = dict[str, float](), dict[str, Graph]()
    for those in regions:
        moved = [_moved_bytes(each.body) for each in those]
        own = dict[str, float]()
        for each, nbytes in zip(those, moved, strict=True):
            own[texts[each]] = own.get(texts[each], 0.0) + nbytes / sum(moved)
            bodies.setdefault(texts[each], each.body)
        shares |= {text: max(share, shares.get(text, 0.0)) for text, share in own.items()}
    ranked = sorted(shares, key=lambda text: -shares[text])[:_MOST]
    return {text: bodies[text] for text in ranked if shares[text] >= _LEAST_SHARE}


def compiled_as(graph: Graph, chosen: Graph) -> Graph | None:
    """The graph with the compiled regions of one that was `chosen` for this program before; None where there are none."""
    sizes = {region.name: region.arena_bytes for region in _regions(chosen)}
    regions = [Compiled.of(each) for each in clusters(graph)]
    names = {each: Region.of(each.region(0)).name for each in regions}
    return with_compiled(graph, [(each, sizes[names[each]]) for each in regions if names[each] in sizes])


def compiled_like(graph: Graph, like: Graph) -> Graph | None:
    """The graph with compiled regions whose bodies a graph `like` this one has, without a trial; None where there are none."""
    known = {to_text(numbered(region.body)): region.arena_bytes for region in _regions(like)}
    regions = [Compiled.of(each) for each in clusters(graph)]
    texts = {each: to_text(numbered(each.body)) for each in regions}
    return with_compiled(graph, [(each, known[texts[each]]) for each in regions if texts[each] in known])


def compiled_runners(graph: Graph) -> Mapping[str, Run]:
    """What runs a graph's compiled regions, by the name of the first result. Raises NativeError."""
    bodies = {region.node.results[0].name: numbered(region.body) for region in _regions(graph)}
    reasons = _compiled(bodies.values(), lambda share: None)
    if reasons:
        raise NativeError(next(iter(reasons.values())))
    return {name: _run_of(body) for name, body in bodies.items()}


def _regions(graph: Graph) -> list[Region]:
    return [Region.of(node) for node in graph.nodes if is_by_inductor(node)]


def times_ns(body: Graph) -> tuple[int, int] | None:
    """What a body was measured to take compiled, and by torch's operators; None where it was not."""
    alike = numbered(body)
    return measured_ns(alike, _source(alike))


def compiled_ns(node: Node) -> int | None:
    """What a compiled region was measured to take; None where it was not, and for another node."""
    known = times_ns(Region.of(node).body) if is_by_inductor(node) else None
    return None if known is None else known[0]


def as_compiled(nodes: Sequence[Node], us: Sequence[float]) -> tuple[float, ...]:
    """Times of nodes, of which those of regions were measured operator by operator: shorter by as much as compiled ones are alone."""

    def share(node: Node) -> float:
        known = times_ns(Region.of(node).body) if is_by_inductor(node) else None
        return 1.0 if known is None else known[0] / known[1]

    return tuple(each * share(node) for node, each in zip(nodes, us, strict=True))


_COMPILING = 0.8  # of the progress that is told


def _tried(bodies: Mapping[str, Graph], say: Callable[[float], object]) -> dict[str, int]:
    """By text, how many bytes a compiled body takes beside arguments and results; without those that torch's operators are to run.

    All are compiled before any is measured, which wants the processor for itself.
    """
    reasons = _compiled(bodies.values(), lambda share: say(_COMPILING * share))
    gc.collect()  # once: nothing that is recorded below makes much
    taken = dict[str, int]()
    for done, (text, body) in enumerate(bodies.items()):
        if (nbytes := _taken(body, reasons.get(_key(body)))) is not None:
            taken[text] = nbytes
        say(_COMPILING + (1 - _COMPILING) * (done + 1) / len(bodies))
    return taken


def _compiled(bodies: Iterable[Graph], say: Callable[[float], object]) -> dict[str, str]:
    """Have those compiled that are for a CPU and not in the cache; by key, why there is nothing."""
    keys = {_key(body): body for body in bodies if _device(body) == "cpu"}
    unknown = {key: body for key, body in keys.items() if not is_compiled(key)}
    return compile_all({key: to_text(body) for key, body in unknown.items()}, lambda: ModuleGroup(lambda key: _module(unknown[key])), say)


def _taken(body: Graph, reason: str | None) -> int | None:
    """What a compiled body takes; None where torch's operators are to run, or where there is a reason why there is none."""
    try:
        if reason is not None:
            raise NativeError(reason)
        runs = _run_of(body)
        torchs = Program(lower(Decision.in_order(body)), gradients=False)
        cache, name = Cache("compiled_workspaces", (circumstances(_device(body)),)), _key(body)
        known, given = cache.load(), list[Any]()
        if name not in known:
            given = made_up(body)
            if not _agree(body, runs, torchs, given):
                return None
            known = cache.merge({name: _workspace_bytes(body, runs, given)})
        return int(known[name]) if is_faster(body, _source(body), lambda args: runs(*args), torchs, given) else None
    except (NativeError, LowtideError, RuntimeError) as error:  # torch's own among them, where memory does not do for a trial
        _warn_once(f"lowtide leaves a region to torch's operators: {error}")
        return None


def _agree(body: Graph, runs: Run, torchs: Program, mine: list[Any]) -> bool:
    """Whether results, and what is written, look as they should and are near to torch's own, on made-up data."""
    its = deepcopy(mine)
    pairs = [*zip(runs(*mine), torchs(its), strict=True), *zip(mine, its, strict=True)]
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor, _ in pairs[: len(body.outputs)]]
    wanted = [(tuple(value.shape), tuple(value.stride), getattr(torch, value.dtype)) for value in body.outputs]
    return layouts == wanted and all(_near(one, two) for one, two in pairs if isinstance(one, torch.Tensor))


def _near(one: torch.Tensor, two: torch.Tensor) -> bool:
    if torch.equal(one, two):  # as most are: what is only read is compared as well
        return True
    if two.dtype is torch.bool:
        return False
    wide = torch.float32 if two.is_floating_point() and two.itemsize < 8 else torch.float64
    order = sorted(range(two.ndim), key=two.stride, reverse=True)
    ones, twos = (each.permute(order).reshape(-1).split(_BLOCK) for each in (one, two))
    near = _NEAR * max(float(block.to(wide).abs().nan_to_num_(0.0, 0.0, 0.0).max()) for block in twos)
    return all(_is_near(mine.to(wide), its.to(wide), near) for mine, its in zip(ones, twos, strict=True))


def _is_near(one: torch.Tensor, two: torch.Tensor, near: float) -> bool:
    """What is not finite has to be the same."""
    off = ~((one - two).abs_() < two.abs().mul_(_NEAR).add_(near))
    one, two = one[off], two[off]
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def _workspace_bytes(body: Graph, runs: Run, given: Sequence[Any]) -> int:
    """Above arguments and results, of what has run before."""
    took = measure_memory_of_each([lambda: runs(*given)], _device(body), collect=False)[-1]
    return max(0, took.above_bytes - sum(int(value.storage.nbytes) for value in body.outputs))


@lru_cache(1024)
def _run_of(body: Graph) -> Run:
    """What runs a body that is written with numbers as names. Raises NativeError."""
    return _loaded(_key(body), body)


def _module(body: Graph) -> tuple[Callable[[], fx.GraphModule], list[TensorSpec]]:
    return lambda: module_of(body), [_look(value) for value in body.inputs]


_open: dict[str, Run] = {}  # by key: of bodies that are alike one is loaded


def _loaded(key: str, body: Graph) -> Run:
    if key not in _open:
        run = compiled(key, *_module(body))
        numbers = [at for at, value in enumerate(body.inputs) if value.dtype == "scalar"]
        _open[key] = _with_numbers(run, numbers) if numbers else run
    return _open[key]


def _with_numbers(runs: Run, numbers: Sequence[int]) -> Run:
    def run(*given: Any) -> list[Any]:
        args = list(given)
        for at in numbers:
            args[at] = number(float(args[at]))
        return runs(*args)

    return run


def _look(value: Value) -> TensorSpec:
    if value.dtype == "scalar":
        return TensorSpec((), (), "float64", "cpu")
    return TensorSpec(tuple(map(int, value.shape)), tuple(map(int, value.stride)), value.dtype, value.storage.device)


def _key(body: Graph) -> str:
    return hashlib.sha256(f"{to_text(body)}\0{_source(body)}".encode(errors="surrogateescape")).hexdigest()[:32]


def _source(body: Graph) -> str:
    return f"inductor\0{circumstances(_device(body))}"


def _device(body: Graph) -> str:
    return next(value.storage.device for value in body.inputs if value.dtype != "scalar")


def _moved_bytes(body: Graph) -> int:
    values = (*body.inputs, *body.outputs)
    return sum(prod(int(size) for size in value.shape) * ITEM_BYTES[value.dtype] for value in values)


@lru_cache
def _warn_once(sentence: str) -> None:
    warn(sentence, RuntimeWarning)


def serve(setup: dict[str, Any]) -> None:
    """Answer requests until there are no more. `setup` is the first line that came in."""
    bodies = dict[str, Graph]()
    group = ModuleGroup(lambda key: _module(bodies[key]))

    def answer(request: dict[str, Any]) -> Reply:
        if "finish" in request:
            return {"reasons": group.finish()}
        bodies[request["key"]] = parse(request["body"])
        group.take(request["key"])
        return {}

    def ready() -> None:
        torch.set_num_threads(setup["threads"])
        warm_up()

    answer_all(setup, ready, answer)
