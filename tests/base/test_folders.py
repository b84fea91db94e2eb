"""Where things are kept that can be made again; without a home, elsewhere or nowhere, and said once."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.base import files
from lowtide.base.files import directory, own_folder, warn_if_not_cached

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="for systems with users")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For temporary files; the user has made no choice."""
    for name in ("LOWTIDE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir(mode=0o755)
    return tmp_path / "temporary"


def _nobody() -> Path:
    raise RuntimeError("Could not determine home directory.")


def _closed(path: Path) -> Path:
    """A folder's name below a file: it cannot be made, by root either."""
    path.touch()
    return path / "below"


def test_the_directory_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory() == tmp_path / ".cache" / "lowtide"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert directory() == tmp_path / "lowtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert directory() == tmp_path / ".cache" / "lowtide"
    monkeypatch.setenv("LOWTIDE_CACHE", "~/chosen")
    assert directory() == tmp_path / "chosen"
    monkeypatch.setenv("LOWTIDE_CACHE", str(_closed(tmp_path / "file")))  # a choice is a choice
    assert directory() == tmp_path / "file" / "below"
    warn_if_not_cached()
    assert not (tmp_path / ".cache").exists()  # nothing is made before it is needed


@pytest.mark.parametrize("home", [None, "", "/proc", "file"], ids=["no entry", "empty", "closed", "file"])
def test_without_a_home_it_is_a_folder_of_this_user_alone(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None):
    if home is None:
        monkeypatch.setattr(Path, "home", _nobody)
    else:
        monkeypatch.setenv("HOME", str(_closed(tmp_path / "file")) if home == "file" else home)
        monkeypatch.setattr(os, "access", lambda path, mode, access=os.access: str(path) not in ("/", "/proc") and access(path, mode))
    folder = directory()
    assert folder == place / f"lowtide-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.warns(RuntimeWarning, match=r"and .*lowtide-\d+ may be emptied by the system; set LOWTIDE_CACHE"):
        warn_if_not_cached()
    warn_if_not_cached()  # a second warning would be an error


def _replaced_by_a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def _in_a_place_for_all(folder: Path) -> None:
    folder.parent.chmod(0o777)  # without the bit that keeps names to their owners


@pytest.mark.parametrize("harm", [_replaced_by_a_link, _in_a_place_for_all, Path.touch])
def test_a_folder_that_others_may_have_written_to_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]):
    monkeypatch.setattr(Path, "home", _nobody)
    harm(place / f"lowtide-{os.geteuid()}")
    assert directory() is None
    with pytest.warns(RuntimeWarning, match="for other processes: there is no home folder; set LOWTIDE_CACHE"):
        warn_if_not_cached()


def test_without_a_place_for_temporary_files_there_is_none(monkeypatch: pytest.MonkeyPatch):
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(Path, "home", _nobody)
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert directory() is None


def test_an_own_folder_that_others_could_write_to_is_made_anew(tmp_path: Path):
    folder = own_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "mine").touch()
    assert list(own_folder(folder).iterdir()) == [folder / "mine"]
    folder.chmod(0o770)
    (folder / "others").mkdir()
    assert list(own_folder(folder).iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_where_there_are_no_users_a_folder_is_just_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "geteuid")
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    (tmp_path / "a" / "mine").touch()
    assert own_folder(tmp_path / "a") == tmp_path / "a"
    assert (tmp_path / "a" / "mine").exists()
