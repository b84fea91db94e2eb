"""The table of best values: its answers are valid, its bounds beneath them, the page current, and who fills it keeps what is better."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from lowtide.cost.presets import preset
from lowtide.ir.graph import Graph
from lowtide.remat.cost import cost_of
from lowtide.remat.problem import RematProblem
from tests.yardstick.answers import answer_of, random_graph
from yardstick import files, fill, table
from yardstick.check import AnswerError, load, value_of
from yardstick.engines import Effort, Finding, findings, problems_of
from yardstick.files import ANSWERS, INSTANCES, ROOT, SHARES, instance, instance_names, limits_of, rows
from yardstick.problems import remat_problem
from yardstick.published import orders, placements
from yardstick.steps import MACHINE, exported

DATA = Path(__file__).parents[1] / "data"
ROWS = [row for row in rows() if row["answer"]]


def is_small(row: dict[str, Any]) -> bool:
    return (INSTANCES / f"{row['instance']}.json.gz").stat().st_size + (ANSWERS / row["answer"]).stat().st_size < 6000


def check(row: dict[str, Any]) -> None:
    """An answer is what its row says."""
    answer = load(str(ANSWERS / row["answer"]))
    assert [answer.get(field) for field in ("instance", "problem", "limit_bytes")] == [row["instance"], row["problem"], row["limit_bytes"]]
    value, sign = value_of(instance(row["instance"]), answer), -1 if row["problem"] == "spaces" else 1
    assert value == row["value"]
    assert row["bound"] is None or sign * value >= sign * row["bound"]


def test_small_answers_are_valid():
    small = [row for row in ROWS if is_small(row)]
    assert {row["problem"] for row in small} == {"order", "place", "spaces", "remat", "remat-twice", "offload"}
    for row in small:
        check(row)


def test_all_answers_are_valid():
    for row in ROWS:
        check(row)


def test_rows_and_files_belong_together():
    names = [files.key_of(row) for row in rows()]
    assert names == sorted(set(names))
    assert {row["instance"] for row in rows()} == set(instance_names())
    assert {row["answer"] for row in ROWS} == {path.name for path in ANSWERS.iterdir()}
    for row in rows():
        assert (row["value"] is None) == (row["answer"] is None) == (row["found"] is None)
        assert row["proved"] is not None
        assert row["possible"] == (row["bound"] is not None)
        assert row["possible"] or row["value"] is None
        least, most = (max, min) if row["problem"] == "spaces" else (min, max)
        assert row["value"] == least(row["values"].values(), default=None)
        assert row["bound"] == most(row["bounds"].values(), default=None)


def test_every_question_has_a_row():
    known = {files.key_of(row) for row in rows()}
    for name in instance_names():
        asked = instance(name)
        for problem in problems_of(asked):
            for limit in limits_of(asked) if problem in ("remat", "remat-twice", "offload") else [None]:
                assert files.key_of({"instance": name, "problem": problem, "limit_bytes": limit}) in known


def test_what_is_harder_is_never_better_known():
    """Two runs in the given order are an answer to any runs, and those to copies beside: the easier problem takes no more."""
    values = {(row["instance"], row["limit_bytes"], row["problem"]): row for row in rows()}
    for (name, limit, problem), row in values.items():
        easier = values.get((name, limit, {"remat-twice": "remat", "remat": "offload"}.get(problem, "")))
        if easier is not None and row["value"] is not None:
            assert easier["value"] is not None, (name, limit)
            assert easier["value"] <= row["value"], (name, limit)


def test_the_tables_are_current():
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text), "python -m yardstick.table"


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 3_000_000


def test_instances_are_whole():
    """Their numbers are in range, and the given order of graphs is right."""
    for name in instance_names():
        asked = instance(name)
        assert asked["name"] == name
        if asked["format"] == "yardstick.graph":
            count = len(asked["makes"])
            given = answer_of(asked, "order", list(range(count)), None)
            assert value_of(asked, given) * SHARES[0] // 100 == limits_of(asked)[0]
            for column in ("reads", "after", "takes", "workspace_bytes", "cost", "until"):
                assert len(asked.get(column, asked["makes"])) == count
            sizes = asked["bytes"]
            for makes, takes in zip(asked["makes"], asked.get("takes", asked["makes"]), strict=True):
                assert all(sizes[tensor] == sizes[makes[0]] for tensor in takes if "takes" in asked)
        else:
            assert len(asked["size"]) == len(asked["start"]) == len(asked["end"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A yardstick of its own, with one graph."""
    for module, name in ((files, "INSTANCES"), (files, "ANSWERS"), (fill, "ANSWERS"), (files, "BEST")):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).name)
    files.save_instance(random_graph(random.Random(3), 6, copies=True))
    return tmp_path


def test_what_is_better_is_taken_and_what_is_worse_is_not(folder: Path):
    asked = instance("random")
    good, bad = list(range(6)), [*range(6), next(node for node in (5, 4, 3) if node not in asked["once"])]
    limit = 10**6

    def found(sequence: list[int] | None, bound: int | None) -> Finding:
        return Finding("random", "offload", limit, {"sequence": sequence} if sequence else None, bound, "by hand", 0.1)

    least = sum(asked["cost"])
    for sequence, bound, value, best in ((bad, 3, least + asked["cost"][bad[-1]], 3), (good, 2, least, 3), (bad, 4, least, 4)):
        fill.record(asked, [found(sequence, bound)])
        row, harder = sorted(files.rows(), key=lambda each: each["problem"])
        assert (harder["problem"], harder["value"], harder["bound"]) == ("remat", None, best), "a proof holds of a harder problem, too"
        assert (row["value"], row["bound"]) == (value, best)
        assert value_of(asked, load(str(folder / "answers" / row["answer"]))) == value
    with pytest.raises(AnswerError, match="to have run"):
        fill.record(asked, [found(good[:-1], None)])
    with pytest.raises(ValueError, match="proven impossible"):
        fill.record(asked, [Finding("random", "offload", limit, None, None, "by hand", 0.1, possible=False)])


def test_engines_fill_all_rows(folder: Path):
    asked = instance("random")
    for problem in problems_of(asked):
        fill.record(asked, list(findings(asked, problem, Effort(max_states=200))))
    filled = files.rows()
    assert {row["problem"] for row in filled} == {"order", "remat", "offload"}
    assert all(row["value"] is None or row["value"] >= row["bound"] for row in filled)
    assert json.loads((folder / "best.json").read_text())["rows"] == filled


def test_published_files_give_the_instances_that_are_here():
    documents = [*placements(DATA / "place"), *orders(DATA / "order")]
    assert {"place-K", "spaces-K"} <= {document["name"] for document in documents}
    for document in documents:
        if document["name"] in instance_names():
            assert document == instance(document["name"])


def test_a_training_step_is_exported_as_lowtide_sees_it():
    """A graph's own problem and the one that its instance is read as: equal costs, and bounds, of its order and with copies."""
    graph = small_mlp_graph()
    document = {"format": "yardstick.graph", "name": "mlp"} | exported(graph)
    device = preset(MACHINE)
    own = RematProblem.of(graph, device.graph_us(graph), round_to=1, swap=device)
    read = remat_problem(document, copies=True)
    order = own.sequence_of(range(len(graph.nodes)))
    cost, same = cost_of(own, order), cost_of(read, np.arange(read.problem.node_count, dtype=np.int32))
    assert same.footprint_bytes.tolist() == cost.footprint_bytes.tolist()
    assert same.time_us == pytest.approx(1000 * cost.time_us, abs=read.problem.node_count)
    assert read.repeatable.tolist() == own.repeatable[order].tolist()
    assert value_of(document, answer_of(document, "order", list(range(len(order))), None)) == cost.peak_bytes


def small_mlp_graph() -> Graph:
    """A training step of two layers, with a view between them."""
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 2))
    batch = (torch.zeros(3, 4), torch.zeros(3, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    planning = lowtide.Planning(progress=False)
    step = lowtide.optimize(model, batch, loss=lambda model, x, y: (model(x) - y).square().mean(), optimizer=sgd, planning=planning)
    return step.plan.graph
