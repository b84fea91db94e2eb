"""What programs take and return: nested structures of any kind come out as eager's, call after call, and no fake tensor with them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import fractions
import functools
import pathlib
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

import lowtide
from bench import torchvision_shim
from lowtide.ir import tree

_renamed = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # which later releases call `cache`


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    value: Any
    label: str = "record"
    derived: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    value: Any


class Bag:
    """Attributes, one of which its class computes anew when it is made by its constructor."""

    def __init__(self, value: Any) -> None:
        self.value, self.count = value, 3


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self, one: Any) -> None:
        self.one = one


class Hidden:
    __slots__ = ("__value",)  # which Python keeps under another name

    def __init__(self, value: Any) -> None:
        self.__value = value


class Registered:
    """Opened as torch's registry says; its attributes alone would not do."""

    def __init__(self, value: Any) -> None:
        self.get = lambda: value


class Named(dict):
    """A dictionary with attributes, made of other arguments than a dictionary."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name, self.__dict__["x"] = name, items["x"]


_pytree.register_pytree_node(Registered, lambda item: ([item.get()], None), lambda items, _: Registered(items[0]))


def record(value: Any) -> Record:
    made = Record(value)
    made.derived = value
    return made


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda x: [x, 1], lambda x: (x, None), lambda x: {"x": x, 2: "two"}, lambda x: Pair(x, 0.5), record, Sealed, Bag, Slotted, Registered,
    lambda x: collections.OrderedDict(b=x, a=1), lambda x: collections.defaultdict(list, x=x), lambda x: collections.deque([x, 7], 4),
    lambda x: collections.UserDict(x=x), lambda x: Named("n", x=x), lambda x: types.SimpleNamespace(x=x, n=1), Hidden,
]  # fmt: skip
nests = st.recursive(
    st.sampled_from(["x", "y", "shared"]), lambda inner: st.tuples(st.sampled_from(range(len(CONTAINERS))), inner), max_leaves=8
)


def build(nest: Any, leaves: dict[str, Any]) -> Any:
    if isinstance(nest, str):
        return leaves[nest]
    return CONTAINERS[nest[0]](build(nest[1], leaves))


class Makes(nn.Module):
    """Returns nests of what it computes."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.linear, self.nests = nn.Linear(3, 3), shapes

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return [build(nest, {"x": x + 1, "y": y, "shared": y}) for nest in self.nests]


def assert_same(one: Any, two: Any) -> None:
    """Same classes all the way, same bits, nothing fake."""
    assert type(one) is type(two)
    if isinstance(one, Tensor):
        assert type(two) is Tensor
        assert torch.equal(one, two)
        return
    ones, twos = tree.flatten(one)[0], tree.flatten(two)[0]
    assert [leaf.where for leaf in ones] == [leaf.where for leaf in twos]
    if len(ones) == 1 and ones[0].value is one:
        assert one == two
        return
    for a, b in zip(ones, twos, strict=True):
        assert_same(a.value, b.value)


@settings(max_examples=12, deadline=None)
@example([(15, "x")])
@given(st.lists(nests, min_size=1, max_size=4))
def test_results_are_eagers_whatever_they_are(shapes):
    model = Makes(shapes)
    step = lowtide.optimize(model, torch.ones(2, 3), planning=lowtide.Planning(workspaces=False))
    kept = []
    for turn in range(2):
        x = torch.full((2, 3), float(turn))
        with torch.no_grad():
            expected = model(x)
        found = step(x)
        assert_same(expected, found)
        kept.append((copy.deepcopy(found) if not has_registered(shapes) else None, found))
    for before, now in kept:  # a call does not write into what an earlier one returned
        if before is not None:
            assert_same(before, now)


def has_registered(shapes: Any) -> bool:
    return str(CONTAINERS.index(Registered)) in str(shapes)


@settings(max_examples=15, deadline=None)
@example((6, (8, "x")))  # only torch's registry knows what is within, and nobody knows what is around
@given(nests)
def test_batches_are_read_whatever_they_are(nest):
    class Sums(nn.Module):
        def forward(self, given: Any, x: Tensor) -> Tensor:
            return sum((leaf.value.sum() for leaf in tree.flatten(given)[0] if isinstance(leaf.value, Tensor)), x)

    def batch(number: float) -> tuple[Any, Tensor]:
        y = torch.full((2,), number)
        return build(nest, {"x": torch.full((3,), -number), "y": y, "shared": y}), torch.ones(1)

    model = Sums()
    step = lowtide.optimize(model, batch(1.0), planning=lowtide.Planning(workspaces=False))
    for number in (2.0, 3.0):
        assert torch.equal(step(*batch(number)), model(*batch(number)))


def test_results_of_torchs_own_kinds():
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.max(x, 0), torch.distributions.Normal(x, x.exp(), validate_args=False)

    x = torch.rand(3, 2)
    found = lowtide.optimize(Twice(), x, planning=lowtide.Planning(workspaces=False))(x)
    assert type(found[0]) is type(torch.max(x, 0))
    assert torch.equal(found[0].values, x.max(0).values)
    assert torch.equal(found[1].mean, x)


def test_a_structure_that_holds_itself_is_refused():
    class Circle(nn.Module):
        def forward(self, x: Tensor) -> Any:
            bag = Bag(x + 1)
            bag.self = bag
            return bag

    with pytest.raises(lowtide.CaptureError, match=r"the Bag at \.self holds itself"):
        lowtide.optimize(Circle(), torch.ones(2), planning=lowtide.Planning(workspaces=False))


def caching_model() -> Any:
    torchvision_shim.install()
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2Model(config).eval()


@_renamed
def test_a_cache_is_returned_as_eager_returns_it():
    model, batch = caching_model(), {"input_ids": torch.randint(0, 50, (2, 5)), "use_cache": True}
    step = lowtide.optimize(model, batch, planning=lowtide.Planning(workspaces=False))
    with torch.no_grad():
        expected = model(**batch)
    first, second = step(**batch), step(**batch)
    assert_same(expected, first)
    assert first.past_key_values is not second.past_key_values
    assert type(first.past_key_values.layers[0].keys) is Tensor
    following = {"input_ids": torch.tensor([[1], [2]])}
    with torch.no_grad():  # it goes on as eager's does
        assert_same(model(**following, past_key_values=expected.past_key_values), model(**following, past_key_values=first.past_key_values))


@_renamed
def test_a_cache_that_the_program_would_fill_is_refused():
    transformers = pytest.importorskip("transformers")
    model, cache = caching_model(), transformers.DynamicCache()
    ids = torch.randint(0, 50, (2, 5))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(lowtide.CaptureError, match=r"changes what the batch holds, at batch.*past_key_values.*keys.*use_cache=False"):
        lowtide.optimize(
            model, {"input_ids": ids, "past_key_values": cache, "use_cache": True}, planning=lowtide.Planning(workspaces=False)
        )
    empty = transformers.DynamicCache()
    with pytest.raises(lowtide.CaptureError, match=r"changes what the batch holds, at batch\[1\]\['past_key_values'\]"):
        lowtide.optimize(
            model, {"input_ids": ids, "past_key_values": empty, "use_cache": True}, planning=lowtide.Planning(workspaces=False)
        )
    assert empty.get_seq_length() == 0
    assert not empty.layers
    assert cache.get_seq_length() == 5
    assert type(cache.layers[0].keys) is Tensor


def test_a_loss_may_come_in_a_dict():
    batches = [torch.ones(rows, 3) for rows in (4, 4, 2, 1)]  # the last ones run as the user's own loop

    def run(planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = lambda model, x: {"logits": (logits := model(x)), "loss": logits.square().sum(), "rows": len(x)}  # noqa: E731
        if not planned:
            results = []
            for x in batches:
                optimizer.zero_grad()
                results.append(loss(model, x))
                results[-1]["loss"].backward()
                optimizer.step()
            return [*results, *model.parameters()]
        step = lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
        return [*map(step, batches), *model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, two = _pytree.tree_leaves(run(False)), _pytree.tree_leaves(run(True))
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, two, strict=True))


def test_fixed_values_lie_in_attributes_as_eager_leaves_them():
    """Not numbers and texts alone: a dtype, a device, a path, an array. What lay there between steps is replaced, as in eager."""

    class Notes:
        pass

    def values(x: Tensor) -> list[Any]:
        fixed = [x.dtype, x.device, x.layout, range(3), slice(1, 2), pathlib.Path("a"), fractions.Fraction(1, 3), int, frozenset({1})]
        return [*fixed, {2}, datetime.date(2020, 1, 1), numpy.arange(3), numpy.float32(1.5), {"kept": [x.dtype, (x.device,)]}]

    def run(planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model, notes, seen, x = nn.Linear(3, 2), Notes(), list[Any](), torch.ones(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            for holder in (model, notes):
                for number, value in enumerate(values(x)):
                    setattr(holder, f"at_{number}", value)
            return model(x).sum()

        def look() -> None:
            seen.extend(repr(getattr(holder, f"at_{number}", None)) for holder in (model, notes) for number in range(len(values(x))))

        step: Any = functools.partial(loss, model)
        if planned:
            step = lowtide.optimize(model, x, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
            assert vars(notes) == {}
        for _ in range(3):
            step(x)
            look()
            notes.at_0 = model.at_1 = "between"
        return seen

    assert run(planned=True) == run(planned=False)
