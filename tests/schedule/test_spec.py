"""Solvers as text: what is read, and what is refused in words that help."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.base.solver_text import named
from lowtide.cli.solvers import SOLVERS, parse_solver
from lowtide.errors import FormatError
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Best, ProgramOrder, ReadyList, ReversePostOrder, Schedule, Solver
from lowtide.schedule.base import limited


class Answerless:
    """Enough of a solver to be described."""

    def solve(self, problem: OrderProblem) -> Schedule:
        raise NotImplementedError


@dataclass(frozen=True)
class ILPModel(Answerless):
    max_states: int = 1000
    max_seconds: float | None = None
    prune: bool = True
    solver: Literal["highs", "cp-sat", 3] = "highs"
    label: str = "x"
    parts: tuple[int, ...] = ()
    first: Solver = field(default_factory=ReadyList)
    either: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        if self.max_states < 0:
            raise ValueError("max_states: expected 0 or more")


@dataclass(frozen=True)
class Wrapped(Answerless):
    inner: ReadyList
    table: dict[str, int] = field(default_factory=dict)
    hidden: int = field(default=0, init=False)


class Plain(Answerless):
    pass


KNOWN = {**SOLVERS, **named([ILPModel, Wrapped, Plain])}


@pytest.mark.parametrize(
    ("text", "solver"),
    [
        ("best", Best()),
        ("ready-list{oldest=waiting}", ReadyList("waiting")),
        ("ilpmodel{}", ILPModel()),
        ("ilpmodel{max_states=1_000,max_seconds=2.5,prune=false}", ILPModel(1000, 2.5, False)),
        (" ilpmodel { max_seconds = none , solver = cp-sat } ", ILPModel(solver="cp-sat")),
        ("ilpmodel{solver=3,label=true,either=4}", ILPModel(solver=3, label="true", either=4)),
        ("ilpmodel{max_seconds=inf,either=all}", ILPModel(max_seconds=math.inf)),
        ("ilpmodel{parts=[1,2],first=best{solvers=[program-order,reverse-post-order{root=outputs}]}}",
         ILPModel(parts=(1, 2), first=Best((ProgramOrder(), ReversePostOrder("outputs"))))),
        ("ilpmodel{parts=[]}", ILPModel()),
        ("wrapped{inner=ready-list}", Wrapped(ReadyList())),
    ],
)  # fmt: skip
def test_what_is_read(text: str, solver: Solver) -> None:
    assert parse_solver(text, KNOWN) == solver


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exat", r"expected one of auto, .*program-order, ready-list.*; got 'exat'"),
        ("", "expected a name, got the end: write it like"),
        ("{}", r"expected a name, got '\{'"),
        ("ready-list{oldest=index", r"expected ',' after 'ready-list\{oldest=index', got the end"),
        ("ready-list{oldest}", r"expected '=' after 'ready-list\{oldest', got '\}'"),
        ("ready-list{=index}", "expected a setting after"),
        ("ready-list}", r"expected the end after 'ready-list', got '\}'"),
        ("ready-list{oldest=index,}", "expected a setting after"),
        ("ready-list{age=1}", "ready-list: expected settings among oldest, got 'age'"),
        ("program-order{age=1}", "program-order: expected no settings, got 'age'"),
        ("plain{age=1}", "plain: expected no settings, got 'age'"),
        ("ready-list{oldest=index,oldest=index}", "expected each setting once, got 'oldest' twice"),
        ("ready-list{oldest=young}", "ready-list: oldest: expected one of index, waiting, got 'young'"),
        ("ready-list{oldest=[index]}", "ready-list: oldest: expected one of index, waiting, got a list"),
        ("ready-list{oldest=index{a=b}}", r"oldest: expected one of index, waiting, got 'index\{a=b\}'"),
        ("ilpmodel{max_states=1.5}", "max_states: expected an integer below 2\\*\\*63, got '1.5'"),
        ("ilpmodel{max_states=9223372036854775808}", "expected an integer below 2"),
        ("ilpmodel{max_states=1" + "0" * 5000 + "}", "expected an integer below 2"),
        ("ilpmodel{max_states=none}", "expected an integer"),
        ("ilpmodel{max_states=-1}", "solver ilpmodel: max_states: expected 0 or more"),
        ("ilpmodel{max_seconds=soon}", "max_seconds: expected a number, got 'soon'"),
        ("ilpmodel{max_seconds=nan}", "max_seconds: expected a number, got 'nan'"),
        ("ilpmodel{max_seconds=-1}", "solver ilpmodel: ILPModel: expected max_seconds to be 0 or more, got -1"),
        ("ilpmodel{prune=1}", "prune: expected true or false, got '1'"),
        ("ilpmodel{parts=3}", r"parts: expected a list like \[a,b\], got '3'"),
        ("ilpmodel{parts=[1,x]}", "parts: expected an integer below 2\\*\\*63, got 'x'"),
        ("ilpmodel{either=some}", "either: expected an integer below 2\\*\\*63 or one of all, got 'some'"),
        ("ilpmodel{first=3}", "expected one of auto, .*; got '3'"),
        ("best{solvers=[]}", "solver best: solvers: expected at least one, got none"),
        ("best{solvers=[ready-list{oldest=x}]}", "ready-list: oldest: expected one of index, waiting"),
        ("wrapped", "wrapped: expected a value for 'inner', got none"),
        ("wrapped{inner=program-order}", "wrapped: inner: expected ready-list, got 'program-order'"),
        ("wrapped{inner=ready-list,table=3}", "table: expected no value: this setting cannot be given as text, got '3'"),
        ("wrapped{inner=ready-list,hidden=3}", "expected settings among inner, table, got 'hidden'"),
        ("best{solvers=" * 5000, "expected at most 20 solvers and lists within one another"),
        ("best{solvers=" + "[" * 5000, "expected at most 20 solvers and lists within one another"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse_solver(text, KNOWN)
    assert "\n" not in str(caught.value)


def as_text(value: Any) -> str:
    """What `parse_solver` reads, from the dataclass alone."""
    if isinstance(value, tuple):
        return f"[{','.join(map(as_text, value))}]"
    if dataclasses.is_dataclass(value):
        inside = ",".join(f"{setting.name}={as_text(getattr(value, setting.name))}" for setting in dataclasses.fields(value))
        name = next(name for name, solver in KNOWN.items() if type(value) is solver)
        return f"{name}{{{inside}}}"
    return {True: "true", False: "false", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


simple_solvers = st.one_of(
    st.just(ProgramOrder()),
    st.builds(ReadyList, st.sampled_from(["index", "waiting"])),
    st.builds(ReversePostOrder, st.sampled_from(["inputs", "outputs"])),
)


def composed(inner: st.SearchStrategy[Solver]) -> st.SearchStrategy[Solver]:
    models = st.builds(
        ILPModel, max_states=st.integers(0, 2**63 - 1), max_seconds=st.none() | st.floats(min_value=0), prune=st.booleans(),
        solver=st.sampled_from(["highs", "cp-sat", 3]), label=st.sampled_from(["a b", "none", "é"]),
        parts=st.lists(st.integers(-5, 5)).map(tuple), first=inner, either=st.integers(0, 9) | st.just("all"),
    )  # fmt: skip
    return models | st.builds(Best, st.lists(inner, min_size=1, max_size=3).map(tuple))


@given(st.recursive(simple_solvers, composed, max_leaves=6))
def test_every_solver_comes_back_from_its_text(solver: Solver) -> None:
    assert parse_solver(as_text(solver), KNOWN) == solver


@given(st.text(st.sampled_from("best{}[]=,1 é\n"), max_size=12))
def test_any_text_is_a_solver_or_refused(text: str) -> None:
    try:
        parse_solver(text, SOLVERS)
    except FormatError:
        return
    assert text.replace(" ", "").replace("\n", "") in ("best", "best{}")


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_can_be_named_and_its_settings_given_as_text(name: str) -> None:
    """The annotations of a solver's settings can be resolved: text that fits none of them is refused, not a NameError."""
    assert isinstance(parse_solver(name, SOLVERS), SOLVERS[name])
    with pytest.raises(FormatError, match=f"solver {name}: expected (no )?settings"):
        parse_solver(f"{name}{{no_such_setting=1}}", SOLVERS)


def test_limits_replace_settings_where_there_are_such() -> None:
    solver = ILPModel(prune=False)
    assert limited(solver, max_states=5) == ILPModel(5, None, False)
    assert limited(solver, max_seconds=0.5) == ILPModel(1000, 0.5, False)
    assert limited(Plain(), max_states=None) is not None
    assert limited(solver) is solver


@pytest.mark.parametrize(
    ("solver", "limits", "message"),
    [
        (ReadyList(), {"max_states": 5}, "ReadyList: expected a solver that can be limited by max_states, got .* settings among oldest"),
        (Plain(), {"max_seconds": 5.0}, "Plain: expected a solver that can be limited by max_seconds, got one with no settings"),
        (ILPModel(), {"max_states": 0}, "solver ILPModel: expected max_states to be more than 0, got 0"),
        (ILPModel(), {"max_seconds": math.nan}, "expected max_seconds to be more than 0, got nan"),
    ],
)  # fmt: skip
def test_limits_that_a_solver_cannot_have(solver: Solver, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        limited(solver, **limits)
