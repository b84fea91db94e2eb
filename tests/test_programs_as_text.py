"""Programs before and after, as text: what capture, the rewrites and lowering make of a few lines.

The cases lie in `tests/golden/programs`, one page a group, and are meant to be read. A case is a heading, a block of what goes in, and
a block of what comes out. `pytest tests/test_programs_as_text.py --update-golden` writes the latter as they are now, to be looked at.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

from lowtide.api.captures import Captures
from lowtide.base.messages import Stages
from lowtide.capture.optimizers.scalars import Guard
from lowtide.capture.program import TrainingProgram
from lowtide.cost.laboratory import Laboratory
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.lower.python import lower
from lowtide.rewrite.base import Rewritten
from lowtide.rewrite.losses import add_into_sums, make_anew, sum_losses
from lowtide.rewrite.results import read_results
from lowtide.rewrite.rewritings import RULES, rewrite
from tests.conftest import GOLDEN
from tests.lower.ranged_graphs import Decided
from tests.splits import along, split

PAGES = GOLDEN / "programs"
CASE = re.compile(r"^## (?P<name>[^\n]+)\n.*?^```\w+\n(?P<given>.*?)^```\n\n^```\w+\n(?P<expected>.*?)^```\n", re.MULTILINE | re.DOTALL)


class Program(nn.Module):
    """A function whose defaults say what it is called with: what can be registered is the module's, the other tensors are the batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        given = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        self.own = [name for name, each in given.items() if isinstance(each, (nn.Module, nn.Parameter, nn.Buffer))]
        self.batch = {name: each for name, each in given.items() if name not in self.own}
        for name in self.own:
            setattr(self, name, given[name])

    def forward(self, **batch: Any) -> Any:
        return self.function(**batch, **{name: getattr(self, name) for name in self.own})


def capture(name: str, source: str) -> str:
    """The graph of a call of `program`, or with an `optimizer` of a step that trains it, and what it takes for granted."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "optim": optim}
    exec(compile(source, "program.py", "exec"), names)
    model = Program(names["program"])
    training = None
    if "optimizer" in names:
        training = TrainingProgram(
            model, lambda model, **batch: model(**batch), names["optimizer"](model.parameters()), None, names.get("accumulate", 1), None
        )
    capturing = Captures(model, training, torch.device("cpu"), Stages(None, False))
    with Laboratory(gradients=training is not None, tries=False) as laboratory:
        captured = capturing.programs((), model.batch, laboratory)[-1]
    check_graph(captured.graph)
    numbers = [guard for guard in captured.guards if isinstance(guard, Guard) and not isinstance(guard.operand, bool)]  # no flags
    facts = [f"{guard.slot.path[-1]} {guard.compare} {guard.operand} is {guard.outcome}" for guard in numbers]
    facts += [
        f"{reading.question.op} at {reading.question.line.partition(',')[0]} gives {reading.outcome}" for reading in captured.readings
    ]
    return to_text(captured.graph, sources=False) + "".join(f"# where {each}\n" for each in facts)


def rewritten(by: str, source: str) -> str:
    """The graph after a rewrite: the row of the algebra's table of that name, or what the first line names."""
    first, _, rest = source.partition("\n")
    if by in RULES_BY_NAME:
        done = rewrite(given := parse(source), [RULES_BY_NAME[by]])
        assert done.applied
    elif divided := DIVIDED.fullmatch(first):
        given = parse(rest)
        value = next(each for node in given.nodes for each in node.results if each.name == divided["value"])
        nodes = [node for node in given.nodes if {each.name for each in node.results} & {*divided["names"].split(", ")}]
        done = split(given, along(nodes, value, int(divided["dim"])), int(divided["parts"]))
    else:
        done = REWRITES[first.removeprefix("# ")](given := parse(rest))
    check_graph(given)
    check_graph(done.graph)
    return to_text(done.graph)


def lowered(name: str, source: str) -> str:
    """The Python program of a graph in its own order, in which each node takes the memory of what dies there, if it may."""
    graph = parse(source)
    check_graph(graph)
    return lower(Decided.in_order(graph)).partition("aten = ops.aten\n")[2].lstrip("\n")


RULES_BY_NAME = {rule.name: rule for rule in RULES}
REWRITES: dict[str, Callable[[Graph], Rewritten]] = {each.__name__: each for each in (sum_losses, read_results, make_anew, add_into_sums)}
DIVIDED = re.compile(r"# (?P<names>[\w, ]+), along dimension (?P<dim>\d+) of (?P<value>\w+), in (?P<parts>\d+) parts")
BECOMES = {"capture": capture, "rewrite": rewritten, "lower": lowered}


def cases() -> list[Any]:
    found = [(page.stem, case["name"]) for page in sorted(PAGES.glob("*.md")) for case in CASE.finditer(page.read_text(encoding="utf-8"))]
    return [pytest.param(page, name, id=f"{page}: {name}") for page, name in found]


@pytest.mark.parametrize(("page", "name"), cases())
def test_what_becomes_of_a_program(page: str, name: str, request: pytest.FixtureRequest) -> None:
    path = PAGES / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    (case,) = (each for each in CASE.finditer(text) if each["name"] == name)
    became = BECOMES[page.partition("_")[0]](name, case["given"])
    if request.config.getoption("--update-golden"):
        start, end = case.span("expected")
        path.write_text(text[:start] + became + text[end:], encoding="utf-8", newline="\n")
    else:
        assert became == case["expected"]


def test_every_heading_is_a_case() -> None:
    """And no rule of the algebra is without one."""
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        names = [case["name"] for case in CASE.finditer(text)]
        assert names == re.findall(r"^## (.+)$", text, re.MULTILINE), page.name
        assert len(names) == len(set(names)), page.name
        assert page.stem != "rewrite_algebra" or {*names} == {*RULES_BY_NAME}
