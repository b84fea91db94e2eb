"""The planned allocator is built once, by whoever comes first, where nobody else can write."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.base import files
from lowtide.runtime import libraries
from lowtide.runtime import libraries as compiler_module
from lowtide.runtime.arena import native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")
_THERE = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not _THERE, reason="no C++ compiler on this machine")


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    native.load.__wrapped__(folder)
    (library,) = (folder / "native").iterdir()
    return library


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


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
        library = native.load.__wrapped__(tmp_path)
    assert native._works(library)
    assert compiler.read_text().count("call") == 1
    (path,) = (tmp_path / "native").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@needs_compiler
def test_a_folder_that_others_may_write_to_is_closed_and_its_libraries_are_built_again(tmp_path: Path, compiler: Path):
    native.load.__wrapped__(tmp_path)
    folder = tmp_path / "native"
    (folder / "allocator-0.so").write_bytes(b"whoever wrote this")
    folder.chmod(0o777)
    native.load.__wrapped__(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "allocator-0.so").exists()
    assert compiler.read_text().count("call") == 2


@needs_compiler
@pytest.mark.parametrize("harm", [lambda path: path.chmod(0o722), lambda path: path.write_bytes(path.read_bytes()[:1000])])
def test_a_library_that_others_may_write_or_that_is_cut_off_is_built_again(tmp_path: Path, compiler: Path, harm):
    native.load.__wrapped__(tmp_path)
    (path,) = (tmp_path / "native").iterdir()
    harm(path)
    assert native._works(native.load.__wrapped__(tmp_path))
    assert compiler.read_text().count("call") == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def _foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "native").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "native").stat().st_uid + 1)
    return tmp_path


def _linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "native").symlink_to(tmp_path / "elsewhere")
    return tmp_path


def _in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def _full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return tmp_path


@needs_compiler
@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_foreign, "native is not this user's own folder: remove it, or set LOWTIDE_CACHE"),
        (_linked, "native is not this user's own folder"),
        (_in_a_file, "Not a directory"),
        (_full, "native has no room for the planned allocator"),
    ],
)
def test_without_a_folder_to_keep_it_in_it_is_built_for_this_process(tmp_path: Path, compiler: Path, monkeypatch, harm, why: str):
    directory = harm(tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"for other processes: .*{why}"):
        assert native._works(native.load.__wrapped__(directory))
    assert native._works(native.load.__wrapped__(directory))  # a second warning would be an error
    assert compiler.read_text().count("call") == 2
    assert not list(tmp_path.glob("*/*"))


@needs_compiler
def test_without_any_folder_it_is_built_for_this_process(compiler: Path):
    assert native._works(native.load.__wrapped__(None))


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeError, match=r"none of c\+\+, g\+\+, clang\+\+ is here: install g\+\+, or set CXX"):
        native.load.__wrapped__(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-compiler", "the compiler no-such-compiler does not run"),
        ("false", r"the compiler false failed \(without a word\)"),
        ("/bin/true", "the compiler /bin/true left no library: is it a C\\+\\+ compiler"),
        ("/bin/echo", "the compiler /bin/echo left no library"),
        ('g++ "', r"CXX is 'g\+\+ \"', which is no command \(No closing quotation\): correct it, or unset it"),
        ("''", "the compiler  does not run"),
        ("/", "the compiler / does not run"),
    ],
)
def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(native.NativeError, match=message):
        native.load.__wrapped__(tmp_path)
    assert list((tmp_path / "native").iterdir()) == []


def test_a_compilers_first_complaint_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "old-c++"
    script.write_text("#!/bin/sh\necho note: thinking >&2\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(native.NativeError, match=r"failed \(error: unrecognized option '-std=c\+\+20'\): it has to know C\+\+20"):
        native.load.__wrapped__(tmp_path)


def _compiler_of(folder: Path, *lines: str) -> str:
    """The path of a program that does as a shell is told; its $out is where the library belongs."""
    script = folder / "c++-of-this-test"
    script.write_text("\n".join(["#!/bin/sh", 'for each; do out=$last; last=$each; [ "$out" = -o ] && break; done; out=$last', *lines, ""]))
    script.chmod(0o755)
    return str(script)


def test_complaints_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", _compiler_of(tmp_path, r"printf 'error: \377\376 unbekannte Option \344\n' >&2", "exit 1"))
    with pytest.raises(native.NativeError, match=r"failed \(error: \ufffd+ unbekannte Option"):
        native.load.__wrapped__(tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("source", "message"),
    [("int other() { return 0; }", "does not load .*undefined symbol: lowtide_"), ("no C", "failed"), (None, "is no library for 64 bits")],
)
def test_a_library_that_is_not_ours_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, message: str):
    (tmp_path / "other.cpp").write_text(source or "")
    lines = ["echo 'a text' > $out"] if source is None else [f"exec {_THERE} -shared -fPIC {tmp_path / 'other.cpp'} -o $out"]
    monkeypatch.setenv("CXX", _compiler_of(tmp_path, *lines))
    with pytest.raises(native.NativeError, match=message):
        native.load.__wrapped__(tmp_path)
    assert list((tmp_path / "native").iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_library_that_is_cut_off_is_not_loaded(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, share: float):
    native.load.__wrapped__(tmp_path)
    (path,) = (tmp_path / "native").iterdir()
    path.rename(tmp_path / "whole")
    part = tmp_path / "part"
    part.write_bytes((tmp_path / "whole").read_bytes()[: int((tmp_path / "whole").stat().st_size * share)])
    monkeypatch.setenv("CXX", _compiler_of(tmp_path, f"cat {part} > $out"))
    with pytest.raises(native.NativeError, match="is cut off"):
        native.load.__wrapped__(tmp_path)
    assert list((tmp_path / "native").iterdir()) == []


@needs_compiler
def test_a_kept_library_that_is_not_ours_is_built_again(tmp_path: Path, compiler: Path):
    """As an earlier version, or another compiler of the same name, may have left it: sealed, and of no use."""
    native.load.__wrapped__(tmp_path)
    (path,) = (tmp_path / "native").iterdir()
    sealed = path.read_bytes()
    (tmp_path / "other.cpp").write_text("int other() { return 0; }")
    subprocess.run([_THERE, "-shared", "-fPIC", tmp_path / "other.cpp", "-o", tmp_path / "other.so"], check=True)
    for library in ((tmp_path / "other.so").read_bytes(), b"no library"):
        path.write_bytes(library + libraries.seal(library))
        calls = compiler.read_text().count("call")
        assert native._works(native.load.__wrapped__(tmp_path))
        assert compiler.read_text().count("call") == calls + 1
        assert path.read_bytes() == sealed


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_module, "_PATIENCE_SECONDS", 0.5)
    children = tmp_path / "children"
    monkeypatch.setenv("CXX", _compiler_of(tmp_path, f"sleep 1000 & echo $! > {children}; sleep 1000"))
    with pytest.raises(native.NativeError, match=r"c\+\+-of-this-test was stopped after 0.5 seconds"):
        native.load.__wrapped__(tmp_path)
    child = int(children.read_text())
    for _ in range(100):
        if not _runs(child):
            break
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether a process is there, and not merely unburied."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_other_systems_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(native.NativeError, match="the planned allocator is made for Linux"):
        native.load.__wrapped__(tmp_path)


@needs_compiler
def test_two_processes_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    source = (
        "import sys; from pathlib import Path; from lowtide.runtime.arena import native; "
        "print(native._works(native.load(Path(sys.argv[1]))))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    for process in both:
        out, error = process.communicate(timeout=300)
        assert out == b"True\n", error
    (path,) = (tmp_path / "native").iterdir()
    assert path.name.startswith("allocator-")


@needs_compiler
def test_an_allocator_that_is_there_already_is_kept_behind_and_one_that_comes_later_is_respected(tmp_path: Path, compiler: Path):
    """Two copies of the library are two allocators, of which the second stands before the first."""
    source = """if True:
        import sys
        from pathlib import Path
        import numpy, torch
        from lowtide.runtime.arena import native
        from lowtide.runtime.arena.allocator import Allocator, BusyError, ArenaMemory, Script

        first = Allocator(native.load(Path(sys.argv[1])))
        assert native.load(Path(sys.argv[2])) is first.library
        held = torch.zeros(1000)
        second = Allocator(native.load.__wrapped__(Path(sys.argv[2])))
        try:
            first.record(lambda: None)
        except BusyError as why:
            print(why)
        region, script = ArenaMemory(second, 128), Script(second, numpy.array([100, 50]), numpy.array([0, -1]))
        made, counts = second.serve(region, script, lambda: (torch.empty(100, dtype=torch.uint8), torch.empty(50, dtype=torch.uint8)))
        print(made[0].data_ptr() == region.base, region.holds(made[1].data_ptr()))
        del held, made
        print(counts.served, counts.outliving, region.live)
    """
    folders = [str(tmp_path / name) for name in ("first", "second")]
    done = subprocess.run([sys.executable, "-c", source, *folders], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["another allocator was put before lowtide's", "True False", "1 1 0"], done.stderr


@pytest.mark.parametrize("module", ["lowtide.cuda.native", "lowtide.cpu.network"])
def test_what_a_library_is_built_of_is_there(module):
    """Where no GPU is, nobody would notice that a file which is named there has gone."""
    named = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, (Path, tuple, list))]
    paths = [path for value in named for path in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(path, Path)]
    assert paths
    assert [str(path) for path in paths if not path.exists()] == []
