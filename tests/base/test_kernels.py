"""Kernels are kept where they can be, and compiled anew where what was kept is missing, damaged, or of other sources."""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from lowtide.base import files, kernels
from tests.strangers import as_stranger, bare, reachable

_CALLED = """
from lowtide.base.kernels import kernel

FACTOR = 10

@kernel
def scaled(number):
    return number * FACTOR
"""
_CALLING = """
from typing import NamedTuple

from lowtide.base.kernels import kernel

from called_by_kernels import scaled

@kernel(nogil=True)
def doubled(number):
    return scaled(number) * 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two modules of kernels, of which one calls the other's."""
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(kernels._config, "CACHE_DIR", "")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "called_by_kernels.py").write_text(_CALLED)
    (tmp_path / "calling_kernels.py").write_text(_CALLING)
    yield tmp_path
    for name in ("called_by_kernels", "calling_kernels"):
        sys.modules.pop(name, None)
    kernels._own_folder.cache_clear()


def imported(folder: Path) -> ModuleType:
    """The modules, as another process would find them."""
    kernels._own_folder.cache_clear()
    for name in ("called_by_kernels", "calling_kernels"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def was_kept(module: ModuleType, argument: object = 3, expected: object = 60) -> bool:
    """Whether a call was answered by what was kept."""
    assert module.doubled(argument) == expected
    kept, compiled = (sum(each.values()) for each in (module.doubled._cache_hits, module.doubled._cache_misses))
    assert kept + compiled == 1
    return bool(kept)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbc"))


def test_what_was_compiled_is_kept_beside_its_source(folder: Path):
    assert [was_kept(imported(folder)) for _ in range(3)] == [False, True, True]
    assert {path.parent for path in files_in(folder)} == {folder / "__pycache__"}
    assert not (folder / "cache").exists()
    assert not was_kept(imported(folder), 1.5, 30.0)  # other types are another kernel
    assert was_kept(imported(folder))
    assert was_kept(imported(folder), 1.5, 30.0)


def as_in_a_wheel(folder: Path, settings: dict[str, str]) -> Path:
    """What a wheel brings of these modules, compiled by a process for another processor; the folder that has nothing else."""
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{folder}", "NUMBA_CACHE_DIR": str(folder / "kept")} | settings
    subprocess.run([sys.executable, "-c", "import calling_kernels; calling_kernels.doubled(3)"], env=environment, check=True)
    brought = folder / "brought"
    brought.mkdir()
    for path in files_in(folder / "kept"):
        shutil.move(path, brought / path.name)
    return brought


BASELINE = {"NUMBA_CPU_NAME": kernels.BASELINES.get(platform.machine(), ""), "NUMBA_CPU_FEATURES": ""}


@pytest.mark.skipif(platform.machine() not in kernels.BASELINES, reason="no wheel for this processor brings kernels")
def test_what_a_wheel_brings_is_loaded_and_nothing_is_kept_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    brought = as_in_a_wheel(folder, BASELINE)
    assert not kernels.is_at_hand(imported(folder).doubled)
    monkeypatch.setattr(kernels, "BUILT", brought)
    module = imported(folder)
    assert kernels.is_at_hand(module.doubled)
    assert was_kept(module)
    assert files_in(folder) == files_in(brought)
    assert not was_kept(imported(folder), 1.5, 30.0)  # of other types there is none: it is compiled
    monkeypatch.setattr(kernels._config, "CPU_NAME", "x86-64")  # as somebody asks for by NUMBA_CPU_NAME
    assert not was_kept(imported(folder))


@pytest.mark.skipif(platform.machine() not in kernels.BASELINES, reason="no wheel for this processor brings kernels")
def test_what_a_wheel_brings_for_another_processor_or_of_other_sources_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "BUILT", as_in_a_wheel(folder, {}))
    assert not was_kept(imported(folder))
    shutil.rmtree(folder / "brought")
    monkeypatch.setattr(kernels, "BUILT", as_in_a_wheel(folder, BASELINE))
    shutil.rmtree(folder / "__pycache__")
    path = folder / "called_by_kernels.py"
    path.write_text(path.read_text().replace("number *", "number +"))
    os.utime(path, (then := path.stat().st_mtime + 10, then))
    assert not was_kept(imported(folder), expected=26)


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("calling_kernels", "* 2", "* 3", 90),
        ("called_by_kernels", "number *", "number +", 26),
        ("called_by_kernels", "FACTOR = 10", "FACTOR = 7", 42),
        ("called_by_kernels", "scaled(number)", "scaled(number, more=1)", 60),
    ],
)
def test_a_change_of_what_it_is_made_of_is_noticed(folder: Path, name: str, old: str, new: str, expected: int):
    was_kept(imported(folder))
    count = len(files_in(folder))
    path = folder / f"{name}.py"
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, (then := path.stat().st_mtime + 10, then))  # within a second, Python takes a file of the same size for the same
    assert not was_kept(imported(folder), expected=expected)
    assert was_kept(imported(folder), expected=expected)
    assert len(files_in(folder)) == count  # what nobody will ask for again is gone


def test_a_change_that_is_none_of_its_own_is_not_noticed(folder: Path):
    was_kept(imported(folder))
    for path in folder.glob("*.py"):
        path.write_text("# a comment\nOTHER = 5\n" + path.read_text())
    assert was_kept(imported(folder))


def test_flags_that_a_profiler_was_seen_to_change_are_none_of_its_own():
    code = (lambda many, *more: many + len(more)).__code__
    other = code.replace(co_flags=inspect.CO_NEWLOCALS | inspect.CO_VARARGS)
    assert other.co_flags != code.co_flags
    assert [*kernels._texts(other)] == [*kernels._texts(code)]
    assert [*kernels._texts(code.replace(co_flags=inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS))] != [*kernels._texts(code)]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _other(path: Path) -> None:
    path.write_bytes(kernels.hashlib.sha256(b"no pickle").digest() + b"no pickle")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [_cut, _flip, _other, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_compiled_anew_without_a_word(folder: Path, harm: Callable[[Path], None]):
    was_kept(imported(folder))
    for path in files_in(folder):
        harm(path)
    assert not was_kept(imported(folder))
    assert was_kept(imported(folder))


@pytest.mark.skipif(sys.platform == "win32", reason="for systems with FIFOs")
@pytest.mark.parametrize("harm", [_fifo, _folder])
def test_where_there_is_no_file_in_its_place_the_next_folder_is_taken(folder: Path, harm: Callable[[Path], None]):
    was_kept(imported(folder))
    for path in files_in(folder):
        harm(path)
    assert not was_kept(imported(folder))
    assert was_kept(imported(folder))
    assert [path for path in files_in(folder / "cache") if path.is_file()]


def test_where_nothing_can_be_written_beside_the_source_it_is_kept_in_lowtides_folder(folder: Path):
    (folder / "__pycache__").touch()
    assert [was_kept(imported(folder)) for _ in range(2)] == [False, True]
    assert {path.parent.parent for path in files_in(folder)} == {folder / "cache" / "kernels"}


def test_where_nothing_can_be_written_at_all_one_warning_says_so(folder: Path):
    (folder / "__pycache__").touch()
    (folder / "cache").touch()
    with pytest.warns(RuntimeWarning, match="cannot keep what it measures and compiles .*; set LOWTIDE_CACHE") as told:
        assert not was_kept(imported(folder))
    assert len(told) == 1
    assert not was_kept(imported(folder))


def test_numbas_own_choice_of_a_folder_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels._config, "CACHE_DIR", str(folder / "chosen"))
    assert [was_kept(imported(folder)) for _ in range(2)] == [False, True]
    assert {path.parent.parent for path in files_in(folder)} == {folder / "chosen"}


def test_what_was_kept_can_be_forgotten(folder: Path):
    module = imported(folder)
    was_kept(module)
    module.doubled._cache.flush()
    assert not was_kept(imported(folder))


def _ordered(package: Path, environment: dict[str, str], before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A small problem, ordered by another process that finds lowtide in `package`."""
    source = """if True:
        from lowtide.problems.order import OrderProblem
        from lowtide.problems.order import Task
        from lowtide.schedule.greedy import ReadyList
        problem = OrderProblem.of([1, 2, 3], [Task("a", makes=(0,)), Task("b", makes=(1,), reads=(0,)), Task("c", makes=(2,), reads=(1,))])
        print(ReadyList().solve(problem).peak_bytes)
    """
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(source)], cwd=package, env=bare({"PYTHONPATH": str(package)} | environment),
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """lowtide in a place of its own, without what was kept of it."""
    source = Path(kernels.__file__).parents[1]
    shutil.copytree(source, tmp_path / "installed" / "lowtide", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "installed"


def test_without_home_name_and_place_everything_works(package: Path, tmp_path: Path):
    """As in a container that runs under any number for a user: no entry for it, and all that is there belongs to root."""
    (reachable(tmp_path) / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o1777)
    found = [_ordered(package, {"TMPDIR": str(tmp_path / "temporary")}, as_stranger()) for _ in range(2)]
    assert [each.stdout for each in found] == ["5\n", "5\n"], found
    assert found[0].stderr.count("Warning") == 1, found
    assert "temporary/lowtide-54321 may be emptied by the system; set LOWTIDE_CACHE" in found[0].stderr
    assert found[1].stderr == ""  # there is nothing left to be compiled
    assert {path.relative_to(tmp_path).parts[:3] for path in files_in(tmp_path)} == {("temporary", "lowtide-54321", "kernels")}


def test_two_processes_that_compile_at_once_do_not_disturb_each_other(folder: Path):
    command = [sys.executable, "-c", "import calling_kernels; print(calling_kernels.doubled(3))"]
    environment = bare({"PYTHONPATH": f"{folder}{os.pathsep}{Path(kernels.__file__).parents[2]}"})
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in both] == ["60\n", "60\n"]
    assert was_kept(imported(folder))


def test_numba_can_be_switched_off(package: Path):
    done = _ordered(package, {"NUMBA_DISABLE_JIT": "1"})
    assert done.stdout == "5\n", done.stderr
    assert not list(package.rglob("*.nbc"))
