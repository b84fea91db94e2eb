"""Sizes of a range that a program returns, keeps, prints or counts: numbers and texts of each call, as eager has them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide

ROWS = (6, 4, 6, 8, 5)
_LOGGER = logging.getLogger("sizes")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.rows, self.mean, self.most, self.last, self.kept = 0, 0.0, 0, (), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def returned(model: Counting, x: Tensor) -> Any:
    return model(x).mean(), {"rows": len(x), "shape": x.shape, "half": x.shape[0] / 2, "root": math.sqrt(x.shape[0]), "text": f"{x.shape}"}


def kept(model: Counting, x: Tensor) -> Any:
    loss = model(x).mean()
    model.kept.append(x.shape[0])
    model.kept.append((loss.detach(), len(x), {"shape": tuple(x.shape)}))
    model.kept.append(max(len(x), 5))
    model.last = x.shape
    return loss


def in_texts(model: Counting, x: Tensor) -> Any:
    model.kept.append(str(x.shape))
    model.kept.append(f"{x.shape[0]:03d} of {len(x)!r}")
    model.kept.append("%d rows, %5.1f" % (x.shape[0], x.shape[0] / 2))  # noqa: UP031
    model.kept.append("{} by {}".format(*x.shape))
    model.kept.append("x".join(map(str, x.shape)))
    model.kept.append(repr(model(x).shape))
    return model(x).mean()


def counted(model: Counting, x: Tensor) -> Any:
    loss = model(x).mean()
    model.rows += len(x)
    model.mean += loss.item() * x.shape[0] / model.rows
    model.most = max(model.most, x.shape[0])
    return loss


def printed(model: Counting, x: Tensor) -> Any:
    print(x.shape, len(x), x.shape[0] * 2)
    print(f"{x.shape[0]} rows")
    _LOGGER.warning("a batch of %s", x.shape[0])
    return model(x).mean()


def run(loss: Callable[..., Any], eagerly: bool) -> Any:
    torch.manual_seed(0)
    model = Counting()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.rand(rows, 4) for rows in ROWS]
    results = []
    if not eagerly:
        shapes, planning = lowtide.Shapes(dynamic={0: {0: (2, 16)}}, on_new_shape="error"), lowtide.Planning(workspaces=False)
        step = lowtide.optimize(model, (batches[0],), loss=loss, optimizer=optimizer, shapes=shapes, planning=planning)
    for x in batches:
        if eagerly:
            optimizer.zero_grad()
            result = loss(model, x)
            (result[0] if isinstance(result, tuple) else result).backward()
            optimizer.step()
        else:
            result = step(x)
        results.append(result)
    state = [model.rows, model.mean, model.most, model.last, model.kept]
    return plain((results, state, [*model.parameters()]))


def plain(item: Any) -> Any:
    """With each one's class, as 6 == 6.0 and a size of torch's is equal to a number."""
    if isinstance(item, Tensor):
        return "tensor", item.tolist()
    if isinstance(item, dict):
        return {key: plain(each) for key, each in item.items()}
    return (type(item), [plain(each) for each in item] if isinstance(item, (list, tuple)) else item)


@pytest.mark.parametrize("loss", [returned, kept, in_texts, counted, printed])
def test_a_size_outside_is_that_of_the_call(loss: Callable[..., Any], capsys: Any, caplog: Any):
    shown = []
    for eagerly in (True, False):
        caplog.clear()
        shown.append((run(loss, eagerly), capsys.readouterr().out, [each.getMessage() for each in caplog.records if each.name == "sizes"]))
    assert shown[0] == shown[1]


def test_an_inference_function_returns_its_sizes():
    class Shapes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2, x.shape, len(x), x.numel() / 3

    function = lowtide.optimize(Shapes(), (torch.rand(3, 4),), shapes=lowtide.Shapes(dynamic={0: {0: (2, 16)}}))
    for rows in ROWS:
        x = torch.rand(rows, 4)
        assert plain(function(x)) == plain(Shapes()(x))


def test_a_size_that_is_a_key_is_refused_with_its_line():
    def loss(model: Counting, x: Tensor) -> Tensor:
        model.kept.append({f"{x.shape[0]}": 1})
        return model(x).mean()

    with pytest.raises(lowtide.CaptureError, match=r"is a key of a dictionary .* at .*test_sizes_outside"):
        run(loss, eagerly=False)
