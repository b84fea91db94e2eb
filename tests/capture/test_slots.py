"""What objects and modules keep by themselves (`__slots__`), and what a program takes away, or puts there for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Attributes, Net, check, plainly, square


class Record:
    __slots__ = ("last", "seen", "total")

    def __init__(self) -> None:
        self.total, self.seen = 0.0, list[Any]()


class SlottedNet(Net):
    __slots__ = ("calls", "mean", "record", "seen")

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__(keep)
        self.calls, self.mean, self.seen = 0, torch.zeros(4), list[Any]()


class Slots:
    """What is in them, for `plainly`."""

    def __init__(self, item: Any) -> None:
        self.item = item

    @property
    def held(self) -> dict[str, Any]:
        return {name: plainly(getattr(self.item, name, "absent")) for name in type(self.item).__slots__}


def keep_in_an_object(record: Record, loss: Tensor) -> None:
    record.last = loss.detach()
    record.total += loss.item()
    record.seen.append(f"{record.total:.3f}")


def test_slots_of_an_object_are_places_as_attributes_are():
    def make() -> tuple[Net, Callable[..., Any], Any]:
        record, told = Record(), list[Any]()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            keep_in_an_object(record, value)
            return value

        records.append(record)
        return Net(), loss, told

    records = list[Record]()
    check(make)
    eager, own = (Slots(record).held for record in records)
    assert eager == own


def counts(net: SlottedNet, hidden: Tensor) -> None:
    net.calls += 1


def puts(net: SlottedNet, hidden: Tensor) -> None:
    net.mean = hidden.detach().mean(0)


def goes_on(net: SlottedNet, hidden: Tensor) -> None:
    net.mean = 0.9 * net.mean + hidden.detach().mean(0)


def fills(net: SlottedNet, hidden: Tensor) -> None:
    net.seen.append(f"{hidden.mean().item():.3f}")


@pytest.mark.parametrize("keep", [counts, puts, goes_on, fills])
def test_slots_of_a_module_are_places_as_attributes_are(keep):
    models = list[SlottedNet]()

    def make() -> tuple[Net, Callable[..., Any], Any]:
        models.append(SlottedNet(keep))
        return models[-1], square, []

    check(make)
    eager, own = (Slots(model).held for model in models)
    assert str(eager) == str(own)


def optimized(model: nn.Module, loss: Callable[..., Any]) -> Any:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))


def by_number(model: Any, x: Tensor) -> Tensor:
    return square(model, x) * model.calls


def by_length(model: Any, x: Tensor) -> Tensor:
    return square(model, x) * len(model.seen)


def adds_one(net: SlottedNet, hidden: Tensor) -> None:
    net.seen.append(1)


@pytest.mark.parametrize(("keep", "loss"), [(counts, by_number), (adds_one, by_length)])
def test_a_slot_that_a_module_counts_and_computes_with(keep, loss):
    check(lambda: (SlottedNet(keep), loss, []))


def test_a_refused_program_has_left_nothing_in_slots():
    def loss(model: Any, x: Tensor) -> Tensor:
        value = square(model, x)
        keep_in_an_object(record, value)
        model.mean = value.detach()
        return value if value > 0 else 2 * value

    record, model = Record(), SlottedNet(counts)
    mean = model.mean
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        optimized(model, loss)
    assert Slots(record).held == {"last": "absent", "seen": [], "total": 0.0}
    assert model.mean is mean


def test_a_slot_that_a_program_reads_is_looked_at_before_each_step():
    model = SlottedNet(lambda net, hidden: None)
    model.calls = 1
    step, x = optimized(model, by_number), torch.rand(5, 3)
    once = step(x)
    model.calls = 0
    assert once
    assert step(x) == 0


def sets_and_deletes(net: Any, hidden: Tensor) -> None:
    net.flag = 5
    del net.flag


def deletes_a_buffer(net: Any, hidden: Tensor) -> None:
    del net.mean


def empties_a_buffer(net: Any, hidden: Tensor) -> None:
    net.mean = None


def pops_from_the_table(net: Any, hidden: Tensor) -> None:
    net._buffers.pop("mean")


@pytest.mark.parametrize(
    ("keep", "name"), [(sets_and_deletes, "flag"), (deletes_a_buffer, "mean"), (empties_a_buffer, "mean"), (pops_from_the_table, "mean")]
)
def test_what_a_module_takes_away_is_refused(keep, name):
    model = Net(keep)
    model.register_buffer("mean", torch.zeros(4))
    model.flag = 3
    with pytest.raises(lowtide.CaptureError, match=f"module 'Net' changes its attribute '{name}'"):
        optimized(model, square)
    assert (model.flag, model.mean.tolist()) == (3, [0.0] * 4)


def for_a_while(net: Any, hidden: Tensor) -> None:
    net.hidden = hidden
    net.count = 1
    del net.hidden, net.count


def constants(net: Any, hidden: Tensor) -> None:
    net.shape, net.bounds, net.name = hidden.shape, (0.0, (1, "a")), None


def small_containers(net: Any, hidden: Tensor) -> None:
    net.shape, net.bounds = [*hidden.shape], {"width": hidden.shape[1], "of": [(1, "a")]}
    net.outs = [3]


def by_the_table(net: Any, hidden: Tensor) -> None:
    net.__dict__.update(shape=3, name="a")
    net.bounds = 2.0


@pytest.mark.parametrize("keep", [for_a_while, constants, small_containers, by_the_table])
def test_attributes_of_a_module_are_what_eager_leaves(keep):
    def make() -> tuple[Net, Callable[..., Any], Any]:
        net = Net(keep)
        return net, square, Attributes(net, "hidden", "count", "shape", "bounds", "name", "outs")

    check(make)
