"""What optimizers keep in lists, dictionaries and objects, under texts and in attributes is as eager leaves it."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.base.skeleton import Skeleton, built, copied, leaves


class Kind(enum.IntEnum):
    ONE, TWO = 1, 2


class Projector:
    """Keeps what it has made, as low-rank optimizers' projectors do."""

    def __init__(self, rank: int) -> None:
        self.rank, self.basis, self.sides = rank, None, [None]

    def project(self, gradient: Tensor, count: int) -> Tensor:
        if self.basis is None or count % 3 == 0:
            self.basis = torch.linalg.qr(gradient.reshape(-1, 1) @ gradient.reshape(1, -1))[0][:, : self.rank]
            self.sides = [self.basis.sum(), self.rank]
        return (self.basis @ (self.basis.T @ gradient.reshape(-1, 1))).view_as(gradient) * self.sides[1]


class Own(torch.optim.Optimizer):
    """Updates by a rule that keeps what it likes."""

    fixed = 5

    def __init__(self, parameters: Any, rule: Callable[..., Any], **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **settings})
        self.rule, self.count, self.mark, self.past, self.best = rule, 0, None, [], None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.rule(self, None, None, self.param_groups[0])
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                factor = self.rule(self, parameter, self.state[parameter], group) if shared is None else shared
                parameter.sub_(parameter.grad * (group["lr"] * factor))


def by_parameter(rule: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    return lambda own, parameter, state, group: None if parameter is None else rule(parameter, state, group)


def by_step(rule: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda own, parameter, state, group: rule(own)


def in_a_list(parameter: Tensor, state: Any, group: Any) -> Any:
    if "sides" not in state:
        state["sides"] = [torch.zeros_like(parameter), None, [1, parameter.numel() > 9]]
    state["sides"][0].add_(parameter.grad)
    state["sides"][1] = state["sides"][0] * 0.5
    state["sides"][2][0] += 1
    return state["sides"][1].norm() / state["sides"][2][0]


def in_a_dictionary(parameter: Tensor, state: Any, group: Any) -> Any:
    state.setdefault("by beta", {0.9: torch.zeros_like(parameter), "deep": {2: 1.0}, "kind": Kind.TWO, "shape": parameter.shape})
    state["by beta"][0.9].mul_(0.9).add_(parameter.grad)
    state["by beta"]["deep"][2] *= 0.5
    return state["by beta"][0.9].abs().mean() + state["by beta"]["deep"][2]


def in_an_object(parameter: Tensor, state: Any, group: Any) -> Any:
    state["step"] = state.get("step", 0) + 1
    if "projector" not in state:
        state["projector"] = Projector(2)
    return state["projector"].project(parameter.grad, state["step"]).norm()


def in_a_window(parameter: Tensor, state: Any, group: Any) -> Any:
    past = state.setdefault("past", [])
    past.append(parameter.grad.norm())
    if len(past) > 3:
        past.pop(0)
    return sum(past) / len(past)


def a_gradient(parameter: Tensor, state: Any, group: Any) -> Any:
    before = state.get("gradient")
    state["gradient"], state["rows"] = parameter.grad, parameter.grad.detach().flatten()
    return 1.0 if before is None else before.norm()


def in_settings(parameter: Tensor, state: Any, group: Any) -> Any:
    group["norm"]["seen"] = group["norm"].get("seen", 0) + 1
    return group["norm"]["scale"] / group["norm"]["seen"]


def under_a_text(own: Any) -> Any:
    if "k" not in own.state:
        own.state["k"] = torch.tensor([0])
        own.state["means"] = {"loss": 0.0}
    own.state["k"] += 1
    own.state["means"]["loss"] += 0.25
    return math.sqrt(own.state["k"]) * own.state["means"]["loss"]


def an_attribute(own: Any) -> Any:
    own.count += 1
    return 1 - 0.9**own.count


def a_new_attribute(own: Any) -> Any:
    own.steps = getattr(own, "steps", 0) + 1
    return 1 / own.steps


def of_the_class(own: Any) -> Any:
    own.fixed += 1
    return 1 / own.fixed


def a_flag(own: Any) -> Any:
    factor = 0.5 if own.mark else 1.0
    own.mark = not own.mark
    return factor


def now_and_then(own: Any) -> Any:
    own.count += 1
    if own.count % 3 == 0:
        own.mark = (own.mark or 0) + 1
    return 1 / (1 + (own.mark or 0))


def now_a_number_now_a_text(own: Any) -> Any:
    own.mark = "a" if not isinstance(own.mark, str) else own.count * 2
    own.count += 1
    return 1.0 if isinstance(own.mark, str) else 0.1


def a_tensor(own: Any) -> Any:
    norm = own.param_groups[0]["params"][0].grad.norm()
    own.best = norm.clone() if own.best is None else own.best * 0.9 + norm * 0.1
    return own.best


def a_tensor_in_place(own: Any) -> Any:
    if own.best is None:
        own.best = torch.zeros(())
    own.best.add_(1)
    return 1 / own.best


def a_list_of_its_own(own: Any) -> Any:
    own.past.append(len(own.past) + 1)
    return sum(own.past) * 0.1


def numbers_as_tensors(own: Any) -> Any:
    own.count += 1
    lr, count = own.param_groups[0]["lr"], own.count
    made = torch.tensor([lr, count]), torch.tensor(count), torch.tensor([count, 2]), torch.tensor([count, 3], dtype=torch.float64)
    assert [each.dtype for each in made] == [torch.float32, torch.int64, torch.int64, torch.float64]
    return sum(each.sum() for each in made) / 10


RULES = {
    "list": by_parameter(in_a_list),
    "dictionary": by_parameter(in_a_dictionary),
    "object": by_parameter(in_an_object),
    "window": by_parameter(in_a_window),
    "gradient": by_parameter(a_gradient),
    "settings": by_parameter(in_settings),
    **{
        rule.__name__: by_step(rule)
        for rule in (
            under_a_text, an_attribute, a_new_attribute, of_the_class, a_flag, now_and_then, now_a_number_now_a_text, a_tensor,
            a_tensor_in_place, a_list_of_its_own, numbers_as_tensors,
        )
    },
}  # fmt: skip


def made(rule: str) -> tuple[nn.Module, Own]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    settings = {"norm": {"scale": 2.0}} if rule == "settings" else {}
    return model, Own(model.parameters(), RULES[rule], **settings)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(model: nn.Module, optimizer: Own) -> Any:
    return lowtide.optimize(model, torch.ones(5, 3), loss=square, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))


def eager(model: nn.Module, optimizer: Own, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    optimizer.step()
    return loss


def left(model: nn.Module, optimizer: Own) -> list[tuple[Any, Any]]:
    """Parameters, state and settings in their order, attributes."""
    own = {name: item for name, item in vars(optimizer).items() if name in ("count", "mark", "past", "best", "steps", "fixed")}
    return [*leaves(list(model.parameters())), *leaves(optimizer.state_dict()), *leaves(own)]


def assert_same(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> None:
    assert [path for path, _ in one] == [path for path, _ in other]
    for (path, mine), (_, its) in zip(one, other, strict=True):
        assert type(mine) is type(its), path
        assert torch.equal(mine, its) if isinstance(mine, Tensor) else mine == its, path


@pytest.mark.filterwarnings("error:the program is not what it was")
@pytest.mark.parametrize("rule", RULES)
def test_it_is_left_as_eager_leaves_it(rule: str) -> None:
    mine, its = made(rule), made(rule)
    step = step_of(*mine)
    assert_same(left(*mine), left(*its))
    for number in range(8):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        assert torch.equal(step(x), eager(*its, x))
        assert_same(left(*mine), left(*its))


@pytest.mark.parametrize("rule", ["list", "dictionary", "object", "under_a_text"])
def test_what_is_loaded_is_gone_on_with(rule: str) -> None:
    mine, its = made(rule), made(rule)
    step, x = step_of(*mine), torch.randn(5, 3)
    for _ in range(2):
        step(x)
    for there, here in zip(its[0].parameters(), mine[0].parameters(), strict=True):
        there.data.copy_(here.data)
    its[1].load_state_dict(copy.deepcopy(mine[1].state_dict()))
    mine[1].load_state_dict(copy.deepcopy(mine[1].state_dict()))
    for _ in range(3):
        assert torch.equal(step(x), eager(*its, x))
        assert_same(left(*mine), left(*its))


def test_a_list_that_somebody_else_makes_longer():
    mine, its = made("list"), made("list")
    step, x = step_of(*mine), torch.randn(5, 3)
    for number in range(4):
        if number == 2:
            for model, optimizer in (mine, its):
                entries = optimizer.state[next(model.parameters())]["sides"]
                entries[:] = [entries[0] * 2, entries[1], [4, True], "more"]
        assert torch.equal(step(x), eager(*its, x))
        assert_same(left(*mine), left(*its))


def test_one_list_in_two_places_is_refused_and_nothing_is_touched():
    model, optimizer = made("list")
    shared: list[Any] = [torch.ones(()), None, [1, False]]
    for parameter in model.parameters():
        optimizer.state[parameter]["sides"] = shared
    with pytest.raises(lowtide.CaptureError, match="one list or dictionary in several places"):
        step_of(model, optimizer)
    shared[1] = shared
    with pytest.raises(lowtide.CaptureError, match="holds itself"):
        step_of(model, optimizer)


def test_a_refused_capture_leaves_lists_as_they_were():
    def decides(own: Any) -> Any:
        own.past.append(1)
        return 1.0 if own.param_groups[0]["params"][0].grad.norm() > 0.5 else 2.0

    model, _ = made("list")
    optimizer = Own(model.parameters(), by_step(decides))
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        step_of(model, optimizer)
    assert optimizer.past == []


def test_what_cannot_be_kept_says_where():
    model, optimizer = made("list")
    optimizer.state[model[0].weight]["sides"] = [torch.ones(()), {1, 2}]
    with pytest.raises(lowtide.CaptureError, match=r"the optimizer's state 0\.weight\.sides\.1 holds a set"):
        step_of(model, optimizer)


def test_containers_are_told_from_leaves():
    item = {"a": [1, (2.0, None)], 3: Projector(1)}
    assert [path for path, _ in leaves(item)] == [("a", 0), ("a", 1, 0), ("a", 1, 1), (3, "rank"), (3, "basis"), (3, "sides", 0)]
    twin = copied(item)
    assert list(leaves(twin)) == list(leaves(item))
    assert twin[3] is not item[3]
    assert twin["a"] is not item["a"]
    assert built(iter([Skeleton.of([1, 2]), Skeleton.of({"b": 0}), 3, 4])) == [{"b": 3}, 4]
    for leaf in (Kind.ONE, torch.Size([2]), torch.ones(2), nn.Linear(1, 1), len, {(): 1}, 1.0, "text"):
        assert Skeleton.of(leaf) is None


def kept_twice(own: Any, parameter: Any, state: Any, group: Any) -> Any:
    if parameter is None:
        return None
    first = own.state[group["params"][0]]
    shared = first.setdefault("counts", [0])
    state["counts"] = shared
    shared[0] += 1
    return 1 / shared[0]


def under_two_names(own: Any) -> Any:
    if own.mark is None:
        own.mark = own.past
    own.past.append(1)
    return len(own.mark)


@pytest.mark.parametrize("rule", [kept_twice, by_step(under_two_names)])
def test_a_list_in_two_places_that_the_step_writes_is_refused(rule: Any):
    model, _ = made("list")
    optimizer = Own(model.parameters(), rule)
    optimizer.mark = optimizer.past
    with pytest.raises(lowtide.CaptureError, match="one list or dictionary in several places"):
        step_of(model, optimizer)
    assert optimizer.past == []
    assert not optimizer.state


@pytest.mark.parametrize("whose", ["k", "0.weight"])
def test_state_that_the_step_removes_is_refused(whose: str):
    def removes(own: Any) -> Any:
        weight = own.param_groups[0]["params"][0]
        del own.state["k" if whose == "k" else weight]
        return 1.0

    model, _ = made("list")
    optimizer = Own(model.parameters(), by_step(removes))
    optimizer.state["k"] = torch.ones(())
    optimizer.state[model[0].weight]["average"] = torch.ones(4, 3)
    with pytest.raises(lowtide.CaptureError, match=f"removes its state of {whose}"):
        step_of(model, optimizer)
    assert len(optimizer.state) == 2


def test_an_attribute_that_the_step_deletes_is_refused():
    def deletes(own: Any) -> Any:
        del own.best
        return 1.0

    model, _ = made("list")
    with pytest.raises(lowtide.CaptureError, match=r"deletes its attribute 'best'.*set it to None"):
        step_of(model, Own(model.parameters(), by_step(deletes)))


def of_a_class(own: Any) -> Any:
    own.count += 1
    whole = isinstance(own.count, int) and not isinstance(own.param_groups[0]["lr"], int) and hasattr(own.count, "bit_length")
    return 1.0 if whole else 0.1


def looked_for(own: Any) -> Any:
    own.count += 1
    group = own.param_groups[0]
    group["seen"] = group.get("seen", 0) + 1
    return (0.5 if own.count in {2, 5} else 1.0) * {1: 2.0, 4: 0.25}.get(group["seen"], 1.0) * (1.0 if group["lr"] in {0.1} else 0.5)


def filled_with_a_count(own: Any) -> Any:
    own.count += 1
    full = torch.full((2,), own.count)
    assert full.dtype is torch.int64
    return full.sum() / (1 + own.count)


def in_an_object_of_its_own(own: Any) -> Any:
    if own.best is None:
        own.best = Projector(0)
    own.best.rank += 1
    own.best.sides[0] = own.best.rank * 0.5
    return 1 / (own.best.rank + own.best.sides[0])


def views_of_one(own: Any) -> Any:
    parameters = own.param_groups[0]["params"]
    if own.best is None:
        own.best = torch.zeros(sum(each.numel() for each in parameters))
        own.past = [*own.best.split([each.numel() for each in parameters])]
    own.best.mul_(0.9)
    for view, parameter in zip(own.past, parameters, strict=True):
        view.view_as(parameter).add_(parameter.grad)
    return 1.0 + sum(each.norm() for each in own.past)


@pytest.mark.parametrize("rule", [of_a_class, looked_for, filled_with_a_count, in_an_object_of_its_own, views_of_one])
def test_numbers_and_views_are_what_they_are(rule: Any):
    mine, its = ((model, Own(model.parameters(), by_step(rule))) for model in (made("list")[0] for _ in range(2)))
    if rule is views_of_one:  # which the first step would make
        for model, optimizer in (mine, its):
            model(torch.ones(5, 3)).sum().backward()
            rule(optimizer)
            optimizer.zero_grad()
    step = step_of(*mine)
    for number in range(5):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        assert torch.equal(step(x), eager(*its, x))
        assert_same(left(*mine), left(*its))


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("where", ["attribute", "dictionary", "list"])
@pytest.mark.parametrize("settings", [{}, {"run": lowtide.Run(check="never")}, {"shapes": lowtide.Shapes(dynamic="auto")}])
def test_what_moves_in_some_steps_alone(every: int, where: str, settings: dict[str, Any]):
    """A program in which it stands still is given it, too."""

    def rule(own: Any) -> Any:
        own.count += 1
        if own.count % every == 0 and where == "attribute":
            own.mark = (own.mark or 0) + 1
        if own.count % every == 0 and where == "dictionary":
            own.best = {"k": own.best["k"] + 1 if own.best else 1}
        if own.count % every == 0 and where == "list":
            own.past[:] = [own.past[0] + 1 if own.past else 1]
        return 1 / (1 + {"attribute": own.mark or 0, "dictionary": (own.best or {"k": 0})["k"], "list": (own.past or [0])[0]}[where])

    mine, its = ((model, Own(model.parameters(), by_step(rule))) for model in (made("list")[0] for _ in range(2)))
    step = lowtide.optimize(
        mine[0], torch.ones(5, 3), loss=square, optimizer=mine[1], planning=lowtide.Planning(workspaces=False), **settings
    )
    for number in range(3 * every + 2):
        x = torch.randn(3 + 2 * (number % 2) if "shapes" in settings else 5, 3, generator=torch.Generator().manual_seed(number))
        assert torch.equal(step(x), eager(*its, x))
        assert_same(left(*mine), left(*its))
