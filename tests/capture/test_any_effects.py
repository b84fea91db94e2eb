"""Any program that puts what it computes into places of the caller's leaves there what eager leaves."""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.leaving import Meter, Net, check

EXAMPLES = int(os.environ.get("LOWTIDE_LEAVING_EXAMPLES", "4"))  # 2000 where a bench runs it, within half an hour and more

WRITES: tuple[Callable[[Any, Any], object], ...] = (
    lambda places, value: places["list"].append(value()),
    lambda places, value: places["list"].extend([value(), value()]),
    lambda places, value: places["queue"].appendleft((value(), 3)),
    lambda places, value: places["table"].__setitem__("a", [value()]),
    lambda places, value: places["table"].update(b=value(), c={"d": value()}),
    lambda places, value: places["lists"]["a"].append(value()),
    lambda places, value: setattr(places["meter"], "last", value()),
    lambda places, value: places["meter"].update(value(), 2),
    lambda places, value: (places["list"].clear(), places["list"].append(value()), places["list"].append(len(places["list"]))),
    lambda places, value: places["table"].clear(),
)
VALUES: tuple[Callable[[Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: hidden.detach(),
    lambda hidden: hidden.mean().item(),
    lambda hidden: hidden[0].tolist(),
    lambda hidden: (hidden > 0).sum().item(),
    lambda hidden: hidden.detach().clone().mul_(2),
)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_any_program_leaves_what_eager_leaves(seed: int):
    def make() -> Any:
        dice = random.Random(seed)
        places = {"list": [], "queue": collections.deque(maxlen=3), "table": {}, "lists": collections.defaultdict(list), "meter": Meter()}

        def some() -> Callable[[Tensor], None]:
            chosen = [(dice.choice(WRITES), dice.choice(VALUES)) for _ in range(dice.randint(0, 3))]

            def put(hidden: Tensor) -> None:
                for write, value in chosen:
                    write(places, lambda value=value: value(hidden))

            return put

        in_forward, in_hook, in_loss = some(), some(), some()
        model = Net(lambda net, hidden: in_forward(hidden))

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            out = model(x)
            in_loss(out)
            return out.square().mean()

        model.last.register_forward_hook(lambda module, given, out: in_hook(out) or out * 1)
        return model, loss, places

    check(make)
