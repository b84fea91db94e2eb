"""The planned allocator is built once, by whoever comes first, where nobody else can write."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.runtime import native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")
_THERE = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not _THERE, reason="no C++ compiler on this machine")


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    native._library(folder)
    (library,) = (folder / "native").iterdir()
    return library


@pytest.fixture
def compiler(tmp_path: Path, _built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that is quick, as it knows the answer, and that notes every call in the file that is returned."""
    calls, script = tmp_path / "calls", tmp_path / "quick-c++"
    script.write_text(f'#!/bin/sh\necho call >> {calls}\nwhile [ "$1" != -o ]; do shift; done\ncat {_built} > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return calls


@needs_compiler
def test_it_is_built_once_for_this_user_alone(tmp_path: Path, compiler: Path):
    for _ in range(3):
        library = native._library(tmp_path)
    assert library.lowtide_suspend() == 0
    assert compiler.read_text().count("call") == 1
    (path,) = (tmp_path / "native").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@needs_compiler
def test_a_folder_that_others_may_write_to_is_closed_and_its_libraries_are_built_again(tmp_path: Path, compiler: Path):
    native._library(tmp_path)
    folder = tmp_path / "native"
    (folder / "allocator-0.so").write_bytes(b"whoever wrote this")
    folder.chmod(0o777)
    native._library(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "allocator-0.so").exists()
    assert compiler.read_text().count("call") == 2


@needs_compiler
@pytest.mark.parametrize("harm", [lambda path: path.chmod(0o722), lambda path: path.write_bytes(path.read_bytes()[:1000])])
def test_a_library_that_others_may_write_or_that_is_cut_off_is_built_again(tmp_path: Path, compiler: Path, harm):
    native._build(path := native._own_folder(tmp_path / "native") / f"allocator-{native._key()}.so")
    harm(path)
    assert native._library(tmp_path).lowtide_suspend() == 0
    assert compiler.read_text().count("call") == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "native").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "native").stat().st_uid + 1)
    with pytest.raises(native.NativeError, match=r"native is not this user's own folder: remove it, or set LOWTIDE_CACHE"):
        native._library(tmp_path)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "native").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(native.NativeError, match="is not this user's own folder"):
        native._library(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(native.NativeError, match=r"file/native cannot be made \(Not a directory\): set LOWTIDE_CACHE"):
        native._library(tmp_path / "file")


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeError, match=r"none of c\+\+, g\+\+, clang\+\+ is here: install g\+\+, or set CXX"):
        native._library(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [("no-such-compiler", "the compiler no-such-compiler does not run"), ("false", r"the compiler false failed \(without a word\)")],
)
def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(native.NativeError, match=message):
        native._library(tmp_path)
    assert list((tmp_path / "native").iterdir()) == []


def test_a_compilers_first_complaint_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "old-c++"
    script.write_text("#!/bin/sh\necho note: thinking >&2\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(native.NativeError, match=r"failed \(error: unrecognized option '-std=c\+\+20'\): it has to know C\+\+20"):
        native._library(tmp_path)


def test_other_systems_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(native.NativeError, match="the planned allocator is made for Linux"):
        native._library(tmp_path)


@needs_compiler
def test_two_processes_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    source = (
        "import sys; from pathlib import Path; from lowtide.runtime import native; print(native.load(Path(sys.argv[1])).lowtide_suspend())"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    for process in both:
        out, error = process.communicate(timeout=300)
        assert out == b"0\n", error
    (path,) = (tmp_path / "native").iterdir()
    assert path.name.startswith("allocator-")


@needs_compiler
def test_an_allocator_that_is_there_already_is_kept_behind_and_one_that_comes_later_is_respected(tmp_path: Path, compiler: Path):
    """Two copies of the library are two allocators, of which the second stands before the first."""
    source = """if True:
        import sys
        from pathlib import Path
        import numpy, torch
        from lowtide.runtime import native
        from lowtide.runtime.allocator import Allocator, BusyError, Region, Script

        first = Allocator(native.load(Path(sys.argv[1])))
        assert native.load(Path(sys.argv[2])) is first.library
        held = torch.zeros(1000)
        second = Allocator(native._library(Path(sys.argv[2])))
        try:
            with first.recording():
                pass
        except BusyError as why:
            print(why)
        region, script = Region(second, 128), Script(second, numpy.array([100, 50]), numpy.array([0, -1]))
        with second.serving(region, script) as counts:
            made = torch.empty(100, dtype=torch.uint8), torch.empty(50, dtype=torch.uint8)
            print(made[0].data_ptr() == region.base, region.holds(made[1].data_ptr()))
        del held, made
        print(counts.served, counts.outliving, region.live)
    """
    folders = [str(tmp_path / name) for name in ("first", "second")]
    done = subprocess.run([sys.executable, "-c", source, *folders], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["another allocator was put before lowtide's", "True False", "1 1 0"], done.stderr
