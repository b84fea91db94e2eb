"""Whether a program can be a CUDA graph, read off its graph of operators before anything is captured.

A replay launches again what was launched while it was captured, on the same addresses and with the same numbers. Whatever the host did
meanwhile is not done again: what it read, counted, copied or drew. A program in which that matters is refused, in a sentence that names the
operator, its line and what to do. What else cannot be captured shows when it is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lowtide.ir.bodies import run_nodes
from lowtide.ir.graph import Graph, Kind, Node, Slot, Storage
from lowtide.ir.operators.nodes import is_arithmetic, is_collective, is_random, is_transfer, is_view, row_of
from lowtide.ir.operators.row import ITEM, SAVE, STOP, Fusion

ON_DEVICE = "Keep it on the device: optimizers do with capturable=True"
ALIGN_BYTES, NUMBER_BYTES = 512, 8
_TENSORS_A_NUMBER = 4  # at most, as far as optimizers go: a rate by itself, in a product and in two dtypes
_DEVICE = Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY


def not_replayed(graph: Graph) -> str:
    """What replays of a CUDA graph of a program would leave out, or do to memory of others, and what to do; "" where nothing."""
    for node in graph.nodes:
        for before, _ in node.writes:
            if node.op == SAVE:
                return f'it copies {before.storage.name} to the host, which waits for that; leave out Run(state="host")'
            if is_transfer(node):
                return f"{before.storage.name} makes room, and lies elsewhere afterwards; leave out Run(state='swap')"
            if _type(before.storage) == "cpu":
                return f"it writes {before.storage.name} on the host, which happens once, while the graph is captured. {ON_DEVICE}"
    return ""


@dataclass(frozen=True)
class Capturable:
    refusal: str  # why there can be none; "" where there can
    names: tuple[str, ...]  # of the inputs, as messages name them
    numbers: tuple[int, ...]  # inputs that are no tensors: a graph holds them as they were
    batch: tuple[int, ...]  # inputs of the batch: those that a graph may read from copies
    owners: tuple[tuple[int, ...], ...]  # by output: the inputs on its storage

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot], device: str) -> Capturable:
        """Of a program that runs on `device` on what lies in `slots`."""
        pairs = list(zip(graph.inputs, slots, strict=True))
        written = {before.storage for node in graph.nodes for before, _ in node.writes}
        numbers = tuple(at for at, (value, _) in enumerate(pairs) if value.storage.kind is Kind.SCALAR)
        batch = tuple(at for at, (value, slot) in enumerate(pairs) if slot.table == "batch" and value.storage.kind is not Kind.SCALAR)
        refusal = next(_refusals(graph, "" if torch.device(device).type == "cpu" else "cpu"), "")
        for at in batch:
            if not refusal and pairs[at][0].storage in written:
                refusal = f"it writes {slots[at]}, which each call gives anew; compute out of place in the loss"
        owners = tuple(tuple(at for at, (value, _) in enumerate(pairs) if value.storage is each.storage) for each in graph.outputs)
        return cls(refusal, tuple(map(str, slots)), numbers, batch, owners)


def _refusals(graph: Graph, host: str) -> Iterator[str]:
    """Why a graph cannot be captured; `host` is the type of the devices that are not the step's."""
    if host and (why := not_replayed(graph)):
        yield why
    absolute = {value.storage for node in graph.nodes if "as_strided" in node.op for value in node.inputs}
    if any(value.storage.kind is Kind.INPUT and value.storage in absolute for value in graph.inputs):
        yield "it reads the batch by places in its storage (as_strided), which a copy does not have"
    changing = {value.storage for value in graph.inputs if _on(value.storage, host)}  # on the host, and other at each call
    states = set(_states(graph, host))
    for node in run_nodes(graph):
        yield from _of_node(node, host, changing, states)
    for value in graph.outputs:
        if _on(value.storage, host):
            yield f"it returns {value.name} on the host, where nothing is computed at a replay"


def _states(graph: Graph, host: str) -> Iterator[Storage]:
    """States of draws for their gradients: attention leaves them on the host, and on the device while a graph is captured."""
    for node in run_nodes(graph):
        results = [value.storage for value in node.outputs if value is not None and value.storage.kind is not Kind.SCALAR]
        if is_random(node) and not all(_on(each, host) for each in results):
            yield from (each for each in results if _on(each, host))


def _of_node(node: Node, host: str, changing: set[Storage], states: set[Storage]) -> Iterator[str]:
    results = [value for value in node.outputs if value is not None and value.storage.kind is not Kind.SCALAR]
    read_on_host = [value for value in node.inputs if _on(value.storage, host) and value.storage not in states]
    makes_on_host = any(_on(value.storage, host) for value in results) and not is_transfer(node)
    if is_collective(node):
        yield f"{text_of(node)} is exchanged with other processes, which call for it at each step"
    elif node.op == STOP:
        yield f"{text_of(node)} ends the step early by what was computed, as a gradient scaler does: train in bfloat16, which needs none"
    elif node.op == ITEM:
        yield f"{text_of(node)} reads {node.inputs[0].name} into a Python number, for which the host waits. {ON_DEVICE}"
    elif node.op == "lowtide.cudnn_rnn.default":
        yield f"{text_of(node)} draws from a state of cuDNN's, which seeding puts anew elsewhere: put nn.Dropout between layers"
    elif is_arithmetic(node) or is_transfer(node) or node.body is not None:
        return
    elif makes_on_host and is_random(node):
        if all(_on(value.storage, host) for value in results):
            yield f"{text_of(node)} draws on the host, once for all replays"
    elif read_on_host and {value.storage for value in read_on_host} & changing:
        yield f"{text_of(node)} reads {read_on_host[0].name} on the host, which replays would not do. {ON_DEVICE}"
    elif makes_on_host and any(not _on(value.storage, host) and value.storage.kind is not Kind.SCALAR for value in node.inputs):
        yield f"{text_of(node)} copies to the host, once for all replays"
    elif read_on_host and not makes_on_host and not is_view(node):
        wrapped = row_of(node.op).fusion is Fusion.ELEMENTWISE and len(read_on_host) < len(node.inputs)
        if not wrapped or any(value.shape for value in read_on_host):
            yield f"{text_of(node)} copies {read_on_host[0].name} from the host, where it is gone at a replay"


def text_of(node: Node) -> str:
    """An operator and where it stands in the user's program: "aten.item.default (train.py:12)"."""
    return node.op if node.source is None else f"{node.op} ({node.source.file}:{node.source.line})"


def graph_bytes(graph: Graph) -> int:
    """What a graph of a program takes beside it at most: copies of the batch, of results two, one of them the caller's, and numbers."""
    given = {value.storage for value in graph.inputs if value.storage.kind is Kind.INPUT}
    returned = {value.storage for value in graph.outputs if value.storage.kind in _DEVICE}
    numbers = sum(value.storage.kind is Kind.SCALAR for value in graph.inputs)
    copies = sum(rounded(int(each.nbytes)) + ALIGN_BYTES for each in given)  # each begins as it was aligned
    beside = [*returned, *returned, *_states(graph, "cpu")]
    return copies + sum(rounded(int(each.nbytes)) for each in beside) + rounded(_TENSORS_A_NUMBER * NUMBER_BYTES * numbers)


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _type(storage: Storage) -> str:
    return torch.device(storage.device).type


def _on(storage: Storage, host: str) -> bool:
    """Whether a tensor's storage lies on the host, which is not where the step runs."""
    return bool(host) and storage.kind not in (Kind.SCALAR, Kind.HOST) and _type(storage) == host
