"""Which blocks a network has (AGO, sections V and VI): by the model, and where that cannot tell, measured, once, and kept on disk.

    takes   a body as stages, and how many kernels may be measured for it
    leaves  for each window of its stages which block is made, counted from 1, or 0; the same as long as the file of measurements is there

For convolutions the model is of one core: its arithmetic, and what it moves by the level that holds that; it does not do both at once. A
stage by itself reads what another one has written some time ago, and its result is read some time later: both come from where they fit.
As a block, what is between the stages comes from where the ring fits, and what goes in and out from where it fits by itself; but all
weights pass once for each row of a ring. For pooling a block wins where more is between than a core's own cache holds. Where the model
finds a block and its stages to be about as fast, it is worth measuring.

The file is by machine, compiler asked for, its options and the generator's version, its entries by kernels: networks that have some in
common share them.

Networks of one source are timed side by side on made-up numbers. They run in turns, by the team, as they would, and find what others have
left in the caches; the least time of each counts. What is compiled for that is not kept.

Each variant has a key, which says all that its time depends on but the machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from lowtide.base import VERSION
from lowtide.cost.cache import Cache
from lowtide.cost.device import node_flops
from lowtide.cost.trial import CACHES, caches_bytes
from lowtide.cpu import network as built
from lowtide.cpu.layout import stepped
from lowtide.cpu.network import Placing, StagedBody, build, team
from lowtide.cpu.recipes import Target, aligned
from lowtide.cpu.source import ElementOffsets, by_columns, entry, kernel_text, text_of
from lowtide.cpu.stages import Convolution, KernelStage, Product, RowBlock, Windows, alternatives, pixels
from lowtide.errors import there
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.row import ints
from lowtide.ir.sizes import ITEM_BYTES, reach
from lowtide.runtime.libraries import loaded, machine

_FLOPS_A_BYTE = (0.5, 0.9, 1.8)  # from the first, second and third cache: a core's arithmetic while a byte comes; measured on Zen 4
_KNOWN = (32 * 2**10, 2**20, 16 * 2**20)  # where the system does not tell
_SIMPLE_FLOPS = 2.0  # an element of a simple operator, by the count of arithmetic
_FLOPS_PER_US, _MEMORY_BYTES_PER_US = 100e3, 8e3  # of a core; only their ratio matters

_Stage: TypeAlias = Product | Convolution | Windows


@dataclass(frozen=True, slots=True)
class Level:
    nbytes: int
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Core:
    flops_per_us: float  # that generated products reach
    levels: tuple[Level, ...]  # nearest first; the last is memory, which holds all

    def moving_us(self, moved_bytes: float, footprint_bytes: int) -> float:
        """The time to move bytes between the core and the nearest level that holds the footprint."""
        level = next((each for each in self.levels if footprint_bytes <= each.nbytes), self.levels[-1])
        return moved_bytes / level.bytes_per_us


def core_here(folder: Path = CACHES) -> Core:
    """A core with this machine's caches."""
    sizes = caches_bytes(folder) or _KNOWN
    rates = (*_FLOPS_A_BYTE, *([_FLOPS_A_BYTE[-1]] * len(sizes)))
    levels = (Level(size, max(_FLOPS_PER_US / rate, _MEMORY_BYTES_PER_US)) for size, rate in zip(sizes, rates, strict=False))
    return Core(_FLOPS_PER_US, (*levels, Level(2**62, _MEMORY_BYTES_PER_US)))


class BlockTimes(NamedTuple):
    """What a block takes by prediction, in microseconds."""

    joined_us: float
    apart_us: float  # its stages one after the other

    @property
    def gain(self) -> float:
        """By how much the block is faster, as a share of its stages' time."""
        return 1.0 - self.joined_us / self.apart_us if self.apart_us else 0.0


def block_times(block: RowBlock, fixed: Collection[Value], core: Core) -> BlockTimes | None:
    """Of a block of convolutions and products, given what is constant; None where what is between changes its shape on the way."""
    parts = block.parts
    if not all(_is_straight(*pair, fixed) for pair in pairwise(parts)):
        return None
    arithmetic_us = sum(_flops(node) for part in parts for node in part.nodes) / core.flops_per_us
    moves = [_Moves.of(part, fixed) for part in parts]
    apart_us = sum(core.moving_us(each.weights, sum(each)) + core.moving_us(each.others, each.others) for each in moves)
    weights, between = sum(each.weights for each in moves), sum(each.result for each in moves[:-1])
    beside = max(0, sum(each.given for each in moves[1:]) - between)
    near, around = _ring_bytes(parts) + weights, moves[0].given + moves[-1].result
    joined_us = core.moving_us(2 * between + weights * _rows(_shape(parts[-1])), near) + core.moving_us(around + beside, around)
    return BlockTimes(arithmetic_us + joined_us, arithmetic_us + apart_us)


class _Moves(NamedTuple):
    """Bytes of a stage's constants, of what else it reads from outside, and of its result."""

    weights: int
    given: int
    result: int

    @property
    def others(self) -> int:
        return self.given + self.result

    @classmethod
    def of(cls, part: _Stage, fixed: Collection[Value]) -> _Moves:
        inside = {value for node in part.nodes for value in node.results}
        read = dict.fromkeys(value for node in part.nodes for value in node.inputs if value not in inside)
        weights = sum(_nbytes(part.nodes[0], value) for value in read if value in fixed)
        given = sum(_nbytes(part.nodes[0], value) for value in read if value not in fixed)
        return cls(weights, given, _nbytes(part.nodes[0], part.nodes[-1].results[0]))


def _is_straight(part: _Stage, following: _Stage, fixed: Collection[Value]) -> bool:
    """Whether what is between two stages keeps its shape, element by element."""
    given = next(value for value in following.nodes[0].inputs if value not in fixed)
    return not any(map(is_view, part.nodes)) and _shape(part) == ints(following.nodes[0], given)


def _ring_bytes(parts: tuple[_Stage, ...]) -> int:
    """Of the rows that windows and products still need of what is between."""
    ring_bytes = 0
    for part, following in pairwise(parts):
        shape = _shape(part)
        ring_bytes += prod(shape) // _rows(shape) * min(_span(following), _rows(shape)) * ITEM_BYTES["float32"]
    return ring_bytes


def _span(stage: _Stage) -> int:
    """The rows that a row of a stage needs, where the next one needs some of them again; else it is done with one at a time."""
    if not isinstance(stage, Windows) or stage.out.shape[2] == 1:
        return 1
    geometry = stage.geometry
    span = 1 + (geometry.kernel[0] - 1) * geometry.dilation[0]
    return span if span > geometry.stride[0] else 1


def _shape(stage: _Stage) -> tuple[int, ...]:
    return ints(stage.nodes[0], there(stage.nodes[0].outputs[0]))


def _rows(shape: tuple[int, ...]) -> int:
    return shape[2] if len(shape) == 4 else shape[0]


def _flops(node: Node) -> float:
    return node_flops(node) or _SIMPLE_FLOPS * sum(prod(ints(node, value)) for value in node.results)


def _nbytes(node: Node, value: Value) -> int:
    return prod(ints(node, value)) * ITEM_BYTES[value.dtype]


_NEAR_BYTES = 256 * 1024  # of what is between, that a core's own cache holds beside all else
_CLOSE = 0.15  # the model cannot tell kernels apart that it finds to be so near to each other

KernelAlternative = tuple[KernelStage, ...]  # stages that do the same work as others
# Of variants, and which of them the model chose, the one that is made: 0 for the first.
Fastest = Callable[[Sequence[KernelAlternative], int], int]


@dataclass(frozen=True)
class Choices:
    """What there is to choose among, and what the model says of it."""

    blocks: list[tuple[RowBlock, ...]]  # by window
    times: dict[RowBlock, BlockTimes]  # of convolutions
    winners: Collection[RowBlock]

    @classmethod
    def of(cls, stages: Sequence[KernelStage], fixed: Collection[Value]) -> Choices:
        blocks, core = alternatives(stages), core_here()
        deep = [block for each in blocks for block in each if block.windows.kind == "Weighted"]
        times = {block: its for block in deep if (its := block_times(block, fixed, core)) is not None}
        large = [block for each in blocks for block in each if block not in deep and _between_bytes(block) > _NEAR_BYTES]
        return cls(blocks, times, {*large, *_leanest(blocks, times)})

    def numbers(self, fastest: Fastest) -> tuple[int, ...]:
        taken: set[KernelStage] = set()
        numbers: list[int] = []
        for blocks in self.blocks:
            free = [0, *(number for number, block in enumerate(blocks, 1) if not any(part in taken for part in block.parts))]
            number = next((each for each in free[1:] if blocks[each - 1] in self.winners), 0)
            if any(self.is_close(blocks[each - 1]) for each in free[1:]):
                number = free[fastest(variants(blocks, free), free.index(number))]
            numbers.append(number)
            taken.update(blocks[number - 1].parts if number else ())
        return tuple(numbers)

    def is_close(self, block: RowBlock) -> bool:
        """Whether the model may be wrong about a block."""
        if block.windows.kind == "Weighted":
            return block in self.times and abs(self.times[block].gain) <= _CLOSE
        return _NEAR_BYTES / 2 < _between_bytes(block) < 2 * _NEAR_BYTES


def _leanest(windows: Sequence[Sequence[RowBlock]], times: dict[RowBlock, BlockTimes]) -> tuple[RowBlock, ...]:
    """The blocks that save most together: those around two windows may want the one stage between these."""
    none: tuple[float, tuple[RowBlock, ...]] = (0.0, ())  # what is saved, by which blocks
    best: dict[RowBlock | None, tuple[float, tuple[RowBlock, ...]]] = {None: none}  # by the last window's block
    for blocks in windows:
        before, best = best, {None: max(best.values(), key=_saved_us)}
        for block in (each for each in blocks if each in times):
            apart = [choice for last, choice in before.items() if last is None or not any(part in last.parts for part in block.parts)]
            saved_us, chosen = max(apart, key=_saved_us)
            best[block] = saved_us + times[block].apart_us - times[block].joined_us, (*chosen, block)
    return max(best.values(), key=_saved_us)[1]


def _saved_us(choice: tuple[float, tuple[RowBlock, ...]]) -> float:
    return choice[0]


def variants(blocks: Sequence[RowBlock], numbers: Sequence[int]) -> list[KernelAlternative]:
    """The ways to do the work of all blocks around a window: none of them, or one and what it lacks."""
    parts = max((blocks[number - 1].parts for number in numbers if number), key=len)
    return [tuple(_joined(parts, blocks[number - 1])) if number else tuple(parts) for number in numbers]


def _joined(parts: Sequence[KernelStage], block: RowBlock) -> Iterator[KernelStage]:
    for part in parts:
        if part is block.parts[-1]:
            yield block
        elif part not in block.parts:
            yield part


def _between_bytes(block: RowBlock) -> int:
    return sum(4 * stepped(part.out.shape[1]) * pixels(part.out.shape)[0] for part in block.parts[:-1])


@dataclass(frozen=True)
class Trial:
    """Variants of a network's stages."""

    columns: Collection[KernelStage]  # the stages of which threads share columns
    target: Target
    _texts: dict[KernelStage, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[KernelStage], target: Target) -> Trial:
        return cls(by_columns(stages, target), target)

    def key(self, variant: KernelAlternative) -> str:
        """The same for the same kernels one after the other, wherever they stand and whatever they read."""
        texts = [self._text(stage) for stage in variant]
        return hashlib.sha256("\0".join([*texts, str(self.target)]).encode()).hexdigest()[:32]

    def _text(self, stage: KernelStage) -> str:
        if stage not in self._texts:
            self._texts[stage] = kernel_text(stage, stage in self.columns, self.target)
        return self._texts[stage]

    def source(self, variants: Mapping[str, KernelAlternative], addresses: ElementOffsets) -> str:
        stages = list(dict.fromkeys(stage for variant in variants.values() for stage in variant))
        number = {stage: at for at, stage in enumerate(stages)}
        runs = [[number[stage] for stage in variant] for variant in variants.values()]
        return text_of(stages, self.columns, addresses, self.target, runs)


_SPIN_US = 200
_ROUNDS, _FEWEST = 40, 5
_PATIENCE_NS = 600_000_000


def times_ns(source: str, count: int, elements: Sequence[int]) -> list[int]:
    """The least time of each of so many networks, given blocks of memory of so many elements. Raises NativeError."""
    blocks = [_numbers(each) for each in elements]
    at = (ctypes.c_void_p * len(blocks))(*(block.data_ptr() for block in blocks))
    with tempfile.TemporaryDirectory(prefix="lowtide-trial-") as folder:
        path = Path(folder) / "trial.so"
        build(source, path)
        with loaded(path) as library:
            functions = [getattr(library, entry(number)) for number in range(count)]
        return _least_ns([ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions], at)


def _least_ns(addresses: Sequence[int], at: ctypes.Array[ctypes.c_void_p]) -> list[int]:
    run, threads = team().run, torch.get_num_threads()
    best = [2**62] * len(addresses)
    end = time.perf_counter_ns() + _PATIENCE_NS
    for turn in range(_ROUNDS):
        for number, address in enumerate(addresses):
            begin = time.perf_counter_ns()
            run(address, at, threads, _SPIN_US, None)
            best[number] = min(best[number], max(1, time.perf_counter_ns() - begin))
        if turn + 1 >= _FEWEST and time.perf_counter_ns() > end:
            break
    return best


def _numbers(elements: int) -> torch.Tensor:
    """Some that no sum makes huge or tiny."""
    block = aligned(elements + 64)
    return block.copy_(torch.arange(block.numel(), device="cpu").remainder_(997)).mul_(1e-4)


_NOISE = (
    1.05  # by as much a variant is faster than what the model chose, or that stays: a kernel alone is not quite what it is in its network
)
_MOST_NS = 3600 * 10**9
_known: dict[str, int] = {}  # of this process, where nothing can be kept


def tuned(staged: StagedBody, most: int, placing: Placing) -> tuple[int, ...]:
    """For each window of stages the block that is made, from 1, or 0. Raises NativeError.

    At most so many variants of kernels count, whether they are measured now or were before.
    """
    trial, choosing = Trial.of(staged.stages, staged.target), Choices.of(staged.stages, staged.known)
    trials: dict[str, KernelAlternative] = {}

    def note(variants: Sequence[KernelAlternative], by_model: int) -> int:
        wanted = {trial.key(variant): variant for variant in variants} if most else {}
        if len(trials | wanted) <= most:
            trials.update(wanted)
        return by_model

    by_model = choosing.numbers(note)
    if not trials:
        return by_model
    known = _times_ns(staged, trial, trials, placing)

    def fastest(variants: Sequence[KernelAlternative], by_model: int) -> int:
        times = [known.get(trial.key(variant), 0) for variant in variants]
        best = min(range(len(times)), key=lambda at: times[at])
        return best if all(times) and _NOISE * times[best] < times[by_model] else by_model

    return choosing.numbers(fastest)


def _times_ns(staged: StagedBody, trial: Trial, trials: Mapping[str, KernelAlternative], placing: Placing) -> dict[str, int]:
    """What these variants take, by key: measured before, or now."""
    known = {**_known, **_cache().load()}
    wanted = {key: variant for key, variant in trials.items() if key not in known}
    if wanted:
        known |= _measured(staged, trial, wanted, placing)
    return {key: known[key] for key in trials}


def _measured(staged: StagedBody, trial: Trial, wanted: Mapping[str, KernelAlternative], placing: Placing) -> dict[str, int]:
    addresses, arena_bytes, kept = staged.addresses(staged.stages, placing)
    live = [value for at, value in enumerate(staged.body.inputs) if at not in set(staged.fixed)]
    elements = [arena_bytes // 4, kept, *(reach(each.shape, each.stride) for each in (*live, *staged.body.outputs))]
    taken = times_ns(trial.source(wanted, addresses), len(wanted), elements)
    _known.update(_cache().merge(dict(zip(wanted, taken, strict=True))))
    return dict(_known)


def _cache() -> Cache:
    templates = b"".join((*(path.read_bytes() for path in sorted(built.SOURCES)), " ".join(built.FLAGS[:-1]).encode()))
    return Cache("kernel_times", (*machine(), hashlib.sha256(templates).hexdigest(), VERSION), 1, _MOST_NS)
