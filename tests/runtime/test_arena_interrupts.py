"""Ctrl-C at any moment of a step leaves nothing begun: the next step is recorded or served as if there had been none."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lowtide.runtime.arena import allocator as allocator_module
from lowtide.runtime.arena import arena as arena_module
from lowtide.runtime.arena.allocator import Allocator
from lowtide.runtime.arena.arena import Arena
from tests.arenas import FirstFit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")
_FILES = {arena_module.__file__, allocator_module.__file__, __file__}
_BYTES = 8 * 2**20


def step() -> list[Any]:
    made = torch.empty(_BYTES, dtype=torch.uint8)
    return [made.numel()]


class Interrupt:
    """Raises KeyboardInterrupt at the nth instruction that the arena, the allocator's Python side or the step comes to."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.came = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        # A finalizer's errors are nobody's: Python prints and forgets them.
        if frame.f_code.co_filename not in _FILES or frame.f_code.co_name in ("_drop", "interrupted"):
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "line", "opcode", "return") and not self.came:
            self.left -= 1
            if self.left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Whether a call came to its nth instruction, and was interrupted there."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt.came


def moments(call: Callable[[int], bool]) -> Iterator[int]:
    """Every moment until there are no more."""
    at = 0
    while call(at):
        yield at
        at += 1
    assert at > 100  # there is something to interrupt


@pytest.mark.parametrize("runs_before", [0, 1, 2], ids=["recorded", "planned", "served"])
def test_an_interrupt_at_any_instruction_leaves_nothing_begun(allocator: Allocator, runs_before: int):
    arenas: list[Arena] = []

    def interrupted_at(at: int) -> bool:
        arenas[:] = [arena := Arena(allocator, FirstFit.of)]
        for _ in range(runs_before):
            arena.run("program", step)
        return interrupted(lambda: arena.run("program", step), at)

    for at in moments(interrupted_at):
        (arena,) = arenas
        for _ in range(3):
            assert arena.run("program", step) == [_BYTES]
        assert not arena.runs_without, f"after an interrupt at instruction {at}"
        assert (arena.counts.requests, arena.counts.served, arena.counts.elsewhere, arena.live_tensors) == (1, 1, 0, 0)
        other, counts = allocator.record(lambda: allocator.aside(step))
        assert other == [_BYTES]
        assert counts.size_bytes.tolist() == []


def test_interrupts_let_no_memory_grow(allocator: Allocator):
    def interrupted_at(at: int) -> bool:
        arena = Arena(allocator, FirstFit.of)
        arena.run("program", step)
        return interrupted(lambda: arena.run("program", step), at)

    gc.collect()
    before = _mapped_bytes()
    count = sum(1 for _ in moments(interrupted_at))
    gc.collect()
    assert _mapped_bytes() - before < min(count, 20) * _BYTES


def test_another_programs_plan_that_is_interrupted_leaves_the_first_one_its_arena(allocator: Allocator):
    def larger() -> list[Any]:
        return [torch.empty(2 * _BYTES, dtype=torch.uint8).numel()]

    arenas: list[Arena] = []

    def interrupted_at(at: int) -> bool:
        arenas[:] = [arena := Arena(allocator, FirstFit.of)]
        for call in (step, step, larger):
            arena.run(call, call)
        return interrupted(lambda: arena.run(larger, larger), at)

    for _ in moments(interrupted_at):
        (arena,) = arenas
        for call in (step, larger):
            arena.run(call, call)
            assert (arena.counts.requests, arena.counts.served) == (1, 1)


def test_what_is_served_cannot_fail_for_want_of_memory(tmp_path: Path):
    """A step that the system's memory no longer suffices for runs on in its arena, and only there."""
    source = """if True:
        import resource, sys
        from pathlib import Path
        import torch
        from lowtide.runtime.arena import native
        from lowtide.runtime.arena.allocator import Allocator
        from lowtide.runtime.arena.arena import Arena
        from tests.arenas import FirstFit

        def step():
            made = [torch.ones(2**24, dtype=torch.uint8) for _ in range(8)]
            return [sum(int(each[-1]) for each in made)]

        arena = Arena(Allocator(native.load(Path(sys.argv[1]))), FirstFit.of)
        print(arena.run("a", step), arena.run("a", step))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**22,) * 2)
        print(arena.run("a", step), arena.counts.served)
        try:
            step()
        except RuntimeError as error:
            print("memory" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[8] [8]", "[8] 8", "True"], done.stderr


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
