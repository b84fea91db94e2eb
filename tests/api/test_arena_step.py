"""`optimize(..., run=Run(arena="always"))`: the same training, in memory of the step's own, whatever happens around it."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from bench.in_values import in_values
from lowtide.api import step_memory as api_arena
from lowtide.base.messages import Stages
from lowtide.runtime.arena import native
from lowtide.runtime.libraries import once
from tests.api.networks import chosen_rows, convnet, cross_entropy, pictures, rows, sgd, squares, workload
from tests.arenas import skip_without_arenas
from tests.training import check, varied

IN_ARENA = {"arena": "always"}


@pytest.fixture(autouse=True)
def _compiled():
    skip_without_arenas()


def _training(seed: int = 0, **options):
    torch.manual_seed(seed)
    model, batch, loss, optimizer = workload(convnet, pictures, cross_entropy)()
    return model, batch, lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(**options))


def test_training_is_eagers_and_everything_but_the_loss_is_served():
    step = check(workload(convnet, pictures, cross_entropy), steps=5, options=IN_ARENA)
    report = step.arena
    assert report.recorded_steps == 2  # the first step makes the optimizer's state, and has requests of its own
    assert report.served_steps == 3
    assert report.last.outliving == 1
    assert report.last.served == report.last.requests - 1
    assert report.served_share > 0.999
    assert report.planned_bytes >= report.lower_bound_bytes > 0
    assert str(report).startswith("arena of 0.")
    assert "outlive the step" in str(report)


def test_a_step_under_a_limit_is_served_too():
    search = lowtide.Sweep(levels=8, max_states=400)
    step = check(workload(convnet, pictures, cross_entropy), steps=5, options=IN_ARENA | {"latency": 2, "search": search})
    assert step.plan.cost_report.recomputed > 0
    assert step.arena.served_share > 0.99


def test_a_step_without_an_arena_tells_nothing():
    assert _training()[2].arena is None


def test_inference_hands_out_nothing_of_the_arena():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    batch = torch.randn(4, 6)
    step = lowtide.optimize(model, batch, run=lowtide.Run(arena="always"))
    results = [step(batch + turn) for turn in range(5)]
    for turn, result in enumerate(results):
        assert torch.equal(result, model(batch + turn))
    assert step.arena.last.outliving == 1
    assert step.arena.live_tensors == 0


def test_losses_that_are_kept_keep_their_values():
    _, batch, step = _training(arena="always")
    _, _, plain = _training()
    torch.manual_seed(1)
    expected = [plain(*batch) for _ in range(6)]
    torch.manual_seed(1)
    assert torch.equal(torch.stack([step(*batch) for _ in range(6)]), torch.stack(expected))


def test_accumulation_and_a_hook_on_the_gradients():
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    step = check(workload(convnet, pictures, cross_entropy, sgd), steps=5, accumulate=2, after_backward=clip, options=IN_ARENA)
    assert not step.arena.last.deviates


def test_two_steps_in_turns():
    """The other one trains between the steps of the first, whether that is eager or not."""
    outcomes, others = [], []

    def between(model, optimizer):
        other_model, batch, other = _training(1, arena="always")
        others.append(other)

        def train(turn):
            with torch.random.fork_rng():
                torch.manual_seed(turn)
                other(*batch)
            if turn == 4:
                outcomes.append([parameter.detach().clone() for parameter in other_model.parameters()])

        return train

    step = check(workload(convnet, pictures, cross_entropy), steps=5, between=between, options=IN_ARENA)
    for report in (step.arena, *(each.arena for each in others)):
        assert not report.last.deviates
        assert report.served_steps == 3
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


def test_an_eager_evaluation_between_steps():
    def between(model, optimizer):
        def evaluate(turn):
            with torch.no_grad():
                model.eval()(torch.ones(2, 3, 8, 8))
            model.train()(torch.ones(2, 3, 8, 8)).sum().backward()
            optimizer.zero_grad()

        return evaluate

    step = check(workload(convnet, pictures, cross_entropy), steps=5, between=between, options=IN_ARENA)
    assert not step.arena.last.deviates


def test_a_step_called_from_other_threads():
    _, batch, step = _training(arena="always")
    _, _, plain = _training()
    expected, found = [], []
    for turn in range(6):
        for each, results in ((plain, expected), (step, found)):
            torch.manual_seed(turn)
            if turn % 2:
                thread = threading.Thread(target=lambda each=each, results=results: results.append(each(*batch)))
                thread.start()
                thread.join()
            else:
                results.append(each(*batch))
    assert torch.equal(torch.stack(expected), torch.stack(found))
    assert step.arena.served_steps == 4
    assert not step.arena.last.deviates


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(1000.0) + index


def test_a_forked_data_loader_between_steps():
    def between(model, optimizer):
        def load(turn):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: torch has threads, and the loader forks
                loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
                found = torch.cat(list(loader))
            assert torch.equal(found, torch.arange(4.0)[:, None] + torch.arange(1000.0))

        return load

    step = check(workload(convnet, pictures, cross_entropy), steps=4, between=between, options=IN_ARENA)
    assert step.arena.served_steps == 2
    assert not step.arena.last.deviates


@pytest.mark.parametrize("keeps", [False, True])
def test_an_error_inside_a_step(keeps: bool):
    """The traceback holds what the step had made by then: its memory is not used again before that is let go."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 3))
    twin = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 3))
    twin.load_state_dict(model.state_dict())
    x, right, wrong = torch.randn(4, 6), torch.tensor([0, 2]), torch.tensor([0, 7])
    step = lowtide.optimize(
        model, (x, right), loss=chosen_rows, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), run=lowtide.Run(arena="always")
    )
    plain = lowtide.optimize(twin, (x, right), loss=chosen_rows, optimizer=torch.optim.SGD(twin.parameters(), lr=0.1))
    kept = []
    for turn in range(6):
        assert torch.equal(step(x, right), plain(x, right))
        assert (step.arena.live_tensors > 0) == (step.arena.last.occupied > 0) == bool(kept)
        if turn in (2, 3):
            with pytest.raises(IndexError) as told:
                step(x, wrong)
            if keeps:
                kept.append(told)
            del told
            gc.collect()
    assert (step.arena.live_tensors > 0) == keeps
    kept.clear()
    gc.collect()
    assert step.arena.live_tensors == 0
    for _ in range(3):
        assert torch.equal(step(x, right), plain(x, right))
    assert step.arena.last.served == step.arena.last.requests - 1


def test_a_step_that_runs_other_kernels_computes_the_same():
    """Without oneDNN convolutions ask for other temporaries."""
    turns = iter(range(100))

    def around():
        return torch.backends.mkldnn.flags(enabled=next(turns) % 8 not in (3, 4), allow_tf32=None)

    step = check(workload(convnet, pictures, cross_entropy), steps=8, around=around, options=IN_ARENA)
    assert step.arena.recorded_steps >= 3


_STASH: list[torch.Tensor] = []


@torch.library.custom_op("lowtide_test::overheard", mutates_args=())
def overheard(x: torch.Tensor) -> torch.Tensor:
    """Keeps what passes by, once there is something to keep it with."""
    if _STASH:
        _STASH.append(x)
    return x + 1


@overheard.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_an_operator_keeps_is_not_overwritten():
    class Overheard(nn.Module):
        def forward(self, x):
            return overheard(x * 2).tanh().sum()

    x = torch.randn(1000)
    step = lowtide.optimize(Overheard(), x, run=lowtide.Run(arena="always"), planning=lowtide.Planning(workspaces=False))
    step(x), step(x)
    _STASH.append(torch.empty(0))
    for turn in range(4):
        assert torch.equal(step(x + turn), ((x + turn) * 2 + 1).tanh().sum())
    kept = _STASH[1:]
    _STASH.clear()
    assert step.arena.live_tensors == 1  # the second time its place was taken, and then it was recorded as outliving
    for turn, tensor in enumerate(kept):
        assert torch.equal(tensor, (x + turn) * 2)


def test_each_buffer_of_a_planned_step_keeps_its_contents_from_birth_to_death():
    """The requests of a training step, replayed: each is filled with a pattern when it is made and compared when it is let go."""
    _, batch, step = _training(arena="always")
    for _ in range(3):
        step(*batch)
    own = step._memory.arena
    track = own._latest
    events = {int(tick): ("make", index) for index, tick in enumerate(track.recorded.born)}
    events |= {int(tick): ("drop", index) for index, tick in enumerate(track.recorded.died) if tick >= 0}
    generator = np.random.default_rng(0)

    def replay() -> None:
        alive: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
        for _, (what, index) in sorted(events.items()):
            if what == "make":
                tensor = torch.empty(int(track.recorded.size_bytes[index]), dtype=torch.uint8)
                tensor.numpy()[:] = (pattern := generator.integers(0, 256, tensor.nbytes, np.uint8))
                alive[index] = tensor, pattern
            else:
                tensor, pattern = alive.pop(index)
                assert (tensor.numpy() == pattern).all()
                del tensor

    for _ in range(3):
        _, counts = own._allocator.serve(own._region, track.script, replay)
        assert counts.served == counts.requests - 1 > 100


def test_the_peak_is_measured_as_without_an_arena():
    _, batch, step = _training(arena="always")
    _, _, plain = _training()
    for _ in range(3):
        step(*batch), plain(*batch)
    assert step.measure(*batch) == plain.measure(*batch)
    assert step.arena.last.served == step.arena.last.requests - 1


def test_steps_recaptured_between_share_the_arena():
    def between(model, optimizer):
        return lambda turn: model[4].requires_grad_(turn % 2 == 1)

    step = check(workload(convnet, pictures, cross_entropy, sgd), steps=8, between=between, options=IN_ARENA)
    assert step.arena.served_steps >= 4
    assert not step.arena.last.deviates


def test_varied_batches_are_served():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    step = lowtide.optimize(model, rows(), loss=squares, optimizer=sgd(model), run=lowtide.Run(arena="always"))
    for turn in range(5):
        step(*varied(rows(), turn))
    assert step.arena.last.served == step.arena.last.requests - 1


def test_without_a_compiler_it_says_so_once_and_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "load", once(native.load.__wrapped__))  # as in a process that has loaded none
    api_arena._warn.cache_clear()
    with pytest.warns(UserWarning, match=r"lowtide runs without an arena: it takes a C\+\+ compiler, .* install g\+\+, or set CXX") as told:
        _training(arena="always")
    assert [warning.filename for warning in told] == [__file__]
    step = check(workload(convnet, pictures, cross_entropy), options=IN_ARENA)
    assert step.arena.served_steps == 0
    assert str(step.arena).startswith("no arena: it takes a C++ compiler")
    api_arena._warn.cache_clear()


def test_where_an_arena_is_not_insisted_on_nothing_is_said(tmp_path, monkeypatch, recwarn):
    assert _training(arena="auto")[2].arena.absent == ""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "load", once(native.load.__wrapped__))  # as in a process that has loaded none
    api_arena._warn.cache_clear()
    step = check(workload(convnet, pictures, cross_entropy), options={"arena": "auto"})
    assert step.arena.absent.startswith("it takes a C++ compiler")
    step.empty_arena()
    assert not [each for each in recwarn if "arena" in str(each.message)]


def test_other_devices_say_so():
    api_arena._warn.cache_clear()
    with pytest.warns(UserWarning, match="arenas are for steps on a CPU or a CUDA device, this one is on xpu"):
        api_arena.StepArena.of(torch.device("xpu"), None, Stages())
    api_arena._warn.cache_clear()


def test_on_the_meta_device_there_is_nothing_to_serve():
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    assert lowtide.optimize(model, rows(), run=lowtide.Run(arena="always")).arena is None
