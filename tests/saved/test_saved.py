"""A frozen function goes through a file, and is the same in a process that knows nothing of the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.saved.saved_nets import NETS, Between, Given, Pair, between, plain, words

_ELSEWHERE = """
import sys, torch, lowtide
args, wanted = torch.load(sys.argv[2], weights_only=False)
fn = lowtide.load_frozen(sys.argv[1])
def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.stride() == other.stride()
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other
assert not any(name.startswith("tests") for name in sys.modules)
avoided = ("lowtide.capture", "lowtide.planning", "lowtide.placement.", "torch._dynamo", "torch.distributed.fsdp")
assert not any(name.startswith(avoided) for name in sys.modules)
print(all(same(wanted, fn(*args)) for _ in range(4)))
"""


def step_of(made: tuple[nn.Module, tuple[Any, ...]]) -> tuple[lowtide.Step, tuple[Any, ...]]:
    model, args = made
    return lowtide.optimize(model.eval(), args, exact=False), args


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.lowtide"


@pytest.mark.parametrize("net", NETS)
def test_it_gives_the_same_bits_in_a_process_without_the_model(net: Any, path: Path) -> None:
    torch.manual_seed(0)
    step, args = step_of(net())
    step.save_frozen(path, *args)
    torch.save((args, step.frozen(*args)(*args)), f"{path}.pt")
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parents[1])}
    command = [sys.executable, "-c", _ELSEWHERE, str(path), f"{path}.pt"]
    found = subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "True", found.stderr


def test_it_is_as_the_function_that_was_not_saved(path: Path) -> None:
    step, (x,) = step_of(between())
    step.save_frozen(path, x)
    fn, loaded = step.frozen(x), lowtide.load_frozen(path)
    assert isinstance(loaded, lowtide.Frozen)
    assert repr(loaded) == repr(fn)
    assert loaded.held_bytes == fn.held_bytes
    with pytest.raises(lowtide.BatchError, match="a frozen function is for one shape"):
        loaded(torch.randn(1, 3, 7, 6))
    with pytest.raises(lowtide.BatchError, match="expected float32"):
        loaded(x.double())


@pytest.mark.parametrize("net", NETS)
def test_what_it_takes_is_said_before_a_weight_is_read(net: Any, path: Path) -> None:
    step, args = step_of(net())
    step.save_frozen(path, *args)
    needs, file = lowtide.frozen_needs(path), bytearray(path.read_bytes())
    loaded = lowtide.load_frozen(path, memory=needs.peak_bytes)
    assert loaded.held_bytes == needs.held_bytes
    assert needs.call_bytes >= sum(arg.nbytes for arg in args if isinstance(arg, Tensor))
    file[-65] ^= 255  # of the last weight, or behind it
    path.write_bytes(file)
    assert lowtide.frozen_needs(path) == needs
    with pytest.raises(lowtide.BudgetError, match=f"{path}: expected .* got one that holds .* raise `memory`") as caught:
        lowtide.load_frozen(path, memory=needs.peak_bytes - 1)
    assert caught.value.smallest_peak_bytes == needs.peak_bytes


def test_a_limit_of_a_loaded_function_is_in_bytes(path: Path) -> None:
    step, (x,) = step_of(between())
    step.save_frozen(path, x)
    for memory in ("50%", {"cuda": "1GiB"}, {"cpu": "1GiB", "host": "1GiB"}):
        with pytest.raises(ValueError, match=rf"memory: expected bytes, .*no peak to take a share of.*; got {re.escape(repr(memory))}"):
            lowtide.load_frozen(path, memory=memory)


def test_batches_by_name_and_values_that_are_fixed(path: Path) -> None:
    model, (ids, shift) = words()
    batch = {"ids": ids, "shift": shift, "scale": 2.0}
    step = lowtide.optimize(model.eval(), batch, exact=False)
    step.save_frozen(path, **batch)
    loaded = lowtide.load_frozen(path)
    assert torch.equal(loaded(**batch)["logits"], step(**batch)["logits"])
    for wrong in ({**batch, "scale": 3.0}, {"ids": ids, "shift": shift}):
        with pytest.raises(lowtide.BatchError):
            loaded(**wrong)
    with pytest.raises(lowtide.BatchError):
        loaded(*batch.values())


def test_weights_that_are_one_are_saved_once(path: Path) -> None:
    model, args = words()
    model.embed, model.out = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)
    model.out.weight = model.embed.weight
    step, args = step_of((model, args))
    step.save_frozen(path, *args)
    weights_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))  # a tied one counts once
    assert weights_bytes < path.stat().st_size < weights_bytes + 16 * 1024


def test_the_file_is_needed_no_more_once_it_is_loaded(path: Path) -> None:
    step, (ids, shift) = step_of(words())
    step.save_frozen(path, ids, shift)
    wanted, loaded = step(ids, shift), lowtide.load_frozen(path)
    path.write_bytes(bytes(path.stat().st_size))
    path.write_bytes(b"")
    assert torch.equal(loaded(ids, shift)["logits"], wanted["logits"])


def test_calls_are_right_in_threads_and_in_inference_mode(path: Path) -> None:
    step, (x,) = step_of(plain())
    step.save_frozen(path, x)
    before = step(x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        loaded = lowtide.load_frozen(path)
        assert torch.equal(loaded(x), before)
    batches = [torch.randn_like(x) for _ in range(4)]
    wanted, found = [step(each) for each in batches], dict[int, list[Tensor]]()
    threads = [threading.Thread(target=lambda at=at: found.setdefault(at, [loaded(batches[at]) for _ in range(20)])) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, wanted[at]) for at in range(4) for each in found[at])


def test_weights_are_those_of_the_moment(path: Path) -> None:
    model, (x,) = plain()
    step = lowtide.optimize(model.eval(), (x,), exact=False)
    before = step(x)
    step.save_frozen(path, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(lowtide.load_frozen(path)(x), before)
    step.save_frozen(path, x)
    assert torch.equal(lowtide.load_frozen(path)(x), step(x))
    assert not torch.equal(step(x), before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda y: Pair(y, y), "got a Pair"),
        (lambda y: {(1, 2): y}, "got a dict"),
        (lambda y: y[y[:, 0] > 0], ""),
        (lambda y: torch.empty_like(y), "empty"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(make: Any, said: str, path: Path) -> None:
    model = Given(make).eval()
    x = torch.randn(3, 4)
    try:
        step = lowtide.optimize(model, (x,), exact=False)
    except lowtide.CaptureError:
        return
    with pytest.raises(lowtide.StepError, match=said):
        step.save_frozen(path, x)
    assert not path.exists()


def test_a_step_that_cannot_be_frozen_cannot_be_saved(path: Path) -> None:
    step = lowtide.optimize(nn.Linear(3, 2), (torch.ones(2, 3),))
    with pytest.raises(lowtide.StepError, match="expected an inference function with generated kernels"):
        step.save_frozen(path, torch.ones(2, 3))


def test_a_batch_of_another_shape_is_saved_for_itself(path: Path) -> None:
    model = Between().eval()
    step, other = lowtide.optimize(model, (torch.randn(1, 3, 6, 6),), exact=False), torch.randn(2, 3, 8, 8)
    step.save_frozen(path, other)
    assert torch.equal(lowtide.load_frozen(path)(other)["all"], step(other)["all"])


def test_it_is_loaded_onto_the_cpu_whatever_the_default_is(path: Path) -> None:
    step, (x,) = step_of(between())
    step.save_frozen(path, x)
    with torch.device("meta"):
        loaded = lowtide.load_frozen(path)
    assert torch.equal(loaded(x)["all"], step(x)["all"])
