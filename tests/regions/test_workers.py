"""Bodies are compiled beside one another: each once, a process that ends leaves its bodies to this one, and none is left over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.cost.trial_process import WorkerExitedError
from lowtide.regions import inductor

TEXTS = {f"key{number}": f"body{number}" for number in range(12)}
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """In place of a process: answers as it is told to, and knows whether it was ended."""

    def __init__(self, answer: Answer, begins: bool = True) -> None:
        self.answer, self.begins, self.has_ended = answer, begins, False
        self.reasons: dict[str, str] = {}
        self.hears_all = False  # what comes after the last body, too

    def begin(self) -> None:
        if not self.begins:
            raise WorkerExitedError("it ended with code 1")

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return self.answer(request) if "key" in request or self.hears_all else {"reasons": dict(self.reasons)}

    def end(self) -> None:
        self.has_ended = True


class Here:
    """What compiles in this process."""

    def __init__(self, take: Callable[[str], object], reasons: dict[str, str] | None = None) -> None:
        self.take, self.reasons = take, reasons or {}

    def finish(self) -> dict[str, str]:
        return self.reasons


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Worker]]:
    def starts(answer: Answer, *, processes: int = 3, begins: bool = True, hears_all: bool = False) -> list[Worker]:
        made: list[Worker] = []

        def start() -> Worker:
            made.append(Worker(answer, begins))
            made[-1].hears_all = hears_all
            return made[-1]

        monkeypatch.setattr(inductor, "processes", lambda: processes)
        monkeypatch.setattr(inductor, "_started", start)
        return made

    return starts


def test_each_is_compiled_once_here_or_elsewhere(started: Callable[..., list[Worker]]) -> None:
    elsewhere, here, shares = list[str](), list[str](), list[float]()
    taken, begun = threading.Event(), threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        assert TEXTS[request["key"]] == request["body"]
        elsewhere.append(request["key"])
        taken.set()
        begun.wait(60)
        return {}

    def compile_here(key: str) -> None:
        begun.set()
        taken.wait(60)  # until the others have something, too
        here.append(key)

    made = started(answer)
    assert inductor.compile_all(TEXTS, lambda: Here(compile_here), shares.append) == {}
    assert sorted(elsewhere + here) == sorted(TEXTS)
    assert elsewhere
    assert here
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(made) == 2
    assert all(worker.has_ended for worker in made)


@pytest.mark.parametrize("at", ["its first body", "its kernels"])
def test_what_a_process_leaves_is_done_here(started: Callable[..., list[Worker]], at: str) -> None:
    asked, here = threading.Event(), list[str]()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        if at == "its kernels" and "key" in request:
            return {}
        raise WorkerExitedError("it was ended by SIGKILL, as the system does where memory runs out")

    def compile_here(key: str) -> None:
        asked.wait(60)
        here.append(key)

    made = started(answer, processes=2, hears_all=True)
    assert inductor.compile_all(TEXTS, lambda: Here(compile_here), lambda share: None) == {}
    assert sorted(here) == sorted(TEXTS)
    assert made


def test_without_processes_all_is_done_here(started: Callable[..., list[Worker]]) -> None:
    here: list[str] = []
    started(lambda request: {}, begins=False)
    inductor.compile_all(TEXTS, lambda: Here(here.append), lambda share: None)
    assert here == list(TEXTS)
    few = dict(list(TEXTS.items())[:2])
    made = started(lambda request: {})
    inductor.compile_all(few, lambda: Here(here.append), lambda share: None)
    assert made == []
    assert here == [*TEXTS, *few]


def test_reasons_are_told(started: Callable[..., list[Worker]]) -> None:
    asked, begun = threading.Event(), threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        begun.wait(60)
        made[-1].reasons[request["key"]] = "inductor cannot compile it (elsewhere)"
        return {}

    def compile_here(key: str) -> None:
        begun.set()
        asked.wait(60)
        here.reasons[key] = "inductor cannot compile it (here)"

    here = Here(compile_here)
    made = started(answer, processes=2)
    reasons = inductor.compile_all(TEXTS, lambda: here, lambda share: None)
    assert reasons.keys() == TEXTS.keys()
    assert set(reasons.values()) == {f"inductor cannot compile it ({where})" for where in ("here", "elsewhere")}


def test_an_interruption_ends_all(started: Callable[..., list[Worker]]) -> None:
    begun = threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        begun.wait(60)
        return {}

    made = started(answer)

    def interrupted(key: str) -> None:
        begun.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inductor.compile_all(TEXTS, lambda: Here(interrupted), lambda share: None)
    assert made
    assert all(worker.has_ended for worker in made)


def test_what_begins_ahead_is_used_or_ended(started: Callable[..., list[Worker]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "begin", lambda: None)
    monkeypatch.setattr(inductor, "has_compiled", lambda: False)
    made = started(lambda request: {}, processes=2)
    with inductor.begun_ahead("cpu"):
        inductor.compile_all(TEXTS, lambda: Here(lambda key: None), lambda share: None)
    with inductor.begun_ahead("cpu"):
        pass
    with inductor.begun_ahead("cuda:0"):
        pass
    assert len(made) == 2
    assert all(worker.has_ended for worker in made)
    assert not inductor._begun
