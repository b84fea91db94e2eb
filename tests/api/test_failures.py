"""What a step that fails has changed: what eager PyTorch has by then, or it says how much."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from bench.in_values import in_values
from lowtide.ir.operators.nodes import is_view
from lowtide.lower.python import positions
from tests.api.networks import adamw, convnet, cross_entropy, pictures, rows, sgd, squares
from tests.programs import RandomOrder
from tests.training import Settings, copied, differences, eager_step


class InjectedError(RuntimeError):
    """What a test makes an operator raise."""


class _EagerFailure(TorchDispatchMode):
    """The operator of this number raises."""

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.number, self.names = number, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = _plain(str(func))
        if len(self.names) == self.number:
            raise InjectedError(name)
        self.names.append(name)
        return func(*args, **(kwargs or {}))


class _LineFailure(TorchDispatchMode):
    """What runs at this line of a step's program raises."""

    def __init__(self, line: int, error: type[BaseException] = InjectedError) -> None:
        super().__init__()
        self.line, self.error = line, error

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith("<lowtide step"):
            frame = frame.f_back
        if frame is not None and frame.f_lineno == self.line:
            raise self.error(_plain(str(func)))
        return func(*args, **(kwargs or {}))


def _plain(name: str) -> str:
    """ "add" of "aten.add_.Tensor" and of "aten.add.out"."""
    return name.split(".")[1].rstrip("_") if name.count(".") > 1 else name


class Recommender(nn.Module):
    """Embeddings, a counter, statistics, dropout, and a second result that nothing is differentiated through."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.mixed = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)])
        self.last = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.table(items)))
        self.seen.index_add_(0, items, torch.ones(len(items)))
        x = x + sum(branch(x) for branch in self.mixed)
        return self.last(self.drop(x))


def recommended(model: nn.Module, items: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = model(items)
    loss = functional.cross_entropy(logits, labels)
    return loss, logits.gather(1, labels[:, None]), logits.argmax(1)


def recommended_loss(model: nn.Module, items: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return recommended(model, items, labels)[0]


def items_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 10, (6,)), torch.randint(0, 5, (6,))


def heavy(model: nn.Module) -> optim.Optimizer:
    """Nodes of its update need no gradient."""
    return optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Any], Callable[[nn.Module], optim.Optimizer]]
CASES: dict[str, Case] = {
    "recommender": (Recommender, items_and_labels, recommended, heavy),
    "convnet": (convnet, pictures, cross_entropy, sgd),
    "plain": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)), rows, squares, adamw),
}


class Trained:
    """A model in training, eagerly or with lowtide, always from the same seed."""

    def __init__(self, case: Case, steps: int, **options: Any) -> None:
        model, batch, loss, optimizer = case
        torch.manual_seed(0)
        self.model = model()
        self.batch, self.loss, self.optimizer = batch(), loss, optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["foreach"] = False
        self.how = Settings(**options)
        for _ in range(steps):
            self.eager()

    def eager(self) -> Any:
        return eager_step(self.model, self.loss, self.optimizer, self.batch, {}, self.how)

    def optimized(self) -> lowtide.Step:
        return lowtide.optimize(
            self.model, self.batch, loss=self.loss, optimizer=self.optimizer,
            **in_values(accumulate=self.how.accumulate, workspaces=False, **self.how.options or {}),
        )  # fmt: skip

    def state(self) -> Any:
        return copied([dict(self.model.state_dict()), self.optimizer.state_dict(), torch.get_rng_state()])

    def restore(self, state: Any) -> None:
        model, optimizer, generator = copied(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(generator)


class Failing:
    """A training of which any operator before the loss can be made to fail, eagerly and in a step's program."""

    def __init__(self, case: Case, steps: int, **options: Any) -> None:
        self.training = Trained(case, steps, **options)
        self.start = self.training.state()
        names = self._names_before_loss()
        self.step = self.training.optimized()
        self.variant = self.step._lookup.families[0].variants[0]  # the one that runs next
        self.plan = self.variant.plan
        before = [node for node in self.variant.captured.graph.nodes if not is_view(node) and not node.op.startswith("py.")]
        self.operators: list[tuple[int, Any]] = []  # where eager runs it, and the graph's node
        for number, name in enumerate(names):  # eager runs a few operators more: views, and results that nobody reads
            if name == _plain(before[len(self.operators)].op):
                self.operators.append((number, before[len(self.operators)]))
        assert "nll_loss_forward" in names or "mean" in names
        assert self.operators[-1][0] >= len(names) - 2  # all are found

    def _names_before_loss(self) -> list[str]:
        counter, at = _EagerFailure(), []
        backward = torch.Tensor.backward

        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            at.append(len(counter.names))
            backward(tensor, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, counter:
            patch.setattr(torch.Tensor, "backward", noting)
            self.training.eager()
        self.training.restore(self.start)
        return counter.names[: at[-1]]

    def line_of(self, node: Any) -> int:
        """The first line of the program at which a node runs; a limit may have made the node anew."""
        index = next(at for at, each in enumerate(self.plan.graph.nodes) if each.results == node.results)
        return positions(self.plan).index(self.plan.order.index(index)) + 1

    def is_replaced(self, number: int) -> bool:
        """Whether algebra has put other operators in the place of the operator of this number."""
        node = self.operators[number][1]
        return not any(each.results == node.results and each.op == node.op for each in self.plan.graph.nodes)

    def fail(self, number: int) -> tuple[Any, Any]:
        """What eager and what the step leave where the operator of this number has failed."""
        at, node = self.operators[number]
        return self._after(lambda: self.training.eager(), _EagerFailure(at)), self._after(
            lambda: self.step(*self.training.batch), _LineFailure(self.line_of(node))
        )

    def _after(self, run: Callable[[], Any], failure: TorchDispatchMode) -> Any:
        self.training.restore(self.start)
        with pytest.raises(InjectedError) as found, failure:
            run()
        return [type(found.value), found.value.args, self.training.state()]


@cache
def failing(name: str, steps: int, order: int | None, latency: float | None = None) -> Failing:
    options = {} if order is None else {"solver": RandomOrder(order)}
    return Failing(CASES[name], steps, options=options if latency is None else {"latency": latency})


def assert_alike(expected: Any, found: Any) -> None:
    assert not (told := differences(expected, found)), "\n".join(told)


@pytest.mark.parametrize("steps", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("name", CASES)
def test_any_operator_that_fails_before_the_loss_leaves_what_eager_leaves(name: str, steps: int):
    training = failing(name, steps, None)
    for number in range(len(training.operators)):
        assert_alike(*training.fail(number))


@settings(max_examples=40)
@given(st.sampled_from(list(CASES)), st.sampled_from([0, 1]), st.integers(0, 5), st.integers(0, 10_000))
def test_so_it_is_in_every_order(name: str, steps: int, order: int, number: int):
    training = failing(name, steps, order)
    assert_alike(*training.fail(number % len(training.operators)))


def test_so_it_is_under_a_limit():
    training = failing("plain", 1, None, latency=2.0)
    assert training.plan.cost_report is not None
    own = [number for number in range(len(training.operators)) if not training.is_replaced(number)]
    assert len(own) > len(training.operators) / 2
    for number in own:
        assert_alike(*training.fail(number))


@pytest.mark.parametrize("arena", ["never", "always"])
def test_labels_out_of_range_raise_as_in_eager_and_decay_no_weight(arena: str):
    training = Trained(CASES["recommender"], 1, options={"arena": arena})
    step, start = training.optimized(), training.state()
    items, labels = training.batch
    wrong = torch.full_like(labels, 7)

    def outcome(run: Callable[[], Any]) -> Any:
        training.restore(start)
        with pytest.raises(IndexError, match="Target 7 is out of bounds") as found:
            run()
        return [found.value.args, training.state()]

    training.batch = (items, wrong)
    assert_alike(outcome(training.eager), outcome(lambda: step(items, wrong)))
    step(items, labels)  # and goes on


def test_with_micro_batches_the_loss_is_that_of_the_last():
    training = Trained((Recommender, items_and_labels, recommended_loss, heavy), 1, accumulate=2, options={"solver": RandomOrder(3)})
    step, start = training.optimized(), training.state()
    items, labels = training.batch
    wrong = labels.clone()
    wrong[-1] = 7  # in the second micro-batch
    outcomes = []
    for run in (lambda: training.eager(), lambda: step(items, wrong)):
        training.restore(start)
        training.batch = (items, wrong)
        with pytest.raises(IndexError):
            run()
        outcomes.append(training.state())
    assert_alike(*outcomes)


def test_a_call_without_gradients_that_fails_leaves_what_eager_leaves():
    torch.manual_seed(0)
    model = Recommender()
    start = copied(dict(model.state_dict()))
    items = torch.randint(0, 10, (6,))
    fn = lowtide.optimize(model, (items,), planning=lowtide.Planning(workspaces=False, solver=RandomOrder(1)))
    outcomes = []
    for call in (model, fn):
        model.load_state_dict(copied(start))
        torch.manual_seed(1)
        with pytest.raises(IndexError), torch.no_grad():
            call(items + 5)
        outcomes.append(copied([dict(model.state_dict()), torch.get_rng_state()]))
    assert_alike(*outcomes)


def after_loss(step: lowtide.Step) -> list[tuple[int, int]]:
    """The lines that run after the first update, each with the count of parameters that are updated before it."""
    plan = step._lookup.families[0].variants[-1].plan
    lines, done, written = positions(plan), set(), []
    for position, index in enumerate(plan.order):
        if done and not is_view(plan.graph.nodes[index]) and not plan.graph.nodes[index].op.startswith("py."):
            written.append((lines.index(position) + 1, len(done)))
        done |= {before.storage for before, _ in plan.graph.nodes[index].writes if before.storage.kind.value == "parameter"}
    return written


def test_a_failure_after_the_loss_counts_what_was_updated():
    training = Trained(CASES["plain"], 1)
    step, start = training.optimized(), training.state()
    for line, count in after_loss(step):
        training.restore(start)
        with pytest.raises(lowtide.StepError, match=f": {count} of 4 parameters were updated") as found, _LineFailure(line):
            step(*training.batch)
        assert isinstance(found.value.__cause__, InjectedError)
        before, now = start[0], training.state()[0]
        assert sum(not torch.equal(before[name], now[name]) for name in before) == count
    training.restore(start)
    step(*training.batch)


def test_a_failure_after_the_loss_that_has_updated_nothing_is_passed_on():
    training = Trained(CASES["plain"], 1)
    step, start = training.optimized(), training.state()
    plan = step._lookup.families[0].variants[-1].plan
    with pytest.raises(InjectedError), _LineFailure(positions(plan).index(_first_update(plan)) + 1):
        step(*training.batch)
    assert_alike(start[:2], training.state()[:2])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_an_interrupt_stays_one_and_tells_in_a_note():
    """Python looks for interrupts between lines: that of an operator may have run, or not."""
    training = Trained(CASES["plain"], 1)
    step, start = training.optimized(), training.state()
    plan = step._lookup.families[0].variants[-1].plan
    first = positions(plan).index(_first_update(plan)) + 1
    for line in (first, *(line for line, _ in after_loss(step))):
        training.restore(start)
        with pytest.raises(KeyboardInterrupt) as found, _LineFailure(line, KeyboardInterrupt):
            step(*training.batch)
        before, now = start[0], training.state()[0]
        updated = sum(not torch.equal(before[name], now[name]) for name in before)
        (note,) = found.value.__notes__
        assert f": {updated} of 4 parameters were updated" in note or f": {updated} or {updated + 1} of 4 parameters" in note


def _first_update(plan: Any) -> int:
    """The position in the order of the first node that writes a parameter or optimizer state."""
    kinds = [{before.storage.kind.value for before, _ in plan.graph.nodes[index].writes} for index in plan.order]
    return next(position for position, written in enumerate(kinds) if written & {"parameter", "state"})
