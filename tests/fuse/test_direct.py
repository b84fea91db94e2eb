"""Programs of which torch runs a part: their calls go a quick way, too, and notice all that the long way notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.running.direct import Direct
from lowtide.base.words import Words
from lowtide.runtime.compiler import NativeError
from lowtide.runtime.networks import watched
from lowtide.runtime.networks.built import team
from lowtide.runtime.networks.constants import Constants
from lowtide.runtime.networks.watched import Seen, Unchanged

WARM = 4  # calls, by which the quick way is there


class Spoken(nn.Module):
    """A lookup by torch before generated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(self.table(tokens)).relu())
        return found


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[lowtide.Step, Spoken, torch.Tensor]]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    model, tokens = Spoken().eval(), torch.randint(0, 50, (1, 12))
    yield _warm(lowtide.optimize(model, (tokens,), exact=False), tokens), model, tokens
    torch.set_num_threads(before)


def _warm(step: lowtide.Step, tokens: torch.Tensor) -> lowtide.Step:
    for _ in range(WARM):
        step(tokens)
    return step


def _way(step: lowtide.Step) -> Any:
    return None if step._steady is None else step._steady._quickly.way


def _near(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_it_goes_a_quick_way(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, _ = made
    for _ in range(5):
        tokens = torch.randint(0, 50, (1, 12))
        assert _near(step(tokens), model(tokens))
    assert isinstance(_way(step), Direct)
    assert _way(step).served


CHANGES: dict[str, Callable[[Spoken], Any]] = {
    "the table, which torch reads": lambda model: model.table.weight.data.mul_(2),
    "another table": lambda model: setattr(model, "table", nn.Embedding(50, 32)),
    "a weight of kernels": lambda model: model.one.weight.data.mul_(2),
    "written": lambda model: model.two.bias.data.copy_(torch.ones(8)),
    "a hook": lambda model: model.two.register_forward_hook(lambda module, args, result: 2 * result),
    "a hook with keywords": lambda model: model.two.register_forward_hook(lambda module, args, kwargs, result: -result, with_kwargs=True),
    "a hook before": lambda model: model.two.register_forward_pre_hook(
        lambda module, args, kwargs: ((-args[0],), kwargs), with_kwargs=True
    ),
    "another class": lambda model: setattr(model.one, "__class__", _Negative),
}


class _Negative(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(made: tuple[lowtide.Step, Spoken, torch.Tensor], change: str):
    step, model, tokens = made
    before = step(tokens)
    CHANGES[change](model)
    assert not _near(model(tokens), before)
    for _ in range(WARM):
        assert _near(step(tokens), model(tokens))


def test_a_switch_of_torch_is_noticed(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, tokens = made
    with torch.autocast("cpu", torch.bfloat16):
        assert step(tokens).dtype == model(tokens).dtype == torch.bfloat16
    assert step(tokens).dtype == torch.float32


def test_a_token_that_is_not_in_the_table_raises_as_eager(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, tokens = made
    wrong = torch.full_like(tokens, 50)
    with pytest.raises(IndexError):
        model(wrong)
    with pytest.raises(IndexError):
        step(wrong)
    assert _near(step(tokens), model(tokens))


def test_without_native_code_python_looks(monkeypatch: pytest.MonkeyPatch):
    def fails() -> Any:
        raise NativeError("no compiler")

    monkeypatch.setattr(watched, "native", fails)
    model, tokens = Spoken().eval(), torch.randint(0, 50, (1, 12))
    step = _warm(lowtide.optimize(model, (tokens,), exact=False), tokens)
    assert _way(step) is None
    assert _near(step(tokens), model(tokens))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_word_and_each_tensor_is_looked_at(threads: int):
    tensors, lists = [torch.zeros(3) for _ in range(11)], [[] for _ in range(13)]
    constants = Constants(tensors)
    assert constants.words is not None
    marked = [0, 3, 10]

    def fresh() -> Unchanged:
        plain = Words(id(each) + 16 for each in lists)  # its length
        seen = Constants(tensors).words
        assert seen is not None
        return Unchanged([plain], [Seen(*seen, [tensors[at].data_ptr() + 4 for at in marked], marked, tensors)], team(), 100)

    assert fresh()(threads)
    for each in lists:
        unchanged = fresh()
        each.append(1)
        assert not unchanged(threads)
    for each in tensors:
        unchanged = fresh()
        each.add_(0)
        assert not unchanged(threads)
        unchanged = fresh()
        each.data = torch.ones(3)
        assert not unchanged(threads)
    for at in marked:
        unchanged = fresh()
        tensors[at].numpy()[1] = 7
        assert not unchanged(threads)
