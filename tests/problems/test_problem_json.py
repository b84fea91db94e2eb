import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.order_files import problem_to_json
from lowtide.errors import FormatError
from lowtide.problems.files import load_problem, problem_from_json
from lowtide.problems.order import OrderProblem, Task
from tests.edits import edited
from tests.problems import Case, cases, same

INSTANCES = sorted((Path(__file__).parents[1] / "data" / "order").glob("*.json"))

SIMPLE = """{"nodes": [
{"op": "Input", "inputs": [], "bytes": 8, "inplace": false},
{"op": "Conv", "inputs": [0], "bytes": 8, "inplace": false},
{"op": "Relu", "inputs": [1], "bytes": 8, "inplace": true}
]}
"""

GENERAL = """{"format": "lowtide.order", "version": 1, "resident_bytes": 7,
"tensors": [
{"bytes": 8},
{"bytes": 8, "kept": true},
{"bytes": 3}
],
"nodes": [
{"name": "first", "makes": [1, 2], "reads": [0], "workspace_bytes": 5, "takes": [[0, 2]]},
{"name": "second", "after": [0]}
]}
"""


@given(cases())
def test_round_trip(case: Case) -> None:
    text = problem_to_json(case.problem)
    assert same(problem_from_json(text), case.problem)
    assert problem_to_json(problem_from_json(text)) == text


@given(st.data())
def test_a_problem_of_the_simple_form_comes_back_in_it(data: st.DataObject) -> None:
    items = []
    for index in range(data.draw(st.integers(0, 8))):
        inputs = data.draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        is_input = not inputs and data.draw(st.booleans())
        nbytes = data.draw(st.sampled_from([0, 1, 2, 2]))
        alike = [tensor for tensor in inputs if items[tensor]["bytes"] == nbytes]
        inplace = bool(alike) and data.draw(st.booleans())
        items.append({"op": "Input" if is_input else "Op_x", "inputs": inputs, "bytes": nbytes, "inplace": inplace})
    assert json.loads(problem_to_json(problem_from_json(json.dumps({"nodes": items})))) == {"nodes": items}


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_instances_come_back_item_by_item(path: Path) -> None:
    assert json.loads(problem_to_json(load_problem(path)))["nodes"] == json.loads(path.read_text())["nodes"]


def test_the_simple_form_as_written() -> None:
    problem = OrderProblem.of([8, 8, 8], [Task("Conv_1", (1,), (0,)), Task("Relu_2", (2,), (1,), takes=((1, 0),))], kept=[2])
    assert problem_to_json(problem) == SIMPLE
    assert same(problem_from_json(SIMPLE), problem)


def test_the_general_form_as_written() -> None:
    tasks = [Task("first", (1, 2), (0,), workspace_bytes=5, takes=((0, 2),)), Task("second", after=(0,))]
    problem = OrderProblem.of([8, 8, 3], tasks, kept=[1], resident_bytes=7)
    assert problem_to_json(problem) == GENERAL
    assert same(problem_from_json(GENERAL), problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"after": (0,)},
        {"takes": ((1, 3),)},
        {"takes": ((0, 0),)},
        {"name": "Relu"},
        {"name": "Input_3"},
        {"workspace_bytes": 1},
    ],
    ids=str,
)
def test_what_the_simple_form_would_lose_takes_the_general_one(changes: dict[str, Any]) -> None:
    simple = Task("Relu_3", (3,), (1, 0), takes=((1, 0),))
    tasks = [[Task("Conv_2", (2,), (0,)), last] for last in (simple, replace(simple, **changes))]
    problems = [OrderProblem.of([8, 8, 8, 8], pair, kept=[2, 3]) for pair in tasks]
    assert ["tensors" in problem_to_json(problem) for problem in problems] == [False, True]
    assert all(same(problem_from_json(problem_to_json(problem)), problem) for problem in problems)


def test_the_tensor_that_takes_over_need_not_be_the_first_in_number() -> None:
    problem = OrderProblem.of([3, 8, 8], [Task("split", makes=(2, 0), reads=(1,), takes=((1, 0),))])
    assert problem.take_output.tolist() == [2]
    assert same(problem_from_json(problem_to_json(problem)), problem)


def test_a_tensor_read_twice_by_one_item_is_one_read() -> None:
    text = SIMPLE.replace('"Conv", "inputs": [0]', '"Conv", "inputs": [0, 0]')
    assert same(problem_from_json(text), problem_from_json(SIMPLE))


def test_the_larger_in_place_input_is_passed_over_for_the_first_of_equal_size() -> None:
    items = [{"op": "Input", "inputs": [], "bytes": size} for size in (4, 8, 8)]
    problem = problem_from_json(json.dumps({"nodes": [*items, {"op": "Add", "inputs": [0, 1, 2], "bytes": 8, "inplace": True}]}))
    assert problem.take_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GENERAL, GENERAL[:-20], "expected a whole JSON text"),
        (GENERAL, "[" * 100_000, "expected a whole JSON text"),
        (GENERAL, "[]", 'expected a JSON object with a list of "nodes"'),
        (GENERAL, '{"nodes": 3}', 'expected a JSON object with a list of "nodes"'),
        ('"version": 1', '"version": 2', "'lowtide.order' version 2"),
        ('"resident_bytes": 7', '"resident_bytes": -7', "resident_bytes: expected 0 to 2"),
        ('"resident_bytes": 7', '"resident_bytes": true', "top level: expected 'resident_bytes' to be an integer, got bool"),
        ('"resident_bytes": 7', '"version": 1', "expected each field of an object once, got 'version' twice"),
        ('{"bytes": 3}', "3", "tensor 2: expected an object, got int"),
        ('{"bytes": 3}', '{"bytes": 3.0}', "tensor 2: expected 'bytes' to be an integer, got float"),
        ('{"bytes": 3}', '{"bytes": NaN}', "tensor 2: expected 'bytes' to be an integer, got float"),
        ('{"bytes": 3}', '{"bytes": 1' + "0" * 5000 + "}", "tensor 2: bytes: expected 0 to 2.*30 digits, made by node 0"),
        ('{"bytes": 3}', '{"bytes": 1' + "0" * 40 + "}", "tensor 2: bytes: expected 0 to 2"),
        ('{"bytes": 3}', '{"kept": true}', "tensor 2: expected 'bytes' to be an integer, got nothing"),
        ('"kept": true', '"kept": 1', "tensor 1: expected 'kept' to be true or false, got int"),
        ('"name": "first"', '"name": 1', "node 0: expected 'name' to be a string, got int"),
        ('"makes": [1, 2]', '"makes": [1, "2"]', r"node 0 \(first\): expected 'makes' to be a list of integers, got list"),
        ('"makes": [1, 2]', '"makes": [1, 3]', r"node 0 \(first\): makes: expected a tensor from 0 to 2, got 3"),
        ('"after": [0]', '"after": [1]', r"node 1 \(second\) after node 1 \(second\)"),
        ('"after": [0]', '"afer": [0]', "node 1: expected fields among after, .*, got 'afer'"),
        ("[[0, 2]]", "[[0]]", r"node 0 \(first\): expected 'takes' to be a list of pairs of integers, got list"),
        ("[[0, 2]]", "[[1, 2]]", r"node 0 \(first\): expected reuses of distinct tensors that it reads \[0\], got \[1\]"),
    ],
)  # fmt: skip
def test_a_broken_general_file_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    _check_refused(GENERAL.replace(old, new, 1), message, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"inputs": [0]', '"inputs": [3]', r"node 1 \(Conv\): expected inputs from 0 to 2, got 3"),
        ('"inputs": [0]', '"inputs": [2]', r"in a cycle: node 0 \(Conv_1\) after node 1 \(Relu_2\) after node 0 \(Conv_1\)"),
        ('"inputs": []', '"inputs": [1]', r'node 0 \(Input\): expected neither "inputs" nor "inplace"'),
        ('"bytes": 8', '"bytes": -8', "tensor 0: bytes: expected 0 to 2"),
        ('"inplace": true', '"inplace": "yes"', r"node 2 \(Relu\): expected 'inplace' to be true or false, got str"),
        ('"op": "Conv"', '"op": null', "node 1: expected 'op' to be a string, got nothing"),
    ],
)  # fmt: skip
def test_a_broken_simple_file_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    _check_refused(SIMPLE.replace(old, new, 1), message, tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"broken\.json: expected text in UTF-8"):
        load_problem(tmp_path / "broken.json")


def _check_refused(text: str, message: str, folder: Path) -> None:
    path = folder / "broken.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=rf"broken\.json: .*{message}") as caught:
        load_problem(path)
    assert "\n" not in str(caught.value)


@given(st.sampled_from([SIMPLE, GENERAL]), st.data())
def test_an_edited_file_is_a_problem_or_refused(text: str, data: st.DataObject) -> None:
    told = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        told = edited(told, data)
    with suppress(FormatError):
        problem = problem_from_json(json.dumps(told))
        assert same(problem_from_json(problem_to_json(problem)), problem)


@given(
    st.sampled_from([SIMPLE, GENERAL]),
    st.text(alphabet='{}[]",:0123456789eE+-. ntrue', max_size=20),
    st.integers(0, 400),
    st.integers(0, 9),
)
def test_a_damaged_file_is_a_problem_or_refused(text: str, noise: str, start: int, length: int) -> None:
    with suppress(FormatError):
        problem_from_json(text[:start] + noise + text[start + length :])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"nodes": ' * 100_000, '{"nodes": [' + "1" * 10_000 + "]}", '{"nodes": [1e999]}', "\x00", "\ufeff{}"]
)
def test_what_no_reader_can_hold_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="expected"):
        problem_from_json(text)
