"""The `golden` fixture (texts under tests/golden, written anew with `--update-golden`), hypothesis, tests that are long or slow."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: how long an example takes is the bench's business.
settings.register_profile("lowtide", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI asks whether a change is right, always with the same few examples; new ones are looked for everywhere else.
settings.register_profile("ci", parent=settings.get_profile("lowtide"), derandomize=True, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "lowtide")

GOLDEN = Path(__file__).parent / "golden"
LONG, SLOW = Path(__file__).parent / "long.txt", Path(__file__).parent / "slow.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the texts under tests/golden as they are now, to be looked at in the diff"
    )
    parser.addoption("--long", action="store_true", help="run the tests that tests/long.txt names, and no others")
    parser.addoption("--quick", action="store_true", help="leave out what tests/slow.txt names too: tests, or whole files")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Have the search's kernels compiled before there are workers: each of them would compile all that it does not find."""
    if getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        from lowtide.planning.warm_up import warm_up_planning
        from lowtide.schedule import Auto

        warm_up_planning(Auto(), limited=True)


def pytest_collection_finish() -> None:
    """What was imported stays, and the collector leaves it out: to look at all of it takes a second, and many tests ask it to."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, or all others with `--long`. A test that is asked for by name runs."""
    if any("::" in arg for arg in config.args):
        return
    named, wanted = set(LONG.read_text(encoding="utf-8").splitlines()), config.getoption("--long")
    slow = set(SLOW.read_text(encoding="utf-8").splitlines()) if config.getoption("--quick") else set()
    left_out = [item for item in items if (item.nodeid in named) is not wanted or not slow.isdisjoint(_names(item))]
    items[:] = [item for item in items if (item.nodeid in named) is wanted and slow.isdisjoint(_names(item))]
    config.hook.pytest_deselected(items=left_out)


def _names(item: pytest.Item) -> set[str]:
    """What may stand for a test in `slow.txt`: its file, its function, itself."""
    return {item.nodeid.partition("::")[0], item.nodeid.partition("[")[0], item.nodeid}


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("relu.txt", text)`: the text is the one that is kept under that name."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.is_file(), f"no golden text {name}: run pytest --update-golden and look at it"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="module")
def all_is_looked_at() -> Iterator[None]:
    """The collector looks at what was imported, too, as in a process whose owner has frozen nothing."""
    from lowtide.base.process import _Aside

    gc.unfreeze()
    _Aside.left_out = 0
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def always_generated() -> Iterator[None]:
    """Kernels are generated where they can be, and run by as many threads as are asked for, however fast that is here and now."""
    from lowtide.cpu import networks
    from lowtide.cpu.executable import NetworkCalls
    from lowtide.cpu.trial import tuned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "is_faster", lambda *_: True)
        patch.setattr(networks, "tuned", lambda staged, most, placing: tuned(staged, 0, placing))
        patch.setattr(networks, "NetworkCalls", partial(NetworkCalls, always=True))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_process_for_trials() -> Iterator[None]:
    """The process in which calls are tried stays for the next test: to start another takes as long as ten of them."""
    from lowtide.cost import trial_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_process, "IDLE_S", 600.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def little_is_searched(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A search for which no effort is named is a seventh as long: few tests ask how much it finds, and those say how far it is to look.

    With `--long`, and in processes that tests start, it goes as far as users have it.
    """
    from lowtide.planning import request as asked
    from lowtide.remat.sweep import Sweep

    usual = asked._SWEEPS["normal"]
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--long"):
            patch.setitem(asked._SWEEPS, "normal", Sweep(max_states=900, max_runs=12_000_000))
        yield usual


@pytest.fixture
def usual_search(little_is_searched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no effort is named, the search goes as far as users have it."""
    from lowtide.planning import request as asked

    monkeypatch.setitem(asked._SWEEPS, "normal", little_is_searched)


@pytest.fixture(autouse=True, scope="session")
def nothing_searched_is_kept() -> Iterator[None]:
    """Tests search for themselves, and leave nothing for others. One that is about what is kept names a folder."""
    from lowtide.planning import search_cache as remembered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "directory", lambda: None)
        yield
