"""What `make gpu` runs on a GPU runs here on the null device, one part of each kind, on a small network: where it has rotted it is seen."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.models.workload import Workload
from bench.on_gpu import exact, graphed, limits, one, rates, survival
from bench.on_gpu import ground as standing
from bench.on_gpu.ground import Ground
from lowtide.cost.trials import Trials
from tests.gpu.conftest import NULL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or not NULL, reason="the bench itself runs on a GPU")


def _small(ground: Ground, name: str) -> Workload:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16 * 196, 10))
    made = Workload(model, (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))), lambda m, x, y: F.cross_entropy(m(x), y))
    return ground.moved(made)


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ground]:
    """As `bench.on_gpu.one` makes it: trials under the lock. Parts that run elsewhere neither wait for it nor stand still."""
    for name in ("launches", "level"):
        monkeypatch.setattr(Trials, name, getattr(Trials, name))
    monkeypatch.setattr(Ground, "subject", _small)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(standing, "PLACES", tmp_path)
    with open(tmp_path.parent / "lock", "a") as lock:
        monkeypatch.setattr(standing, "_lock_file", lambda: lock)
        one._try_alone()
        yield Ground.here()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flavour", ["bf16", "float32, graph"])
def test_training_runs_beside_eager(ground: Ground, flavour: str) -> None:
    (row,) = exact.rows(exact.Exact("", 0, flavour, "a/small one"), ground)
    assert row["verdict"] == "ran"
    assert row["promised_bytes"] > 0
    assert row["reserved_bytes"] > 0


def test_limits_are_kept_with_their_arenas(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARES", (100, 60))
    network = limits.Network("nowhere measured", limits.NETWORKS[0].entry, 1, "", 1, channels_last=True)
    rows = list(limits.rows(network, ground))
    assert [row["setting"] for row in rows] == ["eager", "no limit", "100%", "60%"]
    assert {row["verdict"] for row in rows[1:]} <= {"kept", "does not fit"}
    assert rows[2]["promised_ms"] > 0
    assert abs(rows[2]["measured_bytes"] - rows[2]["promised_bytes"]) <= 2**12  # with the arena that it keeps between steps


def test_what_people_use_runs(ground: Ground) -> None:
    (row,) = limits.peer_rows(limits.Network("", limits.NETWORKS[0].entry, 1, "", 1), "save_on_cpu", ground)
    assert row["reserved_bytes"] > 0


def test_a_step_is_captured_in_a_graph(ground: Ground) -> None:
    assert [row["setting"] for row in graphed.rows("", 1, "", ground)] == ["eager", "lowtide", "lowtide, graph"]


def test_a_process_that_is_held_to_its_limit_survives(ground: Ground) -> None:
    network = survival.Survivor("a small one", lambda: _small(ground, ""))
    rows = list(survival.rows(network, ground, shares=(100, 60), draws=1, steps=12))
    assert [row["limit"] for row in rows] == ["100%", "60%", "random"]
    assert all(row["verdict"] in ("lives", "does not fit") for row in rows)
    assert rows[0]["steps"] == 12
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_rates_are_the_gpus(ground: Ground) -> None:
    assert "to host 0 B/s" not in next(rates.rows(ground))["why"]


def test_only_parts_that_still_run_stand_still(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one that ended has left is a number that may be anybody's by now."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(standing, "send", lambda group, what: sent.append((group, what)))
    (standing.PLACES / "1").touch()
    with open(standing.PLACES / "2", "a") as running:
        fcntl.flock(running, fcntl.LOCK_SH)
        with ground.alone():
            assert sent == [(2, signal.SIGSTOP)]
    assert sent[1:] == [(2, signal.SIGCONT)]
    assert {each.name for each in standing.PLACES.glob("*")} == {"2", str(os.getpid())}
