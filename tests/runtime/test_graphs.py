"""The bookkeeping around CUDA graphs, by a recorder on the CPU: a replay runs again what was recorded, on the same memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowtide
from bench.bits import same_bits
from lowtide.api import step_memory
from lowtide.lower.numbers import NumberTensors
from lowtide.runtime.graphs.steps import as_kernels_round

PLANNING = lowtide.Planning(progress=False, workspaces=False)


class Recorder:
    """A device that runs what it has captured at each replay."""

    align_bytes = 1
    stream = 0
    fails = False

    def __init__(self, device):
        pass

    def capturing(self):
        return False

    def follow(self, memory):
        return Recorder.stream

    def release(self):
        pass

    def capture(self, body, generators, around):
        if Recorder.fails:
            raise RuntimeError("not permitted\nand more")
        if torch.ones_like is _interrupted:
            body()
        return SimpleNamespace(replay=body)


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    monkeypatch.setitem(step_memory.DEVICES, "cpu", Recorder)
    monkeypatch.setattr(Recorder, "stream", 0)
    monkeypatch.setattr(Recorder, "fails", False)


class _Decayed(torch.optim.Optimizer):
    """Numbers of it only multiply."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "decay": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decay"]).sub_(parameter.grad.mul(group["lr"]))


def _sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **settings)


def _with_tensor(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), fused=True)


def _loss(model, x):
    hidden = model(x)
    return hidden.square().mean(), x, hidden[:2], hidden[1:]


def _made(optimizer, graph="never", dtype=torch.float32, loss=_loss, **run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).to(dtype)
    trained, batch = optimizer(model.parameters()), torch.randn(3, 4, dtype=dtype)
    options = {"planning": PLANNING, "run": lowtide.Run(graph=graph, **run)}
    return model, trained, batch, lowtide.optimize(model, batch, loss=loss, optimizer=trained, **options)


def _steps(made, count=8, *, fresh=True, factor=lambda turn: 1.0):
    model, optimizer, batch, step = made
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    results, batches = [], [torch.randn_like(batch) if fresh else batch for _ in range(count)]
    for each in batches:
        results.append(step(each))
        schedule.step()
    return [*(item for result in results for item in result), *model.state_dict().values()], batches, results


def _each_epoch(turn):
    return 0.5 ** (turn // 4)


def _each_step(turn):
    return 0.9**turn


@pytest.mark.parametrize(
    ("optimizer", "factor", "arena", "captures", "replays"),
    [
        (_sgd, _each_epoch, "never", 2, 5),  # the first program runs once, the second first from Python, and where the rate changes
        (_sgd, _each_step, "never", 0, 0),
        (_with_tensor, _each_step, "never", 1, 6),
        (_with_tensor, _each_step, "always", 1, 6),
        (lambda parameters: _Decayed(parameters, 0.1), _each_step, "never", 1, 7),
    ],
    ids=["epochs", "steps", "tensor", "arena", "products"],
)
def test_a_graph_trains_as_the_program_does(optimizer, factor, arena, captures, replays):
    want, *_ = _steps(_made(optimizer), factor=factor)
    made = _made(optimizer, "auto", arena=arena)
    got, *_ = _steps(made, factor=factor)
    report = made[3].graph
    assert all(map(torch.equal, want, got))
    assert (report.captures, report.replays) == (captures, replays), str(report)
    assert report.replays + sum(report.calls_without.values()) == 8


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_returned_is_the_callers_own(fresh):
    made = _made(_sgd, "always")
    _, batches, results = _steps(made, fresh=fresh)
    assert made[3].graph.replays == 6
    assert all(result[1].data_ptr() == batch.data_ptr() for result, batch in zip(results, batches, strict=True))
    assert len({result[0].data_ptr() for result in results}) == len({result[2].data_ptr() for result in results}) == 8
    last, before = results[-1], results[-2][2].clone()
    last[2][1].fill_(7.0)
    assert torch.equal(last[3][0], torch.full((3,), 7.0))  # views of one memory stay so
    assert torch.equal(results[-2][2], before)


@pytest.mark.parametrize(
    ("optimizer", "options", "why"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), {}, r"_local_scalar_dense.*capturable=True"),
        (_sgd, {"training": lowtide.Training(scaler=torch.amp.GradScaler("cpu"))}, "_local_scalar_dense|scaler"),
    ],
    ids=["counts read", "scaler"],
)
def test_what_the_host_does_is_refused(optimizer, options, why):
    model = nn.Linear(4, 1)
    trained, batch = optimizer(model.parameters()), torch.randn(3, 4)
    call = {"loss": lambda model, x: model(x).square().mean(), "optimizer": trained, "planning": PLANNING, **options}
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.optimize(model, batch, **call, run=lowtide.Run(graph="always"))
    step = lowtide.optimize(model, batch, **call, run=lowtide.Run(graph="auto"))
    for _ in range(3):
        step(batch)
    assert step.graph.captures == 0
    assert why.partition("|")[0].partition(".*")[0] in str(step.graph)


def test_a_number_that_changes_at_each_step_is_told_before_anything_changes():
    made = _made(_sgd, "always")
    model, optimizer, batch, step = made
    _steps(made, 4, fresh=False)
    optimizer.param_groups[0]["lr"] = 0.05
    step(batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.param_groups[0]["lr"] = 0.04
    with pytest.raises(lowtide.StepError, match=r"group 0.lr is another number.*lr=torch.tensor"):
        step(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    step(batch)  # the same number again
    assert step.graph.captures == 2


def _changes(made):
    """What a loop does between steps."""
    model, optimizer, batch, step = made
    results, Recorder.stream = [], 0
    for turn in range(14):
        if turn == 4:
            model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
        if turn == 6:
            model[0].weight.data = model[0].weight.data.clone()
        if turn == 8:
            with torch.no_grad():
                results.append(model.eval()(batch))
            step(batch)
            model.train()
        if turn == 11:
            optimizer.zero_grad()
            model[0].bias.grad = torch.ones(8)
            Recorder.stream = 1
        results.append(step(batch)[0])
    return [*results, *model.state_dict().values()]


def test_what_changes_between_steps_is_seen():
    want, made = _changes(_made(_sgd)), _made(_sgd, "auto")
    assert all(map(torch.equal, want, _changes(made)))
    assert made[3].graph.captures > 2
    assert all(why in str(made[3].graph) for why in ("another stream", "parameter 0.weight lies elsewhere"))


def test_a_capture_that_fails_is_told_and_not_tried_again(monkeypatch):
    want, *_ = _steps(_made(_sgd))
    monkeypatch.setattr(Recorder, "fails", True)
    made = _made(_sgd, "auto")
    got, *_ = _steps(made)
    assert all(map(torch.equal, want, got))
    assert made[3].graph.calls_without["it cannot be captured: not permitted"] == 6
    made = _made(_sgd, "always")
    _steps(made, 2)
    with pytest.raises(lowtide.StepError, match="not permitted"):
        made[3](made[2])


@pytest.mark.parametrize("graph", ["never", "auto"])
def test_an_interrupt_within_a_capture_has_updated_nothing(graph, monkeypatch):
    made = _made(_sgd, graph)
    _steps(made, 2, fresh=False)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "ones_like", _interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            made[3](made[2])
    told = "were updated" in "".join(getattr(raised.value, "__notes__", []))
    assert told == (graph == "never" and hasattr(raised.value, "add_note"))
    made[3](made[2])
    assert graph == "never" or made[3].graph.captures == 1


def _interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_the_second_of_two_threads_runs_from_python():
    model, batch = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    step = lowtide.optimize(model, batch, planning=PLANNING, run=lowtide.Run(graph="always"))
    expected = [step(batch) for _ in range(3)][-1]
    with step._memory.graphs._lock:
        found = []
        thread = threading.Thread(target=lambda: found.append(step(batch)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert step.graph.calls_without["the same step was running"] == 1


class _Both(nn.Module):
    def forward(self, x, y):
        return x, y[1:], y, (x - y).abs()


def test_tensors_that_are_one_at_first_are_two_later():
    model, (x, y, z) = _Both(), torch.randn(3, 4, 5)
    step = lowtide.optimize(model, (x, y), planning=PLANNING, run=lowtide.Run(graph="always"))
    for pair in ((x, x), (x, x), (x, y), (y.clone(), z), (z.expand(4, 5), z), (z, x[1:].repeat(2, 1)[:4])):
        results = step(*pair)
        assert all(map(torch.equal, results, model(*pair)))
        assert [each.data_ptr() for each in results[:3]] == [pair[0].data_ptr(), pair[1][1:].data_ptr(), pair[1].data_ptr()]
    assert step.graph.replays == 5


def test_shapes_share_one_block_and_graphs_go_as_it_grows():
    model = nn.Linear(4, 4).eval()
    batches = [torch.randn(rows, 4) for rows in (2, 40, 80)]
    shapes = lowtide.Shapes(on_new_shape="extend")
    step = lowtide.optimize(model, batches[0], planning=PLANNING, shapes=shapes, run=lowtide.Run(graph="always"))
    for _ in range(4):
        for batch in batches:
            assert torch.equal(step(batch), model(batch))
    assert (step.graph.captured, step.graph.copies_bytes) == (3, 1536)  # the results of the largest: 1,280 bytes
    step.empty_arena()
    assert (step.graph.captured, step.graph.copies_bytes) == (0, 0)
    assert torch.equal(step(batches[0]), model(batches[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_and_quotients_of_lists_have_the_bits_of_a_number(dtype):
    torch.manual_seed(0)
    lists = [[torch.randn(1000, dtype=dtype)] for _ in range(3)]
    for number in (*torch.randn(50, dtype=torch.float64).tolist(), 1e-40, 1e300, 3):
        tensor = torch.empty((), dtype=dtype).fill_(as_kernels_round(number, dtype))
        assert same_bits(lists[0][0] * number, lists[0][0] * tensor)
        for name in ("_foreach_mul", "_foreach_div"):
            one, two = getattr(torch, name)(lists[1], number), getattr(torch, name)(lists[1], tensor)
            assert same_bits(one[0], two[0])


@pytest.mark.parametrize(("dtype", "free"), [(torch.float32, {"group 0.lr", "group 0.decay"}), (torch.bfloat16, set())])
def test_numbers_are_tensors_only_where_bits_stay(dtype, free):
    *_, step = _made(lambda parameters: _Decayed(parameters, 0.1), dtype=dtype, loss=lambda model, x: model(x).square().mean())
    found = NumberTensors.of(step._lookup.current.decision, "cpu")
    assert {str(step._lookup.current.captured.slots[at]) for at in (() if found is None else found.free)} == free
    row = torch.randn(1000, dtype=dtype)
    assert torch.equal(row * 0.1, row * torch.tensor(0.1, dtype=dtype)) == bool(free)


def test_a_limit_holds_with_the_copies():
    limit = 110_000
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(32, 32), nn.ReLU())]), torch.randn(128, 32)
    options = {"loss": lambda model, x: model(x).square().mean(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    options |= {"memory": limit, "planning": lowtide.Planning(progress=False, workspaces=False, effort="quick")}
    plain = lowtide.optimize(model, batch, **options)
    step = lowtide.optimize(model, batch, **options, run=lowtide.Run(graph="always", arena="always"))
    beside = step.graph.most_beside_bytes
    assert beside == (batch.nbytes + 512) + 2 * 512 + 512  # the batch, the loss twice, and numbers
    assert step.plan.peak_bytes + beside <= limit < plain.plan.peak_bytes + beside


def test_words_are_checked(monkeypatch):
    with pytest.raises(ValueError, match="graph: expected one of 'auto', 'always', 'never', got True"):
        lowtide.Run(graph=True)
    monkeypatch.delitem(step_memory.DEVICES, "cpu")
    model, batch = nn.Linear(2, 2), torch.randn(1, 2)
    with pytest.raises(ValueError, match=r"graph: .*CUDA device"):
        lowtide.optimize(model, batch, run=lowtide.Run(graph="always"), planning=PLANNING)
    step = lowtide.optimize(model, batch, run=lowtide.Run(graph="auto"), planning=PLANNING)
    assert torch.equal(step(batch), model(batch))
    assert "CUDA device" in step.graph.absent
    assert lowtide.optimize(model, batch, planning=PLANNING).graph is None
