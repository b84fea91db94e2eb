"""Placement problems and offsets as CSV: what is read, what is written, and what is refused with its line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import FormatError
from lowtide.problems.files import buffers_from_csv, ids, load_buffers, save_offsets
from lowtide.problems.placement import FREE, PlaceProblem
from tests.placements import buffers_to_csv, problems

EXAMPLE = Path(__file__).parents[1] / "data" / "place" / "example.12.csv"


def alike(one: PlaceProblem, other: PlaceProblem) -> bool:
    fields = ("size_bytes", "start", "end", "align_bytes", "fixed_bytes")
    return one.names == other.names and all(getattr(one, field).tolist() == getattr(other, field).tolist() for field in fields)


def test_a_file_of_minimalloc() -> None:
    problem = load_buffers(EXAMPLE)
    assert alike(problem, PlaceProblem.of([4] * 5, [0, 3, 0, 9, 0], [3, 9, 9, 21, 21], names=["b1", "b2", "b3", "b4", "b5"]))


@given(problems())
def test_every_problem_comes_back_from_its_text(problem: PlaceProblem) -> None:
    assert alike(buffers_from_csv(buffers_to_csv(problem)), problem)


@given(st.lists(st.text(max_size=4), max_size=4))
def test_names_that_a_file_cannot_hold_become_numbers(names: list[str]) -> None:
    problem = PlaceProblem.of([1] * len(names), [0] * len(names), [1] * len(names), names=names)
    found = buffers_from_csv(buffers_to_csv(problem)).names
    as_they_are = len(set(names)) == len(names) and all(name and name.isprintable() for name in names)
    assert found == tuple(ids(problem)) == (tuple(names) if as_they_are else tuple(map(str, range(len(names)))))


def test_the_columns_that_a_problem_needs_are_written() -> None:
    problem = PlaceProblem.of([8, 8], [0, 0], [1, 2], align_bytes=[4, 8], fixed_bytes=[FREE, 16])
    assert buffers_to_csv(problem) == "id,lower,upper,size,alignment,fixed\n0,0,1,8,4,\n1,0,2,8,8,16\n"
    assert buffers_to_csv(PlaceProblem.of([8], [-3], [1], names=['a,"b'])) == 'id,lower,upper,size\n"a,""b",-3,1,8\n'
    assert buffers_to_csv(PlaceProblem.of([], [], [])) == "id,lower,upper,size\n"


def test_offsets_are_an_answer_and_fixed_is_part_of_the_problem(tmp_path: Path) -> None:
    path = tmp_path / "placed.csv"
    problem = PlaceProblem.of([8, 4], [0, 0], [1, 2], names=["x", "y"])
    save_offsets(problem, (4, 0), path)
    assert path.read_text() == "id,lower,upper,size,offset\nx,0,1,8,4\ny,0,2,4,0\n"
    assert alike(load_buffers(path), problem)
    path.write_text("offset,fixed,size,upper,lower,id\nnowhere,32,8,1,0,x\n")
    assert load_buffers(path).fixed_bytes.tolist() == [32]


def test_the_callers_alignment_is_for_rows_without_their_own() -> None:
    text = "id,lower,upper,size,alignment\na,0,1,8,\nb,0,1,8,4\n"
    assert buffers_from_csv(text, align_bytes=64).align_bytes.tolist() == [64, 4]
    assert buffers_from_csv("id,lower,upper,size\na,0,1,8\n", align_bytes=64).align_bytes.tolist() == [64]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfid,lower,upper,size\na,0,2,8\n",
        b"id,lower,upper,size\r\na,0,2,8\r\n",
        b"id,lower,upper,size\ra,0,2,8",
        b"\n\nid,lower,upper,size\n\na,0,2,8\n\n",
        b' size ,lower,upper,"id"\n" 8",+0, 2 ,"a"\n',
        b"fixed,id,lower,upper,size,alignment\n,a,0,2,8,\n",
    ],
    ids=["mark of byte order", "CRLF", "CR", "empty lines", "quotes and spaces", "empty fields"],
)
def test_ways_to_write_the_same(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    assert alike(load_buffers(tmp_path / "x.csv"), PlaceProblem.of([8], [0], [2], names=["a"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected the columns id,lower,upper,size, got none named 'id'"),
        ("id,lower,upper\na,0,1\n", "line 1: expected the columns id,lower,upper,size, got none named 'size'"),
        ("id,lower,upper,size,colour\n", "line 1: expected columns among id,.*,offset, got 'colour'"),
        ("a,0,1,8\n", "line 1: expected columns among .*, got 'a'"),
        ("id,lower,upper,size,size\n", "line 1: expected each column once, got id,lower,upper,size,size"),
        ("id,lower,upper,size\na,0,1\n", "line 2: expected 4 fields, as in the first row, got 3"),
        ("id,lower,upper,size\n\na,0,1,8,9\n", "line 3: expected 4 fields, as in the first row, got 5"),
        ("id,lower,upper,size\na,0,1,8\nb,0,1,8\na,0,1,8\n", "line 4: expected an id of its own, got 'a', which is that of line 2 too"),
        ("id,lower,upper,size\n,0,1,8\n", "line 2: expected an id of characters that can be printed, got none"),
        ('id,lower,upper,size\n"a\nb",0,1,8\n', r"line 2: expected an id of characters .*, got 'a\\nb'"),
        ('id,lower,upper,size\nx,0,1,"8\n', "line 2: expected fields between commas, got unexpected end of data"),
        ('id,lower,upper,size\nx,0,"1" 0,8\n', "line 2: expected fields between commas, got ',' expected after '\"'"),
        ("id,lower,upper,size\na,,1,8\n", "line 2: expected lower to be an integer, got nothing"),
        ("id,lower,upper,size\na,0,1.0,8\n", r"line 2: expected upper to be an integer, got '1\.0'"),
        ("id,lower,upper,size\na,0,1,1_0\n", "line 2: expected size to be an integer, got '1_0'"),
        ("id,lower,upper,size\na,0,1,٣\n", "line 2: expected size to be an integer"),
        ("id,lower,upper,size\na,0,1,-8\n", r"line 2: buffer a: expected a size from 0 to 2\*\*62 bytes, got -8"),
        ("id,lower,upper,size\na,0,1,9223372036854775808\n", r"line 2: buffer a: expected a size from 0 to 2\*\*62 bytes"),
        ("id,lower,upper,size\na,0,1" + "0" * 6000 + ",8\n", r"line 2: expected upper to be below 2\*\*62, got a number of 6001 digits"),
        ("id,lower,upper,size\na,3,1,8\n", r"line 2: buffer a: expected a life that starts before it ends, got \[3, 1\)"),
        ("id,lower,upper,size,alignment\na,0,1,8,0\n", "line 2: buffer a: expected an alignment of 1 byte or more, got 0"),
        ("id,lower,upper,size,fixed\na,0,1,8,-1\n", "line 2: expected a fixed offset of 0 or more, got -1"),
        ("id,lower,upper,size,fixed,alignment\na,0,1,8,6,4\n", "line 2: buffer a: expected a fixed offset .* alignment 4, got 6"),
        ("id,lower,upper,size,fixed\na,0,1,8,0\nb,0,1,8,4\n", "buffers a and b: expected fixed offsets apart, got both on byte 4"),
        ("id,lower,upper,size\na,0,1,4611686018427387900\nb,0,1,4\n", r"expected sizes that add up to less than 2\*\*62"),
        (b"id,lower,upper,size\n\xff,0,1,8\n", "expected text in UTF-8"),
        ("id,lower,upper,size\n" + "x" * 200_000 + ",0,1,8\n", "line 2: expected fields between commas, got field larger"),
    ],
)
def test_what_is_refused_with_its_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, match=rf"broken\.csv: {message}") as caught:
        load_buffers(path)
    assert "\n" not in str(caught.value)


def test_a_problem_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "problem.csv"
    problem = PlaceProblem.of([8], [0], [2], names=["é"])
    path.write_text(buffers_to_csv(problem), encoding="utf-8")
    assert alike(load_buffers(path), problem)
    with pytest.raises(ValueError, match="shorter"):
        save_offsets(problem, [], path)
    assert alike(load_buffers(path), problem)
    assert [each.name for each in tmp_path.iterdir()] == ["problem.csv"]
    with pytest.raises(FileNotFoundError):
        load_buffers(tmp_path / "missing.csv")


@given(st.text(alphabet="idlowerupsza,;\"'\n\r0123456789eE+-.\x00\u00e4 ", max_size=30), st.integers(0, 60), st.integers(0, 9))
def test_a_damaged_text_is_a_problem_or_refused(noise: str, start: int, length: int) -> None:
    text = "id,lower,upper,size,alignment,fixed\nweights,0,12,4096,64,\nhidden,3,7,1024,,4096\n"
    with suppress(FormatError):
        buffers_from_csv(text[:start] + noise + text[start + length :])


@pytest.mark.parametrize("number", ["1" + "0" * 400, "nan", "inf", "1e400", "-" + "9" * 30, str(2**62), "\u0661", "1_000", "0x10"])
@pytest.mark.parametrize("column", ["lower", "upper", "size", "alignment", "fixed"])
def test_a_number_out_of_all_range_is_refused(column: str, number: str) -> None:
    row = {"id": "b", "lower": "0", "upper": "1", "size": "8", "alignment": "1", "fixed": "0"} | {column: number}
    with pytest.raises(FormatError, match="expected"):
        buffers_from_csv(f"{','.join(row)}\n{','.join(row.values())}\n")
