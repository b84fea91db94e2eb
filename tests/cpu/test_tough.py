"""Generated kernels where something is in the way: threads of the caller, forks, compilers that fail or hang, caches that are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu import network as built
from lowtide.cpu import networks as made
from lowtide.ir.bodies import is_region
from lowtide.runtime import libraries


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, torch.Tensor, lowtide.Step]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval(), torch.randn(1, 3, 12, 12)
    return model, x, lowtide.optimize(model, (x,), exact=False)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_of_the_caller_run_one_after_the_other(net, threads: None) -> None:
    model, _, step = net
    given = [torch.randn(1, 3, 12, 12) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(each) for each in given]
    wrong: list[int] = []

    def run(at: int) -> None:
        wrong.extend(at for _ in range(20) if not torch.allclose(step(given[at]), wanted[at], atol=1e-4))

    runners = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for each in runners:
        each.start()
    for each in runners:
        each.join()
    assert not wrong


def test_a_forked_process_has_a_team_of_its_own(net, threads: None) -> None:
    _, x, step = net
    want = step(x)
    child = os.fork()
    if child == 0:  # nothing of the test runner may go on here
        try:
            os._exit(0 if torch.equal(step(x), want) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(step(x), want)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache for libraries; networks that this process has opened are forgotten."""
    monkeypatch.setattr(built, "directory", lambda: tmp_path)
    made._built.cache_clear()
    monkeypatch.setattr("lowtide.base.files._warned", set())
    return tmp_path


def networks_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("network-*.so"))


@pytest.mark.parametrize(("script", "said"), [
    ("exit 3", "failed"), ("kill -9 $$", "failed"), ("sleep 60", "stopped after"), ("exit 0", "left no library"),
])  # fmt: skip
def test_a_compiler_that_does_not_do_its_work(net, cold: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str) -> None:
    model, x, _ = net
    fake = cold / "fake"
    fake.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setattr(libraries, "_PATIENCE_SECONDS", 1)
    with pytest.warns(RuntimeWarning, match=f"torch's operators run: .*{said}"):
        step = lowtide.optimize(model, (x,), exact=False)
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
    assert not networks_in(cold)


def test_a_damaged_library_is_built_again(net, cold: Path) -> None:
    model, x, before = net
    lowtide.optimize(model, (x,), exact=False)
    (library,) = networks_in(cold)
    library.write_bytes(library.read_bytes()[:1000])
    made._built.cache_clear()
    step = lowtide.optimize(model, (x,), exact=False)
    assert any(map(is_region, step.plan.graph.nodes))
    assert torch.equal(step(x), before(x))


_SOURCE = 'extern "C" void lowtide_network(const void*) {}'
_BUILDS = f"from lowtide.cpu.network import network, team; team(); network({_SOURCE!r})"


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"LOWTIDE_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", _BUILDS], env=environment) for _ in range(2)]
    assert [each.wait(timeout=300) for each in both] == [0, 0]
    assert len(networks_in(tmp_path)) == 1


def test_another_machine_builds_its_own(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built.network(_SOURCE)
    monkeypatch.setattr(built, "processor", lambda: "flags: of another machine")
    built.network(_SOURCE)
    assert len(networks_in(cold)) == 2


def test_a_source_compiled_in_parts_is_the_same_network(net, cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, before = net
    monkeypatch.setattr(built, "_PART_LETTERS", 400)
    monkeypatch.setattr(built, "processors", lambda: 3)
    step = lowtide.optimize(model, (x,), exact=False)
    assert any(map(is_region, step.plan.graph.nodes))
    assert torch.equal(step(x), before(x))
