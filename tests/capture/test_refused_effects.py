"""What a loss does beside computing and no step can do again is refused, and is as it was; files and the environment before it is done."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import csv
import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import queue
import re
import socket
import sqlite3
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide

X = torch.ones(2, 3)


def planned(loss: Callable[..., Any], model: nn.Module | None = None) -> Any:
    model = model or nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lowtide.optimize(model, X, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))


def refused(act: Callable[[], object], said: str) -> None:
    with pytest.raises(lowtide.CaptureError, match=said):
        planned(lambda model, x: (act(), model(x).sum())[1])


def counted() -> Iterator[int]:
    yield from itertools.count()


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "a generator": counted,
    "an expression": lambda: (number for number in range(9)),
    "a list": lambda: iter([*range(9)]),
    "a dictionary": lambda: iter(dict.fromkeys(range(9))),
    "a range": lambda: iter(range(9)),
    "backwards": lambda: reversed(range(8, -1, -1)),
    "a slice": lambda: itertools.islice(counted(), 9),
    "a cycle": lambda: itertools.cycle([0, 1]),
    "a map": lambda: map(int, "012345678"),
    "a chain": lambda: itertools.chain([0], range(1, 9)),
    "a zip": lambda: map(max, zip(range(9), counted(), strict=False)),
    "an enumeration": lambda: (number for number, _ in enumerate("abcdefgh")),
    "a tensor": lambda: iter(torch.arange(9)),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_is_there_before_is_refused_and_goes_on_once(kind: str):
    made = ITERATORS[kind]()
    refused(lambda: next(made), "has gone on, and Python cannot turn it back; take its next item before the step")
    assert next(made) == 1


SHARED: list[Iterator[int]] = [counted()]


class Source:
    """Keeps an iterator."""

    def __init__(self) -> None:
        self.numbers = counted()


class Fed(nn.Linear):
    """Takes a number from an iterator of its own in each forward."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.numbers = counted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(self.numbers)


def test_an_iterator_is_found_wherever_it_is_kept():
    said, source, sent, method = "has gone on", Source(), counted(), counted().__next__
    next(sent)
    for act in (lambda: next(SHARED[0]), lambda: next(source.numbers), lambda: sent.send(None), method):
        refused(act, said)
    with pytest.raises(lowtide.CaptureError, match=said):
        planned(lambda model, x: model(x).sum(), Fed())


def test_an_iterator_that_nobody_takes_from_is_let_through():
    waiting, done = counted(), iter([])
    assert planned(lambda model, x: model(x).sum() * (2 if waiting else 1) + sum(done))(X).isfinite()
    assert next(waiting) == 0


DATA = sqlite3.connect(":memory:")  # which somebody holds: Python 3.13 warns of one that nobody has closed
OPAQUE: dict[str, Callable[[], Iterator[Any]]] = {
    "matches": lambda: re.finditer("a", "aaaa"),
    "calls": lambda: iter(filled(queue.SimpleQueue()).get, None),
    "memory": lambda: iter(memoryview(b"abcd")),
    "rows": lambda: csv.reader(io.StringIO("1\n2\n3\n4\n")),
    "answers": lambda: DATA.execute("values (1), (2), (3), (4)"),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_iterator_that_does_not_say_where_it_is_is_refused_before_it_is_used(kind: str):
    made = OPAQUE[kind]()
    refused(lambda: next(made), r"reaches a \w+ by way of variable 'made' of .*test_refused_effects.py:\d+, which goes on each time")
    assert len([next(made) for _ in range(4)]) == 4


def filled(items: Any) -> Any:
    for number in range(4):
        items.put(number)
    return items


def test_what_cannot_be_put_back_is_done_once():
    numbers = filled(queue.SimpleQueue())
    with contextlib.closing(sqlite3.connect(":memory:")) as data:
        data.execute("create table found (number)")
        refused(numbers.get, "a SimpleQueue that it reaches is read or written; what the capture has done to it stays")
        refused(lambda: data.execute("insert into found values (1)"), "a Connection that it reaches is read or written; what .* stays")
        assert (numbers.qsize(), data.total_changes) == (3, 1)


def test_a_queue_is_refused_before_it_is_used():
    kept: queue.Queue[int] = filled(queue.Queue())
    for act in (lambda: kept.get(), lambda: kept.get_nowait(), lambda: kept.put(1), lambda: kept.put_nowait(1)):
        refused(act, r"calls Queue\.(get|put)\(")
    assert ([*kept.queue], kept.unfinished_tasks) == ([0, 1, 2, 3], 4)
    planned(lambda model, x: model(x).sum() * filled(queue.Queue()).get_nowait())  # of its own
    refused(kept.get, "a Queue that it reaches is read or written; what the capture has done to it stays")
    assert kept.qsize() == 3


def test_messages_to_others_are_refused_before_they_are_sent():
    (one, two), (here, there) = socket.socketpair(), multiprocessing.Pipe()
    with one, two, here, there, Path(__file__).open("rb", buffering=0) as written:
        two.send(b"a")
        for act in (lambda: one.sendall(b"b"), lambda: one.recv(1)):
            refused(act, r"calls socket\.\w+\(")
        for act in (lambda: here.send(1), lambda: here.send_bytes(b"1")):
            refused(act, r"calls Connection\.send")
        refused(lambda: os.read(written.fileno(), 1), r"calls os\.read\(")
        assert (one.recv(9), there.poll(), written.tell()) == (b"a", False, 0)


@pytest.mark.parametrize("made", [torch.from_numpy, torch.as_tensor, torch.asarray])
@pytest.mark.parametrize("size", [1, 4])
def test_an_array_is_not_written_by_way_of_a_tensor(made: Callable[[Any], torch.Tensor], size: int):
    kept = np.zeros(size, np.float32)
    refused(lambda: made(kept)[:1].add_(1), r"writes at .*test_refused_effects.py:\d+.* into an array of NumPy's")
    assert not kept.any()


class Called(nn.Module):
    """Calls a loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, x)


def test_a_tensor_on_an_array_of_the_programs_own_may_be_written():
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * torch.from_numpy(np.ones(3, np.float32)).add_(1)).sum()

    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        parameter.requires_grad_(False).copy_(torch.ones_like(parameter))
    step = lowtide.optimize(Called(model, loss), X)
    assert [step(X).item() for _ in range(2)] == [loss(model, X).item()] * 2


def test_a_large_array_is_looked_at():
    """Nobody keeps a copy of it."""
    kept = np.zeros((1 << 23) + 1)
    refused(lambda: kept.__setitem__(5, 1), "a ndarray that it reaches is read or written; what the capture has done to it stays")


class Local(threading.local):
    n = 0


VARIABLE, ENTERED = contextvars.ContextVar("variable", default=0), contextvars.ContextVar[int]("entered")


def set_more(holder: Any) -> None:
    holder.n = getattr(holder, "n", 0) + 1


# How something that is outside is made, what is done to it, what it holds, and what is said.
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any], str]] = {
    "a variable of the context": (lambda: VARIABLE, lambda it: it.set(it.get() + 1), lambda it: it.get(), "a ContextVar that it reaches"),
    "one without a value": (lambda: ENTERED, lambda it: it.set(1), lambda it: it.get(None), "a ContextVar that it reaches"),
    "a thread's own": (threading.local, set_more, lambda it: dict(vars(it)), "attribute 'n' of a _local is set"),
    "of a class": (Local, set_more, lambda it: it.n, "attribute 'n' of a Local is set"),
    "an array": (lambda: np.zeros(3), lambda it: it.__iadd__(1), np.copy, "a ndarray that it reaches"),
    "an array's item": (lambda: np.zeros((2, 2), np.int8), lambda it: it.put(3, 7), np.copy, "a ndarray that it reaches"),
    "an output": (lambda: np.ones(3), lambda it: np.add(it, 1, out=it), np.copy, "a ndarray that it reaches"),
    "an array of objects": (lambda: np.array([None, "a"]), lambda it: it.put(0, "b"), np.copy, "a ndarray that it reaches"),
    "arrays in a list": (lambda: [np.zeros(3)], lambda it: it[0].fill(2), lambda it: it[0].copy(), "a ndarray that it reaches"),
    "a set": (set, lambda it: it.add(len(it)), set, "a set that it reaches had 1 items and has 2"),
    "a chain": (collections.ChainMap, lambda it: it.update(n=it.get("n", 0) + 1), dict, "had 1 at 'n' and has 2"),
    "a view of memory": (lambda: memoryview(bytearray(3)), lambda it: it.__setitem__(0, it[0] + 1), bytes, "a memoryview that it reaches"),
    "mapped memory": (lambda: mmap.mmap(-1, 8), lambda it: it.__setitem__(0, it[0] + 1), lambda it: it[:], "a mmap that it reaches"),
    "a set of references": (weakref.WeakSet, lambda it: it.add([nn, np, os][len(it)]), len, "a set that it reaches"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_outside_is_refused_and_as_it_was(kind: str):
    make, act, held, said = KEPT[kind]
    it = make()
    before = held(it)
    refused(lambda: act(it), said)
    assert np.array_equal(held(it), before) if isinstance(before, np.ndarray) else held(it) == before


@pytest.mark.parametrize("make", [lambda: [0] * 9, lambda: collections.defaultdict(int)])
def test_counts_by_a_label_of_the_batch_are_refused_and_as_they_were(make: Callable[[], Any]):
    counts, model = make(), nn.Linear(3, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        counts[x.argmax().item()] += 1
        return model(x).sum()

    with pytest.raises(lowtide.CaptureError, match="had 1 at 0 and has 2"):
        lowtide.optimize(model, (torch.ones(2, 3),), loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert counts == make()


def test_a_count_that_is_given_to_an_operator_is_named_with_the_operator():
    class Counted(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return nn.functional.dropout(super().forward(x), min(0.9, self.count / 10))

    model = Counted(3, 3)
    with pytest.raises(
        lowtide.CaptureError, match=r"changes its attribute 'count' .*More closely: a number that is .* given to dropout\(\)"
    ):
        lowtide.optimize(model, (X,), loss=lambda model, x: model(x).sum(), optimizer=torch.optim.SGD(model.parameters(), 0.1))


def opened(path: Path, mode: str) -> Any:
    return open(path, mode)


OUTSIDE: dict[str, Callable[[Path], object]] = {
    "open": lambda path: opened(path, "a").write("b"),
    "write_text": lambda path: path.write_text("b"),
    "csv": lambda path: csv.writer(opened(path, "w")).writerow([1]),
    "pickle": lambda path: pickle.dump(1, opened(path, "wb")),
    "torch": lambda path: torch.save(X, path),
    "numpy": lambda path: np.save(path.with_suffix(".npy"), np.ones(2)),
    "descriptor": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "remove": lambda path: path.unlink(),
    "rename": lambda path: path.rename(path.with_suffix(".other")),
    "folder": lambda path: path.with_suffix(".folder").mkdir(),
    "folders": lambda path: os.makedirs(path.with_suffix(".folder") / "inner", exist_ok=True),
    "process": lambda path: subprocess.run(["rm", str(path)]),
    "shell": lambda path: os.system(f"rm {path}"),
    "environment": lambda path: os.environ.__setitem__("LOWTIDE_TEST_ONCE", "b"),
    "caught": lambda path: caught(lambda: path.write_text("b")),
}


def caught(act: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        act()


@pytest.mark.parametrize("kind", OUTSIDE)
def test_files_and_the_environment_are_refused_at_the_call(kind: str, tmp_path: Path):
    (path := tmp_path / "written").write_text("a")
    refused(lambda: OUTSIDE[kind](path), r"test_refused_effects.py:\d+.*would be done once, by the capture.*behind the step")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"written": "a"}
    assert "LOWTIDE_TEST_ONCE" not in os.environ


def test_what_leaves_the_outside_as_it_is_goes_through(tmp_path: Path):
    (path := tmp_path / "scale").write_text("3")

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        os.makedirs(tmp_path, exist_ok=True)
        torch.save([1], io.BytesIO())
        os.environ["PATH"] = os.environ["PATH"]
        return model(x).sum() * float(path.read_text())

    assert planned(loss)(X).isfinite()


def test_a_writer_leads_to_its_file():
    file = io.StringIO()
    writer = csv.writer(file)
    refused(lambda: writer.writerow([1]), "a StringIO that it reaches is read or written; what the capture has done to it stays")
    assert file.getvalue() == "1\r\n"


ONES, PARAMETER = torch.ones(3), nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("of", ["parameter", "batch", "tensor outside", "parameter outside"])
def test_an_attribute_of_a_tensor_that_is_set_is_refused(of: str):
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tensor = {"parameter": model.weight, "batch": x, "tensor outside": ONES, "parameter outside": PARAMETER}[of]
        tensor.uses = getattr(tensor, "uses", 0) + 1
        out = model(x)
        out.kept = True  # of the step's own
        return out.sum()

    with pytest.raises(lowtide.CaptureError, match="sets attribute 'uses' of a tensor that was there before"):
        planned(loss)
    assert not any(hasattr(each, "uses") for each in (X, ONES, PARAMETER))


def test_an_attribute_of_a_parameter_is_read_as_it_is_now():
    model = nn.Linear(3, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.weight.known = True  # as it is
        return model(x).sum() * getattr(model.weight, "scale", 1.0)

    model.weight.known = True
    step = planned(loss, model)
    for scale in (1.0, 2.0, 3.0):
        model.weight.scale = scale
        expected = loss(model, X)
        assert torch.equal(step(X), expected.detach())
