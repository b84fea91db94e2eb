"""What is to be measured on a GPU runs: here on the CPU in its place, one part of each kind, on a network of two layers."""

import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

from bench.models.workload import Workload
from bench.on_gpu import __main__ as runner
from bench.on_gpu import exact, graphed, large, limits, one, worth
from bench.on_gpu.ground import Ground, Row
from bench.on_gpu.parts import PARTS, Part


def _small(ground: Ground, name: str) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 10))
    return Workload(model, (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))), lambda m, x, y: F.cross_entropy(m(x), y))


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setattr(Ground, "subject", _small)
    benchmark = torch.backends.cudnn.benchmark
    yield Ground("cpu", dry=True)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def test_each_part_has_a_name_of_its_own():
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("flavour", ["float32", "bf16", "channels_last", "bf16, flash"])
def test_training_is_eagers_and_the_peak_is_promised(ground: Ground, flavour: str):
    (row,) = exact.rows(exact.Exact("", 0, flavour, "a/small one"), ground)
    assert row["verdict"] == "right"
    assert row["measured_bytes"] == row["promised_bytes"] > 0


def test_limits_are_kept(ground: Ground):
    network = limits.Network("nowhere measured", limits.NETWORKS[0].entry, 1, "", 1)
    rows = list(limits.rows(network, ground))
    assert [row["setting"] for row in rows] == ["eager", "no limit", "100%", "80%", "60%", "40%", "20%"]
    assert all(row["verdict"] in ("kept", "does not fit") for row in rows[1:])
    assert rows[1]["measured_ratio"] > 0


@pytest.mark.parametrize("peer", ["save_on_cpu", "budget 0.5"])
def test_what_people_use_is_measured(ground: Ground, peer: str):
    with torch._functorch.config.patch("activation_memory_budget", 1.0):
        (row,) = limits.peer_rows(limits.Network("", limits.NETWORKS[0].entry, 1, "", 1), peer, ground)
    assert row["measured_bytes"] > 0 < row["step_ms"]


def test_a_step_is_timed_beside_eager(ground: Ground):
    assert [row["setting"] for row in graphed.rows("", 1, "", ground)] == ["eager", "lowtide", "lowtide, graph"]


def test_each_part_of_a_fast_step_is_timed_against_a_step_without_it(ground: Ground, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worth, "SETTINGS", worth.SETTINGS[:5])  # those that compile no region, which takes long
    rows = {row["setting"]: row for row in worth.rows(limits.Network("nowhere measured", limits.NETWORKS[0].entry, 1, "", 1), ground)}
    assert list(rows) == ["operators", "graph", "fused update", "algebra that rounds", "padding"]
    assert all(row["verdict"] == "measured" and row["step_ms"] > 0 for row in rows.values())
    assert rows["padding"]["why"] == "over algebra that rounds"


@pytest.mark.parametrize("what", ["LoRA", "whole"])
def test_a_large_model_is_fine_tuned_within_a_limit(what: str):
    pytest.importorskip("transformers", exc_type=ImportError)
    (row,) = large.rows(what, large.LIMITS_GIB[0], Ground("cpu", dry=True))
    assert row["verdict"] == "runs"
    assert row["measured_bytes"] > 0 < row["step_ms"]


def test_a_part_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def rows(ground: Ground) -> Iterator[Row]:
        yield {"verdict": "right"}
        raise RuntimeError("out of luck")

    monkeypatch.setattr(one, "PARTS", (Part("it", rows, 1),))
    monkeypatch.setattr(sys, "argv", ["one", "it"])
    one.main()
    assert '"verdict": "right"' in (out := capsys.readouterr().out)
    assert '"why": "RuntimeError: out of luck"' in out


def test_what_dies_or_hangs_is_told_and_what_there_is_no_time_for_is_left(monkeypatch: pytest.MonkeyPatch):
    code = 'import sys, time; print(\'{"verdict": "right"}\', flush=True); sys.exit(3) if "dies" in sys.argv[-1] else time.sleep(60)'
    monkeypatch.setattr(runner, "_command", lambda name: [sys.executable, "-c", code, name])
    parts = [Part(name, partial(_none), 2) for name in ("dies", "hangs", "late")]
    found = list(runner.run(parts[:2], time.monotonic() + 100))
    assert [(row["part"], row["verdict"]) for row in found] == [
        ("dies", "right"),
        ("dies", "dead"),
        ("hangs", "right"),
        ("hangs", "time-out"),
    ]
    assert list(runner.run(parts[2:], time.monotonic() - 1)) == []


def test_a_word_that_is_no_row_and_a_process_that_is_left_behind_take_nothing(monkeypatch: pytest.MonkeyPatch):
    late = 'import time; time.sleep(20); print(\'{"verdict": "too late"}\')'
    code = f"""import subprocess, sys
subprocess.Popen([sys.executable, "-c", {late!r}], start_new_session=True)
print('{{a word}}\\n{{"verdict": "right"}}\\n{{"verdict": "cut', flush=True)"""
    monkeypatch.setattr(runner, "_command", lambda name: [sys.executable, "-c", code])
    found = list(runner.run([Part("it", partial(_none), 100), Part("the next", partial(_none), 100)], time.monotonic() + 200))
    assert [(row["part"], row["verdict"]) for row in found] == [("it", "right"), ("the next", "right")]


def test_a_part_that_was_cut_off_is_run_again():
    verdicts = {"whole": ["kept", "does not fit"], "late": ["kept", "time-out"], "died": ["dead"], "wrong": ["different"]}
    rows = [{"part": part, "verdict": verdict} for part, each in verdicts.items() for verdict in each]
    assert runner.ended(rows) == {"whole", "wrong"}


def test_what_is_worth_most_comes_first():
    kinds = list(dict.fromkeys(part.name.partition(":")[0] for part in PARTS))
    assert kinds[:5] == ["kernels", "exact", "limits", "survival", "worth"]


def _none(ground: Ground) -> Iterator[Row]:
    yield from ()
