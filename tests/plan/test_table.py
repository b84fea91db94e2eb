import html
from dataclasses import replace

from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.plan.plan import Plan, Provenance
from tests.graphs import array, compute

X = array(Storage("x", 4, "cpu", Kind.INPUT))
NUMBER = array(Storage("rate", 0, "cpu", Kind.SCALAR))
SMALL = compute("small", X, nbytes=8)
LARGE = compute("large", SMALL.results[0], nbytes=3000)
PROVENANCE = Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2)
PLAN = Plan(
    Graph((X, NUMBER), (SMALL, LARGE), (LARGE.results[0],)), (0, 1), (-1, -1), (0, 0), 4, 3012, 3012, 3012, "optimal", "Best()", PROVENANCE
)


def test_storages_are_listed_by_bytes_without_those_that_have_none() -> None:
    header, *lines = PLAN.table().splitlines()
    assert header.split() == ["bytes", "name", "tensor", "kind", "steps", "made", "by"]
    assert [line.split()[2] for line in lines] == ["large", "small", "x"]
    assert lines[0].split()[:2] == ["2.93", "KiB"]
    assert "1 to 2" in lines[0]
    assert lines[2].endswith("the caller")
    assert PLAN.table(1).splitlines()[2].split() == ["12", "B", "in", "2", "more"]


def test_a_plan_is_one_line_where_it_is_represented() -> None:
    assert repr(PLAN) == "Plan(peak 2.94 KiB of 2.94 KiB in eager, proven least, 2 operators)"
    assert ", gap 12 B, 0.4%, " in repr(replace(PLAN, lower_bound_bytes=3000, status="feasible"))


def test_notebooks_are_shown_the_summary_escaped() -> None:
    plan = replace(PLAN, solver="<b>&")
    assert plan._repr_html_() == f"<pre>{html.escape(str(plan))}</pre>"
    assert "&lt;b&gt;&amp;" in plan._repr_html_()
