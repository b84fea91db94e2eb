"""Pictures of placements: that they are drawn, in each format, of small and large problems, and say what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowtide.errors import FormatError
from lowtide.placement.base import Placement
from lowtide.placement.greedy import Greedy
from lowtide.placement.picture import check_picture, draw
from lowtide.problems import Status
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import PlaceProblem

DATA = Path(__file__).parents[1] / "data" / "place"
BEGINS = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", BEGINS)
def test_each_format_is_drawn(suffix: str, tmp_path: Path) -> None:
    problem = load_buffers(DATA / "example.12.csv")
    draw(problem, Greedy().place(problem), tmp_path / f"x.{suffix.upper()}", capacity_bytes=20)
    assert (tmp_path / f"x.{suffix.upper()}").read_bytes().startswith(BEGINS[suffix])


def text_of(problem: PlaceProblem, placement: Placement, path: Path, **options: int) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        draw(problem, placement, path / "x.svg", **options)
    return (path / "x.svg").read_text()


def test_the_picture_says_what_is_known(tmp_path: Path) -> None:
    names = ["weights", "$x$ \n", "é\ud800"]
    problem = PlaceProblem.of([4096, 2048, 0], [0, 1, 0], [2, 3, 9], names=names)
    said = text_of(problem, Greedy().place(problem), tmp_path, capacity_bytes=8192)
    for words in (
        "weights",
        "$x$ \\n",
        "3 buffers, optimal, by Greedy()",
        "arena 6.00 KiB",
        "lower bound 6.00 KiB",
        "capacity 8.00 KiB",
        "offset, KiB",
    ):
        assert words in said, words
    assert "\\xe9" not in said  # it has no bytes, and is not there


def test_a_rectangle_lies_where_its_buffer_does(tmp_path: Path) -> None:
    """The corners of the one rectangle, in the picture's own units, share the axes' frame with the arena's line."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        draw(PlaceProblem.of([2048], [3], [7], fixed_bytes=1024), Placement((1024,), 3072, 3072, Status.OPTIMAL, "x"), tmp_path / "x.png")
    (rectangles,) = [each for each in drawn[0].axes[0].collections if isinstance(each, PolyCollection)]
    assert rectangles.get_paths()[0].vertices[:4].tolist() == [[3, 1], [7, 1], [7, 3], [3, 3]]
    assert rectangles.get_array().tolist() == [2048]


def test_tens_of_thousands_of_buffers_are_one_image_in_a_vector_file(tmp_path: Path) -> None:
    count = 20_000
    start = np.arange(count)
    problem = PlaceProblem.of(np.full(count, 64), start, start + 30)
    placement = Placement(tuple((start % 30 * 64).tolist()), 30 * 64, 30 * 64, Status.OPTIMAL, "x")
    said = text_of(problem, placement, tmp_path)
    assert "<image" in said
    assert len(said) < 1_000_000
    assert "19999" not in said  # no names


@pytest.mark.parametrize(
    ("problem", "placement"),
    [
        (PlaceProblem.of([], [], []), Placement((), 0, 0, Status.OPTIMAL, "x")),
        (PlaceProblem.of([0, 4], [0, 2], [3, 2]), Placement((0, 0), 4, 4, Status.OPTIMAL, "x")),
        (PlaceProblem.of([4], [0], [1]), Placement((), 4, 4, Status.INFEASIBLE, "x")),
        (PlaceProblem.of([2**61], [-5], [2**40]), Placement((0,), 2**61, 2**61, Status.OPTIMAL, "x")),
    ],
    ids=["no buffers", "nothing alive", "no placement", "huge"],
)
def test_odd_problems_are_drawn(problem: PlaceProblem, placement: Placement, tmp_path: Path) -> None:
    draw(problem, placement, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.gif", "x", "png"):
        with pytest.raises(FormatError, match=r"expected a picture's name that ends in \.png, \.svg, \.pdf"):
            check_picture(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is not installed: pip install 'lowtide\[plot\]'"):
        check_picture(tmp_path / "x.png")


def test_matplotlib_is_imported_only_when_something_is_drawn() -> None:
    program = "import sys, lowtide.placement.picture; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
