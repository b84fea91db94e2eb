"""Values of a batch that a program does not read may be any, those that it reads may not; a NamedTuple is passed on as a tuple is."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import lowtide

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def step_of(loss: Callable[..., Any], batch: Any) -> lowtide.Step:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return lowtide.optimize(
        model, batch, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )


def unread(model: nn.Module, x: torch.Tensor, names: Any = None, number: int = 0) -> torch.Tensor:
    return model(x).square().mean()


def test_names_and_numbers_that_are_not_read_may_be_others():
    step = step_of(unread, (X, ["a.png", "b.png", "c.png"], 1))
    first = step(X, ["a.png", "b.png", "c.png"], 1)
    for at in range(3):
        assert step(X, [f"{at}.png", "b.png", "z.png"], at) < first
    assert len(step._lookup.families) == 1


@pytest.mark.filterwarnings("ignore:.*a second new shape")
def test_lists_of_another_length_are_other_batches():
    """In whatever structure; where the program reads how many there are, it reads that of the batch."""

    def loss(model: nn.Module, batch: Any, names: Any) -> torch.Tensor:
        return unread(model, batch["x"]) * len(names)

    def batch(rows: int, count: int) -> Any:
        return {"x": X[:rows], "meta": {"ids": [f"{at}.png" for at in range(count)], "more": (1, {"n": "a" * count})}}, ["a"] * count

    batches = [batch(3, 3), batch(3, 3), batch(3, 1), batch(2, 2), batch(3, 2), batch(3, 3)]
    step, model = step_of(loss, batches[0]), nn.Linear(4, 2)
    model.load_state_dict(step._caller.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in batches:
        optimizer.zero_grad()
        expected = loss(model, *each)
        expected.backward()
        optimizer.step()
        assert torch.equal(step(*each), expected.detach())


def test_a_tensor_more_is_no_other_batch():
    step = step_of(unread, (X, ["a"]))
    with pytest.raises(lowtide.BatchError, match="values that are not tensors are fixed"):
        step(X, [X])
    with pytest.raises(lowtide.BatchError, match="expected a batch of"):
        step(X, ["a", X])


def test_lists_of_another_length_beside_a_range():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    step = lowtide.optimize(
        model,
        (X, ["a", "b", "c"]),
        loss=unread,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        shapes=lowtide.Shapes(dynamic={0: {0: (2, 8)}}),
        planning=lowtide.Planning(workspaces=False),
    )
    expected = unread(model, X[:2]).detach()
    assert torch.equal(step(X[:2], ["a", "b"]), expected)


class Record:
    """What a data set says of a sample."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_that_are_not_read_may_be_others():
    step = step_of(unread, (X, Record(0), 0))
    for at in range(3):
        step(X, Record(at), at)
    assert len(step._lookup.families) == 1


@pytest.mark.parametrize("read", [lambda each: each.number, lambda each: vars(each)["number"], lambda each: 1.0 if each else 0.0])
def test_objects_that_are_read_may_not(read: Callable[[Any], float]):
    step = step_of(lambda model, x, each: unread(model, x) * read(each), (X, Record(2)))
    with pytest.raises(lowtide.BatchError, match="values that are not tensors are fixed"):
        step(X, Record(3))


def test_in_dictionaries_and_of_another_shape():
    step = step_of(lambda model, batch: unread(model, batch["x"]), {"batch": {"x": X, "id": "a"}})
    step(batch={"x": X, "id": "b"})
    step(batch={"x": X[:2], "id": "c"})
    step(batch={"x": X[:2], "id": "d"})
    step(batch={"x": X, "id": "e"})


READERS: dict[str, Callable[[Any], float]] = {
    "compared": lambda name: 2.0 if name == "a" else 1.0,
    "of a type": lambda name: 2.0 if isinstance(name, str) and name.startswith("a") else 1.0,
    "matched": lambda name: 2.0 if re.match("a", name) else 1.0,
    "looked up": lambda name: {"a": 2.0}.get(name, 1.0),
    "within": lambda name: 2.0 if name in ["a", "c"] else 1.0,
    "length": lambda name: float(len(name)),
    "formatted": lambda name: 2.0 if f"{name}" == "a" else 1.0,
    "joined": lambda name: 2.0 if "".join([name]) == "a" else 1.0,
}


def caught(name: str) -> float:
    try:
        return 2.0 if name.startswith("a") else 1.0
    except Exception:
        return 1.0


@pytest.mark.parametrize("read", [*READERS.values(), caught], ids=[*READERS, "caught"])
def test_what_is_read_may_not(read: Callable[[Any], float]):
    step = step_of(lambda model, x, name: unread(model, x) * read(name), (X, "bb"))
    step(X, "bb")
    with pytest.raises(lowtide.BatchError, match="the step was captured with 'bb', got 'a'"):
        step(X, "a")


def test_what_is_returned_may_not():
    step = step_of(lambda model, x, name: (unread(model, x), name), (X, "b"))
    with pytest.raises(lowtide.BatchError, match="the step was captured with 'b', got 'a'"):
        step(X, "a")


def test_numbers_in_the_arithmetic_may_not():
    step = step_of(lambda model, x, number: unread(model, x) * number, (X, 2.0))
    with pytest.raises(lowtide.BatchError, match=r"the step was captured with 2.0, got 3.0"):
        step(X, 3.0)


def test_another_program_may_read_what_the_first_did_not():
    def loss(model: nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
        return unread(model, x) * (1.0 if model.training else float(name))

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    step = lowtide.optimize(
        model, (X, "1"), loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    step(X, "2")
    model.eval()
    expected = unread(model, X).detach() * 3.0
    assert torch.equal(step(X, "3"), expected)
    with pytest.raises(lowtide.BatchError, match="captured with '3', got '4'"):
        step(X, "4")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_named_tuple_is_passed_on_as_a_tuple_is():
    batch = Pair(X, torch.ones(3, 2))
    step = step_of(lambda model, x, y: (model(x) - y).square().mean(), batch)
    assert step(*batch).item() > 0
