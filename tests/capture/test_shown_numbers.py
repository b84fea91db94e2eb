"""Numbers of the step that a program shows, measures and counts with: texts, prints, logs, functions of `math`, lengths, counters."""

from __future__ import annotations

import collections
import copy
import json
import logging
import math
import string
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from lowtide.ir.graph import Kind, Node
from tests.leaving import Attributes, Meter, Net, check, square, trained

Make = Callable[[], tuple[Net, Callable[..., Any], Any]]


def keeping(keep: Callable[[Tensor, nn.Module, Meter], object]) -> Make:
    """A program that keeps something of its loss in a meter."""

    def make() -> tuple[Net, Callable[..., Any], Any]:
        meter = Meter()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            keep(value, model, meter)
            return value

        average.__init__()  # type: ignore[misc]
        return Net(), loss, meter

    return make


def stepping(model: nn.Module, loss: Callable[..., Any]) -> Any:
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))


def f_strings(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    value, width = loss.item(), 9
    meter.seen.append(f"{value:.3f}")
    meter.seen.append(f"loss {value!r:>{width}} of {loss:.2e}, {loss.detach():.1f}")
    meter.last = "seen " + f"{int((loss > 0).sum())}{value}" + "."


def templates(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    value, count = loss.item(), (loss > 0).sum().item()
    meter.seen.append("%d of %s: %.3f%%" % (count, "all", value))  # noqa: UP031
    meter.seen.append("%.2f" % value)  # noqa: UP031
    meter.seen.append("{:.3f} {1[0]} {name:>{width}}".replace("{1[0]}", "{}").format(value, [1], name=count, width=4))
    meter.last = {"text": ", ".join(f"{name}: {each:.3f}" for name, each in {"a": value, "b": 2 * value}.items()), "str": str(value)}


def functions_of_math(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    value = loss.item()
    meter.seen += [
        math.exp(value),
        math.log(value),
        math.sqrt(value),
        math.exp(min(value, 20.0)),
        math.log10(value / 2 + 1),
        value**0.5,
        2**value,
    ]
    meter.last = max(value, 0.01)


def lengths(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    before = len(meter.seen)
    meter.seen.append(loss.detach())
    meter.last = (before, len(meter.seen), f"{len(meter.seen)} losses")


def texts_of_containers(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    row = {"loss": loss.item(), "step": 1, "all": [loss.item(), None]}
    meter.seen += [json.dumps(row), json.dumps(row, indent=1, default=lambda item: 0), repr([loss.item()]), str((loss.item(), "a"))]
    meter.seen += [f"{row}", f"{row['all']!r:>40}", "%s %d" % (row, loss.item() * 100), format(loss.item(), ".2f")]  # noqa: UP031
    meter.last = json.dumps([[f"{loss.item():.1f}"]])


def whole_numbers(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    value = 100 * loss.item()
    meter.seen += [int(value), round(value), math.floor(value), math.ceil(-value), math.trunc(-value), int((loss > 0).sum().item())]
    meter.seen += [sorted([value, 3.0, -value]), sorted((value, 2.0))[0]]
    meter.last = int(value) * 10 + 1


def texts_of_texts(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    meter.seen += [f"{loss.item():.3e}".upper().rjust(12), "|" + f" {loss.item():.2f}".strip().zfill(8), str(loss.item()).replace(".", ",")]


def smoothed(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    average.count += 1
    average.mean = 0.9 * average.mean + 0.1 * loss.item()
    meter.seen.append(average.mean / (1 - 0.9**average.count))


class Average:
    count, mean = 0, 0.0

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0


average = Average()


@pytest.mark.parametrize(
    "keep", [f_strings, templates, functions_of_math, lengths, texts_of_containers, whole_numbers, texts_of_texts, smoothed]
)
def test_what_is_made_of_a_number_is_made_again_by_each_step(keep):
    check(keeping(keep))


def test_a_print_and_a_log_of_a_number_are_repeated_by_each_step(capsys):
    told = list[str]()

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(f"{record.funcName} {record.getMessage()}")

    logger = logging.getLogger("tests.shown")
    logger.handlers, logger.level, logger.propagate = [Telling()], logging.INFO, False

    def tell(loss: Tensor, model: nn.Module, meter: Meter) -> None:
        print("loss", loss.item(), sep=": ")
        logger.info("loss %.3f of %s", loss.item(), "all")
        logger.info(f"loss {loss.item():.4f}")

    shown = []
    for eagerly in (True, False):
        trained(keeping(tell), eagerly=eagerly)
        shown.append((capsys.readouterr().out, [*told]))
        told.clear()
    assert shown[0] == shown[1]
    assert len(shown[0][1]) == 8


def test_a_logger_that_is_first_used_behind_a_print_is_no_hindrance():
    logger = logging.getLogger("tests.shown.first")
    logger.setLevel(logging.INFO)  # which empties what it remembers
    told = list[str]()
    logger.addFilter(lambda record: told.append(record.getMessage()) is not None)

    def tell(loss: Tensor, model: nn.Module, meter: Meter) -> None:
        print("loss", loss.item())
        logger.info("loss %.3f", loss.item())

    trained(keeping(tell), eagerly=False)
    stepped, told[:] = [*told], []
    trained(keeping(tell), eagerly=True)
    assert stepped == told
    assert len(told) == 4


def reads(text: str, loss: Tensor) -> Tensor:
    return loss * len(text)


def compares(text: str, loss: Tensor) -> Tensor:
    return loss * 2 if text == "0.00" else loss


def looks_into(text: str, loss: Tensor) -> Tensor:
    return loss * 2 if "nan" in text or text.startswith("-") else loss


@pytest.mark.parametrize("use", [reads, compares, looks_into])
def test_a_text_of_a_number_that_decides_is_refused(use):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        return use(f"{value.item():.2f}", value)

    model = Net()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        stepping(model, loss)


def test_a_text_that_cannot_be_made_of_any_number_is_eagers_error():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        kept.append(f"{value.item():d}")
        return value

    kept, model = list[str](), Net()
    with pytest.raises((lowtide.CaptureError, ValueError), match=r"Unknown format code|control flow"):
        stepping(model, loss)
    assert kept == []


def test_a_step_whose_number_has_no_logarithm_fails_as_eager_and_writes_nothing():
    kept = list[float]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x) * x.sum()
        kept.append(math.log(value.item()))
        return value

    model = Net()
    step = stepping(model, loss)
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(ValueError, match="math domain error"):
        step(torch.zeros(5, 3))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert kept == []
    value = step(torch.ones(5, 3))
    assert kept == [math.log(value.item())]


class Criterion(nn.Module):
    """Sums up in attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.calls = 0.0, 0

    def forward(self, out: Tensor) -> Tensor:
        loss = out.square().mean()
        self.total += loss.item()
        self.calls += 1
        return loss


def in_a_criterion() -> Any:
    criterion = Criterion()
    return Net(), lambda model, x: criterion(model(x)), Attributes(criterion, "total", "calls")


def in_the_model() -> Any:
    def keep(net: Any, hidden: Tensor) -> None:
        net.total += hidden.mean().item()
        net.calls += 1
        net.outs.append(f"{net.calls}: {net.total / net.calls:.4f}")

    net: Any = Net(keep)
    net.total, net.calls = 0.0, 0
    return net, square, Attributes(net, "total", "calls", "outs")


def calls_of_the_model() -> Any:
    def keep(net: Any, hidden: Tensor) -> None:
        net.calls += 1

    net: Any = Net(keep)
    net.calls = 0
    return net, square, Attributes(net, "calls")


def reset_in_the_model() -> Any:
    def keep(net: Any, hidden: Tensor) -> None:
        net.total += hidden.mean().item()
        net.outs.append(net.total)
        net.total = 0.0

    net: Any = Net(keep)
    net.total = 5.0
    return net, square, Attributes(net, "total", "outs")


def in_a_list_of_the_model() -> Any:
    def keep(net: Any, hidden: Tensor) -> None:
        net.log[0] += 1
        net.log[1] += hidden.mean().item()

    net: Any = Net(keep)
    net.log = [0, 0.0]
    return net, square, Attributes(net, "log")


def in_a_list() -> Any:
    counts, recent = [0, 0.5], collections.deque([1.5, 2])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        counts[0] += 1
        value = square(model, x)
        counts[1] = 0.9 * counts[1] + 0.1 * value.item()
        recent[1] += counts[0]
        return value

    return Net(), loss, [counts, recent]


@pytest.mark.parametrize("make", [in_a_criterion, in_the_model, calls_of_the_model, reset_in_the_model, in_a_list, in_a_list_of_the_model])
def test_sums_in_modules_and_in_lists_go_on(make, recwarn):
    check(make)
    assert make is reset_in_the_model or not [each for each in recwarn if "captured" in str(each.message)]


@pytest.mark.parametrize("decides", [lambda counts: counts[0] > 2, lambda counts: len(counts) > 5])
def test_a_counter_that_decides(decides):
    def make():
        counts = [0]

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            counts[0] += 1
            counts.append(1)
            return square(model, x) * (2 if decides(counts) else 1)

        return Net(), loss, counts

    check(make)


def test_what_may_have_no_logarithm_comes_before_all_that_trains():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        kept.append(math.log(value.item()))
        return value

    kept = list[float]()
    graph = stepping(Net(), loss).plan.graph
    makers = {value: node for node in graph.nodes for value in node.results}
    logarithm = next(node for node in graph.nodes if node.op == "py.math_log")
    for node in graph.nodes:
        if any(value.storage.kind is Kind.PARAMETER for value, _ in node.writes):
            before, waiting = set[Node](), [node]
            while waiting:
                each = waiting.pop()
                if each not in before:
                    before.add(each)
                    waiting.extend((*each.after, *(makers[value] for value in each.inputs if value in makers)))
            assert logarithm in before


def test_numbers_in_containers_are_shown_as_they_are(capsys):
    told = list[str]()

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger = logging.getLogger("tests.shown.within")
    logger.handlers, logger.level, logger.propagate = [Telling()], logging.INFO, False

    def tell(loss: Tensor, model: nn.Module, meter: Meter) -> None:
        row = {"loss": loss.item(), "rows": [loss.detach(), (loss.item(),)]}
        print(row, [loss.item(), 1])
        row["loss"] = None
        logger.info({"loss": loss.item()})
        totals["n"] += loss.item()
        print(totals)

    totals, shown = {"n": 0.0}, []
    for eagerly in (True, False):
        totals["n"] = 0.0
        trained(keeping(tell), eagerly=eagerly)
        shown.append((capsys.readouterr().out, [*told]))
        told.clear()
    assert shown[0] == shown[1]
    assert shown[0][0].count("loss") == 4


def in_a_text(value: Any) -> Any:
    return string.Template("$value").substitute(value=value)


def by_its_methods(value: Any) -> Any:
    return value.hex() if hasattr(value, "hex") else "none"


@pytest.mark.parametrize("use", [in_a_text, by_its_methods])
def test_a_number_that_nobody_knows_is_never_shown_as_an_object(use):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        kept.append(use(value.item()))
        return value

    kept, model = list[Any](), Net()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        stepping(model, loss)
    assert kept == []


def test_texts_and_lengths_go_to_standard_output_as_eager_writes_them(capsys):
    def write(loss: Tensor, model: nn.Module, meter: Meter) -> None:
        recent.append(loss.item())
        meter.last = sys.stdout.write(f"{loss.item():.4f} of {len(recent)}\n")
        sys.stderr.write("{}\n".format(loss.item()))  # noqa: UP032

    shown, recent = [], collections.deque[float](maxlen=2)
    for eagerly in (True, False):
        recent.clear()
        shown.append((trained(keeping(write), eagerly=eagerly)[2], capsys.readouterr()))
    assert shown[0] == shown[1]
    assert shown[0][1].out.count("of 2") == 3


def test_numbers_that_a_call_returns_may_be_made_of_others():
    def loss(model: nn.Module, x: Tensor) -> Any:
        value = square(model, x)
        return value, {"whole": int(100 * value.item()), "count": f"{(x > 0).sum().item():d}", "text": f"{value.item():.2f}"}

    model, x = Net(), torch.rand(5, 3)
    expected = loss(model, x)
    assert stepping(model, loss)(x)[1] == expected[1]


def test_a_whole_number_of_what_is_none_is_eagers_error_before_anything_is_written():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        kept.append(int(value.item()))
        return value

    kept, model = list[int](), Net()
    step = stepping(model, loss)
    step(torch.rand(5, 3))
    weights = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        step(torch.full((5, 3), math.nan))
    assert len(kept) == 1
    assert all(map(torch.equal, weights, model.parameters()))


def copies(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    row = {"loss": loss.item()}
    meter.seen += [copy.deepcopy(row), copy.copy(loss.item())]


def averages(loss: Tensor, model: nn.Module, meter: Meter) -> None:
    count = (loss > 1e9).sum().item()
    meter.seen.append(loss.item() / max(count, 1))
    meter.seen.append(loss.item() / max(0.5, loss.item()))


@pytest.mark.parametrize("keep", [copies, averages])
def test_copies_of_numbers_and_their_quotients_are_made_by_each_step(keep):
    check(keeping(keep))
