"""Tensors that a program shows: each step shows what they are at that moment, as eager does but for what they were computed by."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.leaving import Meter, Net, check, square, trained


@dataclass
class Pair:
    """What writes its own text."""

    tensor: Any
    number: int = 0


def prints_parameters(net: Net, hidden: Tensor) -> None:
    print("weights", net.first.weight[0], net.first.bias)
    print(f"{net.last.bias} and {net.last.bias.detach()}")


def prints_what_is_written_later(net: Net, hidden: Tensor) -> None:
    hidden = hidden * 1
    print("before", hidden[0], f"{hidden[1]}")
    hidden.relu_()
    print("after", [hidden[0], {"one": hidden[1, 0]}])


def formats(net: Net, hidden: Tensor) -> None:
    print(f"{hidden.sum():.3f}", format(hidden.sum(), ".2f"), format(hidden.mean()), f"{(hidden > 0).sum():5d}")
    print("{:.2f} {}".format(hidden.sum(), hidden[0]))  # noqa: UP032
    print("%.2f %s %r" % (hidden.detach().mean(), hidden[0], hidden[1]))  # noqa: UP031


def texts(net: Net, hidden: Tensor) -> None:
    print(" ".join(map(str, hidden[:2])), ", ".join(str(row) for row in hidden[:2]), "sum " + str(hidden.sum()))
    print(Pair(hidden[0]), f"{Pair(hidden[0], 1)}", f"{[hidden[0], 1]}", len(str(hidden[0].detach())))


def logs(net: Net, hidden: Tensor) -> None:
    logging.getLogger("shown").warning("hidden %s", hidden[0])
    logging.getLogger("shown").warning(f"{hidden[0]} of {net.first.bias}")


def fails(net: Net, hidden: Tensor) -> None:
    for item in (hidden, net.first.bias.data):
        try:
            print(f"{item:.2f}")
        except TypeError as error:
            text = str(error)
        print(text)


def what_holds_more(net: Net, hidden: Tensor) -> None:
    print(net.state_dict().keys(), {"a": hidden}.keys())
    try:
        raise ValueError("too small", 1)
    except ValueError as error:
        print(error)


@pytest.mark.parametrize("show", [prints_parameters, prints_what_is_written_later, formats, texts, logs, fails, what_holds_more])
def test_a_step_shows_what_eager_shows(show: Callable[[Net, Tensor], object], capsys, caplog):
    shown = []
    for eagerly in (True, False):
        caplog.clear()
        trained(lambda: (Net(show), square, []), eagerly=eagerly)
        text = capsys.readouterr().out + caplog.text
        shown.append(re.sub(r",\s+(grad_fn=<\w+>|requires_grad=True)", "", text))
    assert "Fake" not in shown[1]
    assert shown[0] == shown[1] != ""


def keeps_texts(net: Net, hidden: Tensor) -> None:
    hidden = hidden.detach()
    net.outs.append({"rows": [repr(hidden[0]), f"{hidden[1]}"]})
    net.outs.append(f"{net.first.bias.data} {hidden.sum():.2f}")


def test_texts_of_tensors_are_kept():
    def make() -> Any:
        net = Net(keeps_texts)
        return net, square, net.outs

    check(make)


def test_a_text_of_a_tensor_alone_is_kept():
    def make() -> Any:
        meter = Meter()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            meter.last = f"{x[0]}"
            return square(model, x)

        return Net(), loss, meter

    check(make)


def test_a_text_of_a_tensor_decides_nothing():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        return value * 2 if "nan" in str(value) else value

    model = Net()
    with pytest.raises(lowtide.CaptureError):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


def test_texts_that_nobody_sees_are_no_hindrance():
    def unseen(net: Net, hidden: Tensor) -> None:
        logging.getLogger("shown").debug(f"{hidden} {net.first.bias}")
        text = f"{hidden[0]}"
        if hidden.shape[1] != 4:
            raise ValueError(text)

    check(lambda: (Net(unseen), square, []))
