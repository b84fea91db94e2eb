"""Calls of one generated network like the last one: they notice all that the long way notices, and give results of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.frozen import UNLIKE

WARM = 4  # calls: later ones are like the last


class Net(nn.Module):
    """One generated network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))
        return found


class Several(nn.Module):
    """The same for two arguments and results by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.one(x).relu()
        return {"hidden": hidden, "out": self.two(hidden) + y}


def warm(fn: Any, *batch: torch.Tensor) -> Any:
    for _ in range(WARM):
        fn(*batch)
    return fn


@pytest.fixture(params=["step", "frozen"])
def made(request: pytest.FixtureRequest) -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    step = warm(lowtide.optimize(model, (x,), exact=False), x)
    return (step if request.param == "step" else warm(step.frozen(x), x)), model, x


def near(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def like_the_last(fn: Any, *args: Any) -> bool:
    """Whether a call is one that need not look everything up."""
    if isinstance(fn, lowtide.Frozen):
        return fn._specs is not None and fn._specs.hold(args, {})
    assert fn._again is not None
    return fn._again(args, {}) is not UNLIKE


def test_calls_like_the_last_are_right(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, model, x = made
    for other in (torch.randn_like(x), torch.randn(4, 3, 6, 6)[2:3], torch.randn_like(x).requires_grad_(), torch.randn_like(x).detach()):
        with torch.no_grad():
            assert like_the_last(fn, other)
            assert near(fn(other), model(other))


def test_results_stay_what_they_are(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, model, x = made
    batches = [torch.randn_like(x) for _ in range(20)]
    found = [fn(batch) for batch in batches]
    assert len({each.data_ptr() for each in found}) == len(found)
    assert all(near(each, model(batch)) for each, batch in zip(found, batches, strict=True))


def test_results_made_in_inference_mode_can_be_used_outside(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, _, x = made
    with torch.inference_mode():
        for _ in range(3):
            fn(x)
    for _ in range(20):
        weight = torch.ones(5, requires_grad=True)
        (fn(x) * weight).sum().backward()
        assert weight.grad is not None


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda x: x.double(),
    "integers": lambda x: x.int(),
    "size": lambda x: torch.randn(1, 3, 7, 6),
    "turned": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "negative view": torch._neg_view,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "parameter": nn.Parameter,
    "number": lambda x: 1.0,
    "nothing": lambda x: None,
    "list": lambda x: [x],
    "emptied": lambda x: _resized(x.clone(), 0),
    "let go in part": lambda x: _resized(x.clone(), x.nbytes - 1),
}


def _resized(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    x.untyped_storage().resize_(nbytes)
    return x


@pytest.mark.parametrize("kind", OTHERS)
def test_what_looks_otherwise_is_left_to_a_longer_look(made: tuple[Any, nn.Module, torch.Tensor], kind: str):
    fn, _, x = made
    assert not like_the_last(fn, OTHERS[kind](x))
    assert not like_the_last(fn, x, x)
    assert not like_the_last(fn)
    assert like_the_last(fn, x)


def test_a_tensor_within_a_transform_is_left_to_a_longer_look(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, _, x = made
    seen: list[bool] = []

    def look(each: torch.Tensor) -> torch.Tensor:
        seen.append(not like_the_last(fn, each))
        return each

    torch.vmap(look)(torch.randn(2, *x.shape))
    assert seen == [True]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "written": lambda model: _written(model.conv.weight),
    "written behind torch's back": lambda model: model.out.weight.data.mul_(3),
    "statistics": lambda model: _written(model.norm.running_mean),
    "other data": lambda model: setattr(model.out.bias, "data", torch.ones(5)),
    "another parameter": lambda model: setattr(model.out, "bias", nn.Parameter(torch.ones(5))),
    "another module": lambda model: setattr(model, "out", nn.Linear(8, 5)),
    "loaded": lambda model: model.load_state_dict(Net().state_dict()),
    "a hook": lambda model: model.out.register_forward_hook(lambda module, args, result: 2 * result),
    "forward": lambda model: setattr(model, "forward", lambda x: model.out(model.norm(model.conv(x)).mean((2, 3)))),
    "another class": lambda model: setattr(model.drop, "__class__", nn.Tanh),
    "an attribute": lambda model: setattr(model.norm, "eps", 1.0),
}


def _written(tensor: Any) -> None:
    with torch.no_grad():
        tensor.add_(0.5)


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_notices(change: str):
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    step = warm(lowtide.optimize(model, (x,), exact=False), x)
    assert like_the_last(step, x)
    before = step(x)
    CHANGES[change](model)
    assert not near(model(x), before)
    for _ in range(WARM):
        assert near(step(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_of_another_dtype_beside_a_lookup_is_noticed(dtype: torch.dtype):
    """Weights are packed anew where they are written, by a call that does not look at them."""

    class Found(Net):
        def __init__(self) -> None:
            super().__init__()
            self.names = nn.Embedding(10, 5)

        def forward(self, x: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.names(names)

    model, batch = Found().eval(), (torch.randn(2, 3, 6, 6), torch.tensor([1, 9]))
    step = warm(lowtide.optimize(model, batch, exact=False), *batch)
    model.out.to(dtype)
    with pytest.raises(RuntimeError, match="same dtype"):
        step(*batch)
    model.out.float()
    assert near(step(*batch), model(*batch))


def test_dropout_switched_on_is_noticed():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    step = warm(lowtide.optimize(model, (x,), exact=False), x)
    model.train()
    torch.manual_seed(1)
    found = step(x)
    torch.manual_seed(1)
    assert near(found, model(x))


def test_several_arguments_and_results():
    torch.manual_seed(0)
    model, x, y = Several().eval(), torch.randn(1, 6), torch.randn(1, 64)
    step = warm(lowtide.optimize(model, (x, y), exact=False), x, y)
    for fn in (step, warm(step.frozen(x, y), x, y)):
        one, two = torch.randn(1, 6), torch.randn(1, 64)
        found, wanted = fn(one, two), model(one, two)
        assert found.keys() == wanted.keys()
        assert all(near(found[key], wanted[key]) for key in found)


def test_threads_do_not_disturb_each_other(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, model, x = made
    batches = [torch.randn_like(x) for _ in range(8)]
    wanted = [model(batch).detach() for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda at: fn(batches[at % 8]), range(400))]
    assert all(near(each, wanted[at % 8]) for at, each in enumerate(found))


def test_looks_that_alternate(made: tuple[Any, nn.Module, torch.Tensor]):
    fn, model, x = made
    for at in range(20):
        with torch.inference_mode(at % 2 == 0):
            other = torch.randn_like(x)
        assert near(fn(other), model(x * 0 + other))


def test_nothing_of_the_model_is_kept_by_a_frozen_function():
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    step = warm(lowtide.optimize(model, (x,), exact=False), x)
    fn, want = step.frozen(x), step(x)
    del model, step
    gc.collect()
    noise = [torch.full((4096,), 7.0) for _ in range(64)]
    assert torch.equal(warm(fn, x)(x), want)
    assert noise
