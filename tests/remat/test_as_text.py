"""Eviction and write-out as text: a program, a limit, and the program that keeps it."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.presets import preset
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.remat.eviction import ScoreWeights
from lowtide.remat.problem import RematProblem
from lowtide.remat.write_out import rematerialise
from tests.sequences import evict

# A link that copies 16 bytes in a microsecond.
LINK = dataclasses.replace(preset("rtx3090"), launch_us=0.01, to_host_bytes_per_s=1.6e7, from_host_bytes_per_s=1.6e7)
SWAPPING = ScoreWeights(store_above=0.0, load_weight=0.1, lead=1.0)


def program(given: str = "x,  # float32[4] 16 B input cpu", a: str = "aten.sin.default(x)", also: str = "", last: str = "a") -> str:
    """A program whose peak is 96 bytes, at `wide` and at `d`, while `a` and `b` wait for the end."""
    return f"""\
def graph(
    {given}
):
    a = {a}  # float32[4] 16 B activation cpu
    b = aten.exp.default(a)  # float32[4] 16 B activation cpu
    c = aten.cos.default(b)  # float32[4] 16 B activation cpu
{also}    wide = aten.repeat.default(c, (2,))  # float32[8] 32 B activation cpu
    d = aten.logsumexp.default(wide, (0,))  # float32[4] 16 B activation cpu
    e = aten.mul.Tensor(d, b)  # float32[4] 16 B gradient cpu
    f = aten.mul.Tensor(e, {last})  # float32[4] 16 B gradient cpu
    return (f,)
"""


def kept_within(before: str, limit_bytes: int, node_us: dict[str, float], *, swap: bool = False, swap_state: bool = False) -> str:
    """What eviction makes of a program, without comments; every operator takes a microsecond unless told."""
    graph = parse(before)
    times = [node_us.get(node.results[0].name if node.results else "", 1.0) for node in graph.nodes]
    problem = RematProblem.of(graph, times, swap=LINK if swap else None, swap_state=swap_state)
    found = evict(problem, problem.sequence_of(range(len(graph.nodes))), limit_bytes, SWAPPING if swap else ScoreWeights())
    assert found is not None
    written = rematerialise(graph, found.sequence.tolist()).graph
    check_graph(written)
    assert simulate(order_problem(written), range(len(written.nodes))).peak_bytes <= limit_bytes
    return "\n".join(line.split("  #")[0].strip() for line in to_text(written).splitlines())


PARAMETER = {"given": "w,  # float32[4] 16 B parameter cpu", "a": "aten.sin.default(w)"}
CASES = {
    "the cheaper one is computed again: a": (
        program(), 80, {"node_us": {"b": 9.0}},
        """\
def graph(
x,
):
a = aten.sin.default(x)
b = aten.exp.default(a)
c = aten.cos.default(b)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
e = aten.mul.Tensor(d, b)
a_again2 = aten.sin.default(x)
f = aten.mul.Tensor(e, a_again2)
return (f,)""",
    ),
    "the cheaper one is computed again: b": (
        program(), 80, {"node_us": {"a": 9.0}},
        """\
def graph(
x,
):
a = aten.sin.default(x)
b = aten.exp.default(a)
c = aten.cos.default(b)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
b_again2 = aten.exp.default(a)
e = aten.mul.Tensor(d, b_again2)
f = aten.mul.Tensor(e, a)
return (f,)""",
    ),
    "what is drawn is kept": (
        program(a="aten.bernoulli.p(x, 0.5)"), 80, {"node_us": {"b": 9.0}},
        """\
def graph(
x,
):
a = aten.bernoulli.p(x, 0.5)
b = aten.exp.default(a)
c = aten.cos.default(b)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
b_again2 = aten.exp.default(a)
e = aten.mul.Tensor(d, b_again2)
f = aten.mul.Tensor(e, a)
return (f,)""",
    ),
    "what reads a parameter is not computed again once that is written": (
        program(**PARAMETER, also="    aten.add_.Tensor(w, c)  # writes w -> w_v1\n"), 80, {"node_us": {"b": 9.0}},
        """\
def graph(
w,
):
a = aten.sin.default(w)
b = aten.exp.default(a)
c = aten.cos.default(b)
aten.add_.Tensor(w, c)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
b_again2 = aten.exp.default(a)
e = aten.mul.Tensor(d, b_again2)
f = aten.mul.Tensor(e, a)
return (f,)""",
    ),
    "a view is taken of the present copy": (
        program(also="    v = aten.view.default(a, (4,))  # float32[4] on a\n", last="v"), 80, {"node_us": {"b": 9.0}},
        """\
def graph(
x,
):
a = aten.sin.default(x)
b = aten.exp.default(a)
c = aten.cos.default(b)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
e = aten.mul.Tensor(d, b)
a_again2 = aten.sin.default(x)
v_again = aten.view.default(a_again2, (4,))
f = aten.mul.Tensor(e, v_again)
return (f,)""",
    ),
    "what takes long to compute goes to the host and is restored": (
        program(), 80, {"node_us": {"a": 50.0, "b": 50.0}, "swap": True},
        """\
def graph(
x,
):
a = aten.sin.default(x)
a_host = host.store(a)
b = aten.exp.default(a)
c = aten.cos.default(b)
host.drop(a, a_host)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
a_back = host.load(a_host)
e = aten.mul.Tensor(d, b)
f = aten.mul.Tensor(e, a_back)
return (f,)""",
    ),
    "a parameter is offloaded while nobody reads it": (
        program(**PARAMETER, last="w"), 64, {"node_us": {"a": 50.0, "b": 50.0}, "swap": True, "swap_state": True},
        """\
def graph(
w,
):
a = aten.sin.default(w)
b = aten.exp.default(a)
w_host = host.store(w)
c = aten.cos.default(b)
host.drop(w, w_host)
wide = aten.repeat.default(c, (2,))
d = aten.logsumexp.default(wide, (0,))
w_back = host.load(w_host)
e = aten.mul.Tensor(d, b)
f = aten.mul.Tensor(e, w_back)
return (f,)""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_under_a_limit(name: str) -> None:
    before, limit_bytes, settings, after = CASES[name]
    assert kept_within(before, limit_bytes, **settings) == after


def test_with_room_for_all_a_program_stays_as_it_is() -> None:
    assert kept_within(program(), 96, {}) == "\n".join(line.split("  #")[0].strip() for line in program().splitlines())
