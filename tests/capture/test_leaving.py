"""What a program puts into lists, dictionaries and attributes of the caller's is put there by each step, as eager puts it."""

from __future__ import annotations

import collections
import copy
import io
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Attributes, Meter, Net, check, square
from tests.training import differences

everywhere: list[Any] = []


def features_in_a_dictionary() -> Any:
    model, features = Net(), dict[str, Tensor]()
    model.first.register_forward_hook(lambda module, given, out: features.__setitem__("first", out))

    def hook(module: nn.Module, given: Any, out: Tensor) -> None:
        features["last"] = out

    model.last.register_forward_hook(hook)
    return model, lambda model, x: square(model, x) + features["first"].mean() + sum(map(torch.mean, features.values())), features


def features_in_a_list() -> Any:
    model, features = Net(), list[Tensor]()
    for layer in (model.first, model.last):
        layer.register_forward_hook(lambda module, given, out: features.append(out))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        features.clear()
        return square(model, x) + torch.stack([each.mean() for each in features]).sum() + len(features)

    return model, loss, features


def features_cleared_behind() -> Any:
    model, features = Net(), list[Tensor]()
    model.first.register_forward_hook(lambda module, given, out: features.append(out))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x) + sum(each.mean() for each in features)
        features.clear()
        return value

    return model, loss, features


def filled_in_forward() -> Any:
    def keep(net: Net, hidden: Tensor) -> None:
        net.outs.clear()
        net.outs.extend([hidden, hidden.mean()])

    model = Net(keep)
    return model, lambda model, x: square(model, x) + model.outs[1], model.outs


def assigned_in_forward() -> Any:
    def keep(net: Net, hidden: Tensor) -> None:
        net.attention, net.pair = hidden.detach(), (hidden, [hidden + 1])

    model = Net(keep)
    return model, square, Attributes(model, "attention", "pair")


def losses_of_a_module() -> Any:
    def loss(model: Net, x: Tensor) -> Tensor:
        value = square(model, x)
        model.outs.append(value.detach())
        return value

    model = Net()
    return model, loss, model.outs


def losses_everywhere() -> Any:
    everywhere.clear()
    newest, meter, latest = collections.deque[Any](maxlen=2), Meter(), [None]

    def loss(model: Net, x: Tensor) -> Tensor:
        value = square(model, x)
        everywhere.append({"loss": value.detach(), "rows": len(x), "x": (x, model.first.weight)})
        newest.append(value.detach())
        latest[0] = value.detach()
        meter.last = value.detach()
        meter.seen += [value.detach().clone().add_(1)]
        return value + meter.seen[-1]

    return Net(), loss, [everywhere, newest, meter, latest]


def numbers() -> Any:
    meter = Meter()
    metrics: dict[str, dict[str, list[Any]]] = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}

    def loss(model: Net, x: Tensor) -> Tensor:
        out = model(x)
        value = out.square().mean()
        meter.update(value.item(), x.shape[0])
        metrics["train" if model.training else "eval"]["norm"].append(out.norm().item())
        metrics["train"]["rows"].append([out[0].tolist(), (out > 0).sum().item()])
        metrics.setdefault("more", {}).setdefault("kinds", []).append(isinstance(value.item(), float))
        return value

    return Net(), loss, [meter, metrics]


def words_alone() -> Any:
    seen, many = list[Any](), ["before"] * 1500
    ordered = collections.OrderedDict[str, Any](first=0)

    def loss(model: nn.Module, x: Tensor, named: list[Any] = [], *, told: list[Any] = seen) -> Tensor:  # noqa: B006
        for each in (named, told, many):
            each.append("a")
        ordered["rows"] = len(x)
        return square(model, x)

    return Net(), loss, [seen, many, ordered, loss.__defaults__]


def in_an_order() -> Any:
    ordered = collections.OrderedDict[str, Any](first=collections.OrderedDict(a=1))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        ordered["first"]["b"] = value.detach()
        ordered["last"] = value.detach()
        return value

    return Net(), loss, ordered


def by_a_method_of_it() -> Any:
    kept, told = list[Any](), list[str]()
    put, tell = kept.append, told.append

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        put(value.detach())
        tell("a")
        return value

    return Net(), loss, [kept, told]


class Kept:
    everything: list[Any] = []  # noqa: RUF012


def within_tuples_and_classes() -> Any:
    pair = [Meter()], list[Any]()
    Kept.everything.clear()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        pair[1].append(value.item())
        Kept.everything.append(value.detach())
        return value

    return Net(), loss, [pair[1], Kept.everything]


def all_at_once() -> Any:
    kept = [1, 2, 3]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        kept[:] = [value.detach(), len(x)]
        return value * len(kept)

    return Net(), loss, kept


def what_it_only_reads_is_what_it_is() -> Any:
    settings, meters, kept = [-1, 2], [Meter()], list[Any]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).reshape(settings).square().mean() * (2 if type(settings) is list else 3)
        kept.append((value.detach(), copy.deepcopy(settings)))
        meters[0].update(value.detach(), 2)
        return value

    return Net(), loss, [kept, meters]


@pytest.mark.parametrize(
    "make",
    [
        features_in_a_dictionary,
        features_in_a_list,
        features_cleared_behind,
        filled_in_forward,
        assigned_in_forward,
        losses_of_a_module,
        losses_everywhere,
        numbers,
        words_alone,
        in_an_order,
        by_a_method_of_it,
        within_tuples_and_classes,
        all_at_once,
        what_it_only_reads_is_what_it_is,
    ],
)
def test_what_leaves_is_where_eager_leaves_it(make):
    check(make)


def test_it_is_captured_once(recwarn):
    def loss(model: Net, x: Tensor) -> Tensor:
        model.outs.append(square(model, x).item())
        return square(model, x)

    model = Net()
    step = lowtide.optimize(
        model,
        torch.rand(5, 3),
        loss=loss,
        optimizer=optim.SGD(model.parameters()),
        planning=lowtide.Planning(workspaces=False),
        run=lowtide.Run(check="always"),
    )
    assert model.outs == []
    for _ in range(4):
        step(torch.rand(5, 3))
    assert len(model.outs) == 4
    assert not [each for each in recwarn if "captured" in str(each.message)]
    model.outs = [7]
    step(torch.rand(5, 3))
    assert len(model.outs) == 2


def test_what_leaves_is_counted_in_the_peak():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(x.repeat(100, 1))
        return square(model, x)

    kept: list[Tensor] = []
    peaks = []
    for function in (square, loss):
        model = Net()
        step = lowtide.optimize(
            model, torch.rand(50, 3), loss=function, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )
        peaks.append(step.plan.peak_bytes)
    assert peaks[1] - peaks[0] >= 50 * 100 * 3 * 4


@pytest.mark.parametrize("limit", [None, "1MB"])
def test_a_step_that_fails_puts_there_what_eager_does(limit):
    """Under a limit the caller's own loop cannot run, and nothing is put there."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(model(x).detach())
        assert kept[-1].isfinite().all()
        return square(model, x)

    kept: list[Tensor] = []
    model = Net()
    step = lowtide.optimize(
        model,
        torch.rand(5, 3),
        loss=loss,
        optimizer=optim.SGD(model.parameters()),
        memory=limit,
        planning=lowtide.Planning(workspaces=False),
    )
    with pytest.raises(AssertionError):
        step(torch.full((5, 3), torch.nan))
    assert [each.isnan().all() for each in kept] == ([] if limit else [True])
    step(torch.rand(5, 3))
    assert len(kept) == (1 if limit else 2)


def test_inference_puts_there_too():
    model = Net(lambda net, hidden: net.outs.append(hidden))
    step = lowtide.optimize(model, torch.rand(5, 3), planning=lowtide.Planning(workspaces=False))
    expected = []
    for x in (torch.rand(5, 3), torch.rand(5, 3)):
        step(x)
        expected.append(torch.tanh(model.first(x)).detach())
    assert not differences(expected, model.outs)


def test_an_ordered_dictionary_is_put_back_whole():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept["last"] = square(model, x).detach()
        return square(model, x) * (2 if float(kept["last"]) > 1 else 1)

    kept = collections.OrderedDict[str, Any](first=1)
    model = Net()
    with pytest.raises(lowtide.CaptureError):
        lowtide.optimize(
            model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )
    assert list(kept.items()) == [("first", 1)]
    kept["second"] = 2
    kept.move_to_end("first")
    assert list(kept) == ["second", "first"]


def test_attributes_are_as_the_program_leaves_them():
    """Numbers and texts that it puts there, and had not read, whatever lies there between steps."""

    def keep(net: Net, hidden: Tensor) -> None:
        net.phase, net.rows, noted.last = "forward", len(hidden), "forward"

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        noted.rows = len(x)
        return square(model, x)

    noted = Meter()
    model = Net(keep)
    model.rows = 7
    step = lowtide.optimize(
        model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
    )
    assert not hasattr(model, "phase")
    assert not hasattr(noted, "rows")
    assert (model.rows, noted.last) == (7, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(torch.rand(5, 3))
            assert (model.phase, model.rows, noted.last, noted.rows) == ("forward", 5, "forward", 5)
            model.phase, model.rows, noted.last = "", 0, None


@pytest.mark.parametrize("what", ["attribute", "file"])
def test_a_count_elsewhere_is_refused(what):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if what == "file":
            file.write("step")
        else:
            loss.calls = getattr(loss, "calls", 0) + 1
        return square(model, x)

    file, model = io.StringIO(), Net()
    with pytest.raises(lowtide.CaptureError, match="changes what it rests on each time"):
        lowtide.optimize(
            model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )


def test_what_is_typed_in_is_the_users_too():
    """Code that lies in no file, as of a console."""
    names: dict[str, Any] = {"square": square, "kept": [], "words": []}
    lines = "def loss(model, x):\n    value = square(model, x)\n    kept.append(value.detach())\n    words.append('a')\n    return value"
    exec(compile(lines, "<stdin>", "exec"), names)
    check(lambda: (names["kept"].clear() or names["words"].clear() or Net(), names["loss"], [names["kept"], names["words"]]))


CELLS = """
class Kept:
    def __init__(self):
        self.losses, self.total = [], 0.0

def loss(model, x):
    value = square(model, x)
    kept.losses.append(value.item())
    kept.total += value.item()
    return value
"""


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_objects_of_classes_that_lie_in_no_file_are_the_users(file, monkeypatch):
    """Those of a notebook's cells, and of what Python is given to read."""

    def make() -> Any:
        cells.kept = cells.Kept()
        return Net(), cells.loss, vars(cells.kept)

    cells: Any = types.ModuleType("cells")
    vars(cells).update({"square": square} | ({"__file__": file} if file else {}))
    exec(compile(CELLS, "cell.py", "exec"), vars(cells))
    monkeypatch.setitem(sys.modules, "cells", cells)
    check(make)


def test_a_memo_is_filled_once():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) not in memo:
            memo[len(x)] = 1.0 / len(x)
        return square(model, x) * memo[len(x)]

    memo = dict[int, float]()
    model = Net()
    step = lowtide.optimize(
        model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
    )
    step(torch.rand(5, 3))
    assert memo == {5: 0.2}
