"""Steps that lowtide itself captures as CUDA graphs: what is launched, the memory that they take, and what cannot be captured."""

from __future__ import annotations

import ctypes
import gc
import random

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planning import machine
from lowtide.schedule import ProgramOrder
from tests.gpu.conftest import NULL
from tests.swapping import random_sequence, swapping

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
PLANNING = lowtide.Planning(progress=False, workspaces=False)
MIB = 2**20


def _mlp(width=64, rows=32, dropout=0.1):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(width), nn.Linear(width, width)]
    return nn.Sequential(*layers).cuda(), torch.randn(rows, width, device="cuda")


def _step(model, batch, graph, loss=lambda model, x: model(x).square().mean(), **options):
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    options = {"planning": PLANNING, "run": lowtide.Run(graph=graph, arena=options.pop("arena", "never")), **options}
    return lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **options), optimizer


def _trained(graph, turns=6, **options):
    """After steps on batches that lie elsewhere each time, with a learning rate that changes at each of them."""
    model, batch = _mlp()
    step, optimizer = _step(model, batch, graph, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda turn: 0.9**turn)
    batches = [torch.randn_like(batch) for _ in range(turns)]
    results = []
    for turn, each in enumerate(batches):
        torch.manual_seed(turn)
        results.append(step(each))
        schedule.step()
    return step, [*results, *model.state_dict().values()]


@pytest.mark.parametrize("arena", ["never", "always"])
def test_a_graph_trains_as_the_program_does(arena):
    _, want = _trained("never")
    step, got = _trained("always", arena=arena)
    assert (step.graph.captures, step.graph.replays) == (1, 3 if arena == "always" else 4), str(step.graph)
    assert len({each.data_ptr() for each in got[:6]}) == 6
    assert NULL or all(map(torch.equal, want, got))


@pytest.mark.skipif(not NULL, reason="counted on the null device")
def test_a_graph_launches_what_the_program_does_and_copies_its_results(monkeypatch):
    made, plain = [], torch.cuda.CUDAGraph

    def kept():
        made.append(plain(keep_graph=True))
        return made[-1]

    model, batch = _mlp()
    step, _ = _step(model, batch, "never")
    for _ in range(2):
        step(batch)
    theirs = plain(keep_graph=True)
    with torch.cuda.graph(theirs):
        step(batch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kept)
    own, _ = _step(model, batch, "always")
    for _ in range(3):
        own(batch)
    assert _nodes(made[0]) == _nodes(theirs) + 1  # the loss, to where it is read


def _nodes(graph):
    count = ctypes.c_size_t()
    ctypes.CDLL(None).cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value


def _eleven():
    model = nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))]).cuda().eval()
    batches = [torch.randn(512 * (at + 1), 256, device="cuda") for at in range(11)]
    shapes, options = lowtide.Shapes(on_new_shape="extend"), {"planning": PLANNING, "run": lowtide.Run(graph="always")}
    step = lowtide.optimize(model, batches[0], shapes=shapes, **options)
    for _ in range(4):
        for batch in batches:
            step(batch)
    return step, batches


@pytest.mark.filterwarnings("ignore:lowtide has captured the step for")
def test_eleven_shapes_take_what_the_largest_does():
    """Though each is larger than those before; and a replay allocates nothing but what it returns."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    step, batches = _eleven()
    assert step.graph.captured == 11
    plans = [step.plan_for(batch) for batch in batches]
    each = [plan.peak_bytes - plan.resident_bytes for plan in plans]
    given = sum(batch.nbytes for batch in batches) + plans[0].resident_bytes
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - before - given - step.graph.copies_bytes
    workspaces = 2 * 40 * MIB  # of cuBLAS, for two streams
    assert taken < 1.3 * max(each) + workspaces < sum(each)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    for batch in batches:
        step(batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocations == 11
    step.empty_arena()
    assert step.graph.captured == 0


def test_a_limit_holds_with_a_graph():
    model, batch = _mlp(width=512, rows=4096)
    planning = lowtide.Planning(progress=False, workspaces=False, effort="quick")
    step, _ = _step(model, batch, "always", memory="90%", arena="limit", planning=planning)
    for _ in range(6):
        step(torch.randn_like(batch))  # each lies where the one before did
    assert (step.graph.captures, step.graph.copies_bytes) == (1, 2 * 512)
    step(batch)
    assert step.graph.captures == 2
    copies = step.graph.copies_bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - step.arena.taken_bytes - copies
    results = [step(batch) for _ in range(2)]
    returned = sum(-(-each.nbytes // 512) * 512 for each in results)
    beyond = torch.cuda.max_memory_allocated() - before - (step.plan.peak_bytes - step.plan.resident_bytes) - copies - returned
    assert beyond < 2**21  # an arena takes whole segments
    assert copies == batch.nbytes + 2 * 512  # the loss, and the numbers of the optimizer
    assert copies + 512 <= step.graph.most_beside_bytes
    assert step.plan.peak_bytes + step.graph.most_beside_bytes <= 0.9 * step.plan.eager_peak_bytes


def test_a_graph_swaps_by_copies_of_its_own(monkeypatch):
    monkeypatch.setattr(machine, "equal_graphs", swapping(lambda graph: random_sequence(graph, random.Random(0), 0.0, 0.3), []))
    model, batch = _mlp(dropout=0.0)
    step, _ = _step(model, batch, "always", planning=lowtide.Planning(workspaces=False, solver=ProgramOrder()))
    for _ in range(4):
        step(batch)
    assert "host.store(" in step.source
    assert step.graph.replays == 2


class _Drawing(nn.Linear):
    def forward(self, x):
        noise = torch.rand(x.shape, device=x.device, generator=GENERATOR)
        return super().forward(nn.functional.dropout(x + noise, 0.5))


class _Attending(nn.Linear):
    """The kernel that saves memory, as a mask is given; it draws as well, and leaves the state of that for its gradient."""

    def forward(self, x):
        torch.rand(4, device=x.device, generator=GENERATOR)
        heads = super().forward(x).reshape(1, 2, 8, 32)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, heads.new_zeros(8, 8), 0.5)


GENERATOR = torch.Generator("cuda") if torch.cuda.is_available() else None


@pytest.mark.parametrize("arena", ["never", "always"])
@pytest.mark.parametrize("layer", [_Drawing, _Attending])
def test_a_graph_draws_from_the_callers_generators(layer, arena):
    """As many numbers as from Python, of both. Calls are tried, which shows that attention leaves its state on the host."""
    offsets = []
    for graph in ("never", "always"):
        GENERATOR.manual_seed(3)
        torch.cuda.manual_seed(4)
        model, batch = layer(64, 64).cuda(), torch.randn(8, 64, device="cuda")
        step, _ = _step(model, batch, graph, arena=arena, planning=lowtide.Planning(progress=False))
        for _ in range(5):
            step(batch)
        offsets.append((GENERATOR.get_offset(), torch.cuda.default_generators[0].get_offset()))
    assert step.graph.replays == (3 if arena == "never" else 2)  # an arena is taken at the first call
    assert offsets[0] == offsets[1] != (0, 0)


@torch.library.custom_op("lowtide_tests::waits", mutates_args=())
def _waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().synchronize()
    return x.clone()


@_waits.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_waits_for_the_device_is_told_and_runs_from_python():
    model, batch = _mlp()
    step = lowtide.optimize(model, batch, planning=PLANNING, run=lowtide.Run(graph="auto"))
    for _ in range(3):
        step(batch)
    waiting = lowtide.optimize(_Waiting(model), batch, planning=PLANNING, run=lowtide.Run(graph="auto"))
    for _ in range(4):
        waiting(batch)
    assert waiting.graph.captures == 0
    assert "lowtide_tests.waits.default (" in str(waiting.graph)
    assert "cannot be captured" in str(waiting.graph)
    torch.nn.functional.dropout(batch, 0.5)  # PyTorch's generator is no graph's any more
    before = step.graph.replays
    step(batch)
    step.empty_arena()
    for _ in range(2):
        step(batch)
    assert step.graph.replays == before + 3
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # and another capture can be begun
        batch.add(1)


class _Waiting(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return _waits(self.inner(x))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), r"on the host.*capturable=True"),
        (lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), fused=True), r"group 0\.lr|lr on the host"),
    ],
    ids=["counts", "a rate on the host"],
)
def test_what_lies_on_the_host_is_refused(make, why):
    model, batch = _mlp()
    loss, optimizer = (lambda model, x: model(x).square().mean()), make(model.parameters())
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, planning=PLANNING, run=lowtide.Run(graph="always"))


def test_a_step_on_another_stream_comes_after_what_was_begun():
    model, batch = _mlp()
    step, _ = _step(model, batch, "auto")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side, torch.cuda.default_stream()):
        stream.wait_stream(side)
        with torch.cuda.stream(stream):
            for _ in range(4):
                step(batch)
    assert step.graph.captures == 3
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):  # the caller's own: the step is a part of it
        step(batch)
    assert step.graph.calls_without["a CUDA graph of the caller's was captured"] == 1
