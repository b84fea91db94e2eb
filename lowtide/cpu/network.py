"""A body as a network: its source, its arena, and the constants that are prepared for it; and the team of threads that runs it.

Addresses in the arena are a placement problem: a buffer lives from the stage that first writes it to the end of the last that reads it.
Networks are built by the system's compiler for the machine at hand, once, and kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from lowtide.base.files import directory
from lowtide.base.process import processors
from lowtide.cpu.heads import head_of
from lowtide.cpu.layout import LANES, SLACK, Buffer
from lowtide.cpu.recipes import Packed, Plain, Target, offsets_of
from lowtide.cpu.regions import following
from lowtide.cpu.source import ElementOffsets, source_of
from lowtide.cpu.stages import KernelStage, with_blocks
from lowtide.cpu.staging import Staging
from lowtide.errors import there
from lowtide.ir.edges import leading_to
from lowtide.ir.graph import Graph, Value
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.libraries import LibraryRecipe, NativeError, compile_library, library, loaded, processor

ITEM_BYTES = 4
ENTRY = "lowtide_network"
_HERE = Path(__file__).parent
_TEAM = _HERE / "team.cpp"
_TEMPLATES = ("kernels.hpp", "blocks.hpp", "attention.hpp", "winograd.hpp")
SOURCES = (_TEAM, *(_HERE / name for name in _TEMPLATES))  # that decide what a kernel takes
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# NaN and infinities are as in IEEE 754; only that nobody looks at errno or at traps is taken for granted.
FLAGS = ("-O3", "-std=c++20", _NATIVE, "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-pthread", f"-I{_HERE}")
_PART_LETTERS = 6000  # of source, for which a compiler takes longer than to read the templates
_lock = threading.Lock()


def buffers(stages: Sequence[KernelStage]) -> list[Buffer]:
    """The arena's buffers, in the order of their first use."""
    places = dict[Buffer, None]()
    for stage in stages:
        for layout in (stage.out, *stage.reads):
            if layout.buffer.is_own:
                places[layout.buffer] = None
    return list(places)


def problem_of(stages: Sequence[KernelStage]) -> PlaceProblem:
    """The placement problem of `buffers`, one step a stage. Each buffer has room behind it for what is read past its end."""
    first, last = dict[Buffer, int](), dict[Buffer, int]()
    for step, stage in enumerate(stages):
        for layout in (stage.out, *stage.reads):
            first.setdefault(layout.buffer, step)
            last[layout.buffer] = step
    own = buffers(stages)
    return PlaceProblem.of(
        [-(-(each.elements + SLACK) // LANES) * LANES * ITEM_BYTES for each in own],
        [first[each] for each in own],
        [last[each] + 1 for each in own],
        names=[each.name for each in own],
        align_bytes=LANES * ITEM_BYTES,
    )


Placing = Callable[[PlaceProblem], tuple[Sequence[int], int]]  # offsets and the arena's length, in bytes


@dataclass(frozen=True)
class Network:
    source: str
    stages: tuple[KernelStage, ...]
    arena_bytes: int
    kept_elements: int
    recipes: tuple[Packed, ...]
    live: tuple[int, ...]  # the arguments that differ from call to call
    constants: Graph  # from the fixed arguments to what the recipes read
    results: tuple[Value, ...]


@dataclass(frozen=True)
class StagedBody:
    """A body as stages, before any of them are joined."""

    body: Graph
    fixed: tuple[int, ...]  # the arguments that are constants
    target: Target
    known: frozenset[Value]  # what follows from these
    stages: tuple[KernelStage, ...]
    constants: tuple[Packed, ...]

    @classmethod
    def of(cls, body: Graph, fixed: Sequence[int], target: Target) -> StagedBody:
        """The stages of a body of which the arguments `fixed` are constants."""
        known = frozenset(following(body, [body.inputs[at] for at in fixed]))
        staged = Staging(body, known, target).staged(head_of)
        return cls(body, tuple(fixed), target, known, tuple(staged.stages), tuple(staged.constants))

    def addresses(self, stages: Sequence[KernelStage], placing: Placing) -> tuple[ElementOffsets, int, int]:
        """Where buffers and constants are, if the body runs by these stages; bytes of the arena, elements of constants."""
        offsets, arena_bytes = placing(problem_of(stages))
        places = {buffer: int(offset) // ITEM_BYTES for buffer, offset in zip(buffers(stages), offsets, strict=True)}
        packed, elements = offsets_of(self.constants)
        return ElementOffsets(places, packed), arena_bytes, elements


def network_of(staged: StagedBody, joined: Sequence[int], placing: Placing) -> Network:
    """The network of a body, with the blocks that `choice` has numbered."""
    body, fixed = staged.body, staged.fixed
    stages = with_blocks(staged.stages, joined)
    addresses, arena_bytes, elements = staged.addresses(stages, placing)
    source = source_of(stages, addresses, staged.target)
    wanted = tuple(dict.fromkeys(value for recipe in staged.constants for value in read_by(recipe)))
    makers = leading_to(body.nodes, wanted, lambda node, is_read: is_read and all(value in staged.known for value in node.results))
    constants = Graph(tuple(body.inputs[at] for at in fixed), tuple(makers), wanted)
    live = tuple(at for at in range(len(body.inputs)) if at not in set(fixed))
    return Network(source, stages, arena_bytes, elements, staged.constants, live, constants, body.outputs)


def read_by(recipe: Packed) -> list[Value]:
    norm = recipe.norm
    values = [recipe.value] if isinstance(recipe, Plain) else [recipe.weight, recipe.bias]
    if norm is not None:
        values = ([] if isinstance(recipe, Plain) else values) + [norm.gamma, norm.beta, norm.mean, norm.var]
    return [value for value in values if value is not None]


class Experience(ctypes.Structure):
    """What runs of one network took so far, as team.cpp has it: whether several threads pay."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("count", "together", "spent_ns", "alone", "alone_ns", "lost_ns", "pause_ns", "until_ns")
    )


class Team:
    def __init__(self, loaded: Any) -> None:
        self.library = loaded
        self.target = Target(loaded.lowtide_lanes(), loaded.lowtide_registers())
        self.run = loaded.lowtide_run
        self.run.argtypes, self.run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p), None
        self.mark = loaded.lowtide_mark
        self.mark.argtypes, self.mark.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int), ctypes.c_uint64
        self.sum = loaded.lowtide_sum
        self.sum.argtypes, self.sum.restype = self.mark.argtypes, self.mark.restype


def team() -> Team:
    """This process's team. Raises NativeError where there is no compiler."""
    with _lock:
        return _team()


@cache
def _team() -> Team:
    if platform.system() != "Linux":
        raise NativeError(f"generated kernels are made for Linux, this is {platform.system()}")
    making = LibraryRecipe("generated kernels", partial(compile_library, _TEAM, options=FLAGS), _team_of)
    team: Team = library(directory(), f"team-{key(_TEAM.read_bytes())}.so", making)
    return team


def _team_of(path: Path) -> Team:
    with loaded(path) as library:
        return Team(library)


def network(source: str) -> Any:
    """The address of a network's function, and the library that has it, which is to be kept. Raises NativeError."""
    making = LibraryRecipe("generated kernels", partial(build, source), _network_of)
    return library(directory(), f"network-{key(source.encode())}.so", making)


def build(source: str, target: Path) -> None:
    """Compile a network's source. Raises NativeError."""
    text = target.with_suffix(".cpp")
    text.write_text(source, encoding="utf-8")
    compile_library(text, target, FLAGS, parts=min(processors(), 1 + len(source) // _PART_LETTERS))


def _network_of(path: Path) -> tuple[int, Any]:
    with loaded(path) as library:
        return there(ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value), library


def key(source: bytes) -> str:
    """All that a library depends on: its source, the templates, the options, the machine and the compiler that is asked for."""
    circumstances = "\0".join((*FLAGS[:-1], platform.machine(), *platform.libc_ver(), processor(), os.environ.get("CXX", "")))
    templates = b"".join((_HERE / name).read_bytes() for name in _TEMPLATES)
    return hashlib.sha256(source + templates + circumstances.encode(errors="surrogateescape")).hexdigest()[:24]
