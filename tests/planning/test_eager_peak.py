"""The promised peak of eager PyTorch is that of its own loop, by the allocator's record."""

from __future__ import annotations

import gc
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lowtide

NODES, EDGES = 60, 900


class Masked(nn.Module):
    """Encodes a quarter of the patches, and decodes all."""

    def __init__(self):
        super().__init__()
        self.embed, self.mask, self.mix, self.head = (
            nn.Linear(12, 24),
            nn.Parameter(torch.zeros(1, 1, 24)),
            nn.Linear(24, 24),
            nn.Linear(24, 12),
        )

    def forward(self, x, noise):
        patches = self.embed(x)
        many, length, width = patches.shape
        order = noise.argsort(1)
        back, keep = order.argsort(1), order[:, : length // 4]
        seen = self.mix(torch.gather(patches, 1, keep.unsqueeze(-1).repeat(1, 1, width))).relu()
        mask = torch.ones(many, length)
        mask[:, : length // 4] = 0
        mask = torch.gather(mask, 1, back)
        whole = torch.cat([seen, self.mask.repeat(many, length - length // 4, 1)], 1)
        whole = torch.gather(whole, 1, back.unsqueeze(-1).repeat(1, 1, width))
        wrong = ((self.head(F.gelu(self.mix(whole))) - x) ** 2).mean(-1)
        return (wrong * mask).sum() / mask.sum()


class Rotary(nn.Module):
    """Attention with rotated queries and keys."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        angle = torch.einsum("i,j->ij", torch.arange(x.shape[1]).float(), 1 / 100 ** (torch.arange(0, 6, 2).float() / 6))
        angle = torch.cat([angle, angle], -1)

        def rotated(heads):
            one, two = heads.reshape(*heads.shape[:-1], 2, 3).unbind(-2)
            return heads * angle.cos() + torch.cat((-two, one), -1) * angle.sin()

        query, key, value = (each.view(*each.shape[:2], 4, 6).transpose(1, 2) for each in self.into(x).chunk(3, -1))
        scores = torch.einsum("bhid,bhjd->bhij", rotated(query), rotated(key))
        attended = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)
        return (self.out(attended.transpose(1, 2).reshape(x.shape)) - x).square().mean()


class Messages(nn.Module):
    """Messages along the edges of a graph."""

    def __init__(self):
        super().__init__()
        self.embed, self.filter, self.head = nn.Embedding(20, 16), nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("centres", torch.linspace(0, 5, 8))

    def forward(self, kind, place, source, target):
        distance = (place[source] - place[target]).norm(dim=-1)
        weights = F.softplus(self.filter(torch.exp(-((distance[:, None] - self.centres) ** 2)))) * distance.cos()[:, None]
        states = self.embed(kind)
        for _ in range(2):
            states = states + torch.zeros_like(states).index_add(0, target, states[source] * weights)
        return torch.zeros(3, 1).scatter_add(0, (torch.arange(NODES) % 3)[:, None], self.head(states)).square().mean()


class Means(nn.Module):
    """Averages over edges: their gradient counts the edges in place, and holds the counts for as long as it runs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, source, target):
        states = self.embed(x).relu()
        for _ in range(2):
            states = states.scatter_reduce(0, target[:, None].expand(-1, 16), states[source] * 2, "mean").relu()
        return self.head(states).square().mean()


NETWORKS = {
    "means": (Means, lambda: (torch.randn(400, 8), *torch.randint(0, 400, (2, 300)).unbind())),
    "masked": (Masked, lambda: (torch.randn(16, 32, 12), torch.rand(16, 32))),
    "rotary": (Rotary, lambda: (torch.randn(8, 32, 24),)),
    "messages": (
        Messages,
        lambda: (torch.randint(0, 20, (NODES,)), torch.randn(NODES, 3), *torch.randint(0, NODES, (2, EDGES)).unbind()),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_eagers_peak_is_what_its_loop_takes(name):
    torch.manual_seed(0)
    network, batch_of = NETWORKS[name]
    model, batch = network(), batch_of()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    _assert_is_what_eager_takes(model, batch, lambda model, *batch: model(*batch), optimizer)


class Shared(nn.Module):
    """A weight that is used several times, so that its gradients are summed up."""

    def __init__(self, use):
        super().__init__()
        self.use, self.embed, self.head, self.conv = use, nn.Embedding(600, 64), nn.Linear(64, 600, bias=False), nn.Conv2d(64, 64, 3)
        self.square, self.cell, self.wide = nn.Linear(64, 64, bias=False), nn.GRUCell(64, 64), nn.Parameter(torch.randn(64, 600))

    def forward(self, x):
        return self.use(self, x)


def _tied(model, x):
    return F.cross_entropy(F.linear(model.embed(x), model.embed.weight).flatten(0, 1), x.flatten())


def _tied_and_more(model, x):
    return _tied(model, x) + (model.embed(x + 1) @ model.embed.weight.T).square().mean()


SHARED = {
    "embedding and head": _tied,
    "embedding and head twice": _tied_and_more,
    "head twice": lambda model, x: model.head(model.embed(x)).square().mean() + model.head(model.embed(x + 1)).abs().mean(),
    "head of rows thrice": lambda model, x: sum(model.head(model.embed(x[row])).square().mean() for row in range(3)),
    "both ways": lambda model, x: ((model.embed(x) @ model.wide) @ model.wide.T).square().mean(),
    "parts of one": lambda model, x: sum(part.square().mean() for part in (model.embed(x) @ model.wide).chunk(3, -1)),
    "cell": lambda model, x: reduce(lambda state, row: model.cell(row, state), model.embed(x), torch.zeros(8, 64)).square().mean(),
    "convolution": lambda model, x: model.conv(model.conv(model.embed(x).mT.reshape(2, 64, 4, 4).repeat(1, 1, 3, 3))).square().mean(),
    "residual": lambda model, x: reduce(lambda states, _: states + model.square(states).relu(), range(3), model.embed(x)).square().mean(),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("by", ["SGD", "AdamW"])
def test_sums_of_gradients_of_one_weight_are_as_eager_makes_them(name, by):
    """In place, or in new memory where a gradient is a view."""
    torch.manual_seed(0)
    model, batch = Shared(SHARED[name]), (torch.randint(0, 599, (4, 8)),)
    optimizer = getattr(torch.optim, by)(model.parameters(), foreach=False)

    _assert_is_what_eager_takes(model, batch, lambda model, *batch: model(*batch), optimizer)


ROWS, WIDTH = 128, 32
PLACES, ROW = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) * 7 % WIDTH, torch.arange(ROWS) * 5 % ROWS


def _unused(x):
    """A metric that is computed and never read, by a name that lives to the end."""
    chances = x.detach().softmax(1)
    torch.cat([chances] * 6).amax(1)
    return x.tanh()


class _Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        torch.cat([x] * 6).sum()
        return grad * 2


FUNCTIONS = {
    "unused": _unused,
    "unused in a formula": _Wasteful.apply,
    "unused gradient": lambda x: torch.zeros(ROWS, WIDTH).scatter_reduce(1, PLACES, x, "amax"),
    "largest": lambda x: x.max(1).values,
    "top": lambda x: x.topk(4, 1).values,
    "gathered": lambda x: x.gather(1, PLACES[:, :2]),
    "indexed": lambda x: x[ROW[:4]],
    "taken": lambda x: x.take(PLACES.flatten()[:8]),
    "summed": lambda x: F.triplet_margin_loss(x[:32], x[32:64], x[64:96]),
    "summed thrice": lambda x: torch.trapezoid(x),
    "branches": lambda x: x.prod(1),
    "branches of running products": lambda x: x.cumprod(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_eagers_peak_is_what_one_operator_takes(name):
    """What nothing needs counts, sums and gradients by places are in place, of two branches one is taken."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, WIDTH), torch.randn(ROWS, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def loss(model, x):
        return FUNCTIONS[name](model(x)).square().mean()

    _assert_is_what_eager_takes(model, (x,), loss, optimizer)


def test_what_nothing_needs_counts_over_a_range():
    model, x = nn.Linear(8, WIDTH), torch.randn(ROWS, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    settings = {"loss": lambda model, x: _unused(model(x)).square().mean(), "optimizer": optimizer}
    planning = lowtide.Planning(progress=False)
    torch.manual_seed(0)
    step = lowtide.optimize(model, (x,), shapes=lowtide.Shapes(dynamic={0: {0: (ROWS // 2, ROWS)}}), planning=planning, **settings)
    fixed = lowtide.optimize(model, (x,), planning=planning, **settings)
    needed = lowtide.optimize(model, (x,), planning=planning, **settings | {"loss": lambda model, x: model(x).tanh().square().mean()})
    assert step.plan.eager_peak_bytes == fixed.plan.eager_peak_bytes > needed.plan.eager_peak_bytes


def _assert_is_what_eager_takes(model, batch, loss, optimizer):
    """The promised peak of eager PyTorch beside what the allocator counts in a later step."""

    def loop():
        optimizer.zero_grad()
        result = loss(model, *batch)
        result.backward()
        optimizer.step()

    loop()
    taken_bytes = _most_bytes(loop, optimizer)
    plan = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=lowtide.Planning(progress=False)).plan
    assert plan.eager_peak_bytes - plan.resident_bytes == pytest.approx(taken_bytes, rel=0.02)


def _most_bytes(loop, optimizer):
    """The most that is allocated at once beyond what was there before."""
    optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loop()
    events, found = list(record.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, nbytes in sorted(found, key=lambda each: each[0]):
        now += nbytes
        most = max(most, now)
    return most
