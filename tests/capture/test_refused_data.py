"""What depends on data, or on draws that no graph can follow, is refused: the message says what and where, and nothing is touched."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.refusals import HERE, WHERE, Function, Net, refused


def branching(model: Net, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    return loss if loss > 0 else -loss


def reading(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() ** model.linear.weight.max().item()


def listing(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() ** model(x)[0].tolist()[1]


def drawing(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() if torch.rand(()) > 0.5 else -model(x).sum()


def counting(model: Net, x: Tensor) -> Tensor:
    model(x)
    return model(x).sum() ** model.norm.num_batches_tracked.item()


def selecting(model: Net, x: Tensor) -> Tensor:
    return model(x).flatten()[model(x).flatten().nonzero()].sum()


def masking(model: Net, x: Tensor) -> Tensor:
    out = model(x)
    return out[out > 0].sum()


def hooked(model: Net, x: Tensor) -> Tensor:
    out = model(x)
    out.register_hook(lambda gradient: gradient if gradient.norm() < 1 else gradient / 2)
    return out.sum()


def converting(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() * float(model(x).detach().numpy()[0, 0])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (branching, rf"control flow depends on data: aten\._local_scalar_dense\.default at .*{HERE}.*statistics.*torch\.where"),
        (
            reading,
            rf"depends on data: aten\._local_scalar_dense\.default at .*{HERE}.*parameter linear\.weight, which the training changes",
        ),
        (listing, rf"depends on data: Tensor\.tolist at .*{HERE}"),
        (drawing, rf"depends on data: .*{HERE}.*a random draw \(aten\.rand\.default.*set the rate to 0"),
        (counting, rf"depends on data: .*{HERE}.*aten\.add_.*, which the step has written"),
        (hooked, rf"depends on data: .*at .*{HERE}"),
        (converting, rf"depends on data: Tensor\.numpy at .*{HERE}"),
        (selecting, rf"shape depends on data: the result of aten\.nonzero\.default at .*{HERE}.*pad"),
        (masking, rf"shape depends on data: .*at .*{HERE}"),
    ],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_what_depends_on_data(loss, message):
    refused(loss, message)


def drawing(draw: Callable[[], float]) -> Callable[..., Tensor]:
    return lambda model, x: model(x).sum() * draw()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (random.random, "draws from random: .*repeat the same choice"),
        (np.random.rand, r"draws from numpy\.random"),
        (lambda: torch.manual_seed(0) and 1.0, "seeds torch's generator"),
        (lambda: torch.initial_seed() % 7, "reads the seed of torch's generator"),
        (lambda: torch.rand((), generator=torch.Generator()), "aten.rand.generator .*draws from a generator that the program makes anew"),
    ],
)
def test_randomness_that_no_graph_can_follow(draw, message):
    refused(drawing(draw), message)


def seeded_for_a_while(model: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (model(x) + torch.rand(4)).sum()


def state_set_for_a_while(model: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.set_rng_state(torch.Generator().manual_seed(3).get_state())
        return functional.dropout(model(x)).sum()


@pytest.mark.parametrize("loss", [seeded_for_a_while, state_set_for_a_while])
def test_seeding_for_a_while(loss):
    refused(loss, rf"operator aten\.\w+\.\w+ at {WHERE} draws from torch's generator after the program has seeded it.*draw once for all")


def test_a_state_of_torchs_generator_that_is_kept_is_refused():
    kept = list[Tensor]()

    def keeping(model: Net, x: Tensor) -> Tensor:
        kept.append(torch.get_rng_state())
        return functional.dropout(model(x)).sum()

    refused(keeping, "keeps a state of torch's generator")
    assert not kept


def test_forked_generators_that_nobody_seeds_are_eagers():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                return x + torch.zeros_like(x)

    assert torch.equal(lowtide.optimize(Noisy(), torch.ones(2), planning=lowtide.Planning(workspaces=False))(torch.ones(2)), torch.ones(2))


def test_sections_that_a_tensor_gives():
    """A tensor of the program's own says where to cut, as in eager; one that depends on activations is refused."""
    x = torch.arange(24.0).reshape(6, 4)
    cut = lowtide.optimize(
        Function(lambda x: torch.tensor_split(x * 2, torch.tensor([2, 3]))[1]), x, planning=lowtide.Planning(workspaces=False)
    )
    assert torch.equal(cut(x), (x * 2)[2:3])
    held = torch.tensor_split  # as `from torch import tensor_split` holds it: its name is never looked up again
    cut = lowtide.optimize(
        Function(lambda x, at: held(x * 2, at)[1]), (x, torch.tensor([2, 3])), planning=lowtide.Planning(workspaces=False)
    )
    for at in ([2, 3], [1, 4]):
        assert torch.equal(cut(x, torch.tensor(at)), (x * 2)[slice(*at)])
    refused(lambda model, x: torch.tensor_split(model(x), model(x)[0].argsort()[:1])[0].sum(), rf"at {WHERE}")


DROPS: tuple[Callable[[], object], ...] = (
    lambda: torch.rand(()) < 0.0,
    lambda: not torch.rand(1) > 0.0,  # of which a draw of exactly 0 would say something else
    lambda: not torch.rand(1) >= 0,
    lambda: torch.rand(()) >= 1.0,
    lambda: not torch.rand(()) < 1,
)


@pytest.mark.parametrize("dropped", DROPS)
def test_a_rate_of_which_every_draw_says_the_same_decides(dropped):
    """A layer drop of 0. The draws are made all the same."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x) if not dropped() else x
        return functional.dropout(out, 0.5).square().sum()

    found = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, x = nn.Linear(3, 3), torch.rand(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = (
            lowtide.optimize(model, x, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False)) if optimized else None
        )
        for _ in range(2):
            if step is not None:
                step(x)
                continue
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        found.append((model.weight.detach(), torch.get_rng_state()))
    assert all(map(torch.equal, *found))
