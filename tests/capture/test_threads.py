"""A capture is its own thread's: others draw, train, build and optimize meanwhile."""

import contextlib
import copy
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

import lowtide
from lowtide.capture.care.generators import untouched_randomness
from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.trace import Given
from lowtide.errors import CaptureError
from tests.captures import X, captured, mean_square, net, world
from tests.unseen import note, taken


def trained_eagerly(steps=3):
    model, found = net(), []
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(mean_square(model.eval(), X))
        found[-1].backward()
        optimizer.step()
    return [loss.item() for loss in found], [parameter.tolist() for parameter in model.parameters()]


def elsewhere(work):
    """What `work` gives on another thread; what it raises is raised here."""
    found, raised = [], []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def while_captured(work, during="loss"):
    """What `work` gave on another thread in the middle of a capture: of its forward pass, or of the optimizer's step."""
    taken("work")

    def loss(model, x):
        if during == "loss":
            note("work", elsewhere(work))
        return mean_square(model, x)

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            if during == "step":
                note("work", elsewhere(work))
            return super().step(closure)

    captured(loss=loss, optimizer=Adam)
    return taken("work")


# Several at once.


@pytest.mark.parametrize("count", [2, 3])
def test_threads_that_optimize_at_once(count):
    expected, found, gate = trained_eagerly(), [], threading.Barrier(count)
    model_of = [net().eval() for _ in range(count)]
    before = world()

    def work(model):
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        gate.wait()
        step = lowtide.optimize(model, (X,), loss=mean_square, optimizer=optimizer)
        found.append(([step(X).item() for _ in range(3)], [parameter.tolist() for parameter in model.parameters()]))

    threads = [threading.Thread(target=work, args=(model,)) for model in model_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * count
    assert world() == before


# What others do meanwhile.


@pytest.mark.parametrize("during", ["loss", "step"])
def test_another_thread_trains_and_builds(during):
    expected = elsewhere(trained_eagerly)
    assert all(each == expected for each in while_captured(trained_eagerly, during))


def test_another_threads_hooks_and_conversions():
    seen = []

    def work():
        model = net()
        handles = [nn.modules.module.register_module_forward_hook(lambda *given: seen.append(type(given[0]).__name__))]
        handles.append(model[0].weight.register_hook(lambda gradient: seen.append("gradient")))
        handles.append(torch_optimizer.register_optimizer_step_post_hook(lambda *given: seen.append("step")))
        model.double()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(mean_square(model, X.double())).backward()
        scaler.step(optimizer)
        for handle in handles:
            handle.remove()
        return model[0].weight.dtype

    assert set(while_captured(work)) == {torch.float64}
    assert len(seen) % 7 == 0
    assert seen[:7] == ["Linear", "Tanh", "Dropout", "Linear", "Sequential", "gradient", "step"]


def test_hooks_around_all_optimizers_run_for_others_alone():
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append(threading.current_thread())

    with contextlib.closing(Handles(torch_optimizer.register_optimizer_step_pre_hook(hook))):
        while_captured(trained_eagerly, "step")
    assert len(seen) >= 3
    assert threading.current_thread() not in seen


def test_draws_of_others_are_never_taken_for_the_programs():
    """Captures follow one another, and the other thread draws between any two lines of theirs."""
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            random.random(), np.random.rand()

    other = threading.Thread(target=draw)
    other.start()
    try:
        for _ in range(100):
            with untouched_randomness([]):
                threading.Event().wait(0.0005)
    finally:
        stop.set()
        other.join()


class Recurrent(nn.Module):
    """Keeps tensors in all the places where a capture has fakes for them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.recurrent, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GRU(4, 4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))
        self.shift, self.seen, self.several = torch.zeros(1), None, [torch.ones(1)]
        self.first.register_forward_hook(lambda module, args, out: out + 1)

    def forward(self, x):
        y = self.recurrent(self.norm(self.first(x)))[0]
        self.seen = y.detach()
        return self.last(y) * self.scale + self.shift * self.several[0]


def evaluated(model):
    with torch.no_grad():
        return model(X).tolist(), model.seen.tolist()


def differentiated(model):
    gradients = torch.autograd.grad(mean_square(model, X), list(model.parameters()))
    return [each.tolist() for each in gradients]


def put_into(model):
    """What another thread sets in a module stays there."""
    model.count = getattr(model, "count", 0) + 1
    return isinstance(vars(model)["count"], int)


WITH_THE_MODEL = {
    "evaluates": evaluated,
    "differentiates": differentiated,
    "trains": lambda model: (trained_eagerly(2), [parameter.grad for parameter in model.parameters()]),
    "asks for its state": lambda model: {name: (type(each), each.tolist()) for name, each in model.state_dict().items()},
    "copies": lambda model: evaluated(copy.deepcopy(model)),
    "pickles": lambda model: pickle.loads(pickle.dumps(model.last)).weight.tolist(),
    "looks within": lambda model: {name: type(each) for part in model.modules() for name, each in vars(part).items()},
    "sets": put_into,
}


@pytest.mark.parametrize("during", ["loss", "hook", "after_backward", "inference"])
@pytest.mark.parametrize("work", WITH_THE_MODEL.values(), ids=WITH_THE_MODEL)
def test_what_another_thread_does_with_the_model_itself(work, during):
    torch.manual_seed(0)
    model = Recurrent().eval()
    evaluated(model)
    work(model)
    expected = elsewhere(lambda: work(model))

    def beside(*given):
        note("work", elsewhere(lambda: work(model)))

    def loss(model, x):
        found_by_this = model(x)
        if during == "loss":
            beside()
        if during == "hook":
            found_by_this.register_hook(lambda gradient: beside() or gradient * 1)
        return found_by_this.square().mean()

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            y = self.model(x)
            beside()
            return y

    taken("work")
    held_before = [(table, dict(table)) for table in tables_of(model)]
    if during == "inference":
        capture_inference(Beside(), Given((X,), {}, torch.device("cpu")))
    else:
        after = beside if during == "after_backward" else None
        program = TrainingProgram(model, loss, torch.optim.Adam(model.parameters(), 0.1), after_backward=after)
        capture_training(program, Given((X,), {}, torch.device("cpu")))
    found = taken("work")
    assert found
    assert all(each == expected for each in found)
    changed = {name for table, before in held_before for name in before if table[name] is not before[name]}
    assert changed <= {"count", "seen"}  # by the other thread
    assert type(model.seen) is torch.Tensor


def tables_of(model):
    return [table for module in model.modules() for table in (vars(module), module._parameters, module._buffers)]


def test_another_thread_finds_its_own_gradients():
    """While `after_backward` runs, this thread finds those of the capture on parameters that it had before."""
    model = net()
    parameters = list(model.parameters())
    mean_square(model, X).backward()
    expected = [each.grad for each in parameters]

    def after(model):
        assert all(isinstance(each.grad, FakeTensor) for each in parameters)
        note("work", elsewhere(lambda: [each.grad for each in parameters]))

    program = TrainingProgram(model, mean_square, torch.optim.Adam(model.parameters(), 0.1), after_backward=after)
    capture_training(program, Given((X,), {}, torch.device("cpu")))
    for found in taken("work"):
        assert all(one is two for one, two in zip(found, expected, strict=True))
    assert "grad" not in vars(torch.Tensor)


def test_captures_one_after_another_beside_an_evaluation():
    torch.manual_seed(0)
    model = Recurrent().eval()
    expected, stop, found = evaluated(model), threading.Event(), []

    def evaluate():
        while not stop.is_set():
            found.append(evaluated(model))
            found.append(evaluated(copy.deepcopy(model)))

    other = threading.Thread(target=evaluate)
    other.start()
    try:
        for _ in range(3):
            captured(model)
            capture_inference(model, Given((X,), {}, torch.device("cpu")))
    finally:
        stop.set()
        other.join()
    assert len(found) > 2
    assert all(each == expected for each in found)


class Handles:
    def __init__(self, *handles):
        self.handles = handles

    def close(self):
        for handle in self.handles:
            handle.remove()


def test_a_prefetcher_draws_the_numbers_that_come_next():
    def draws():
        return torch.rand(2).tolist(), np.random.rand(), random.random(), np.random.permutation(3).tolist(), random.sample(range(9), 3)

    def seed():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    model = net()
    seed()
    found = while_captured_of(model, draws)
    seed()
    assert found == [draws() for _ in found]


def while_captured_of(model, work):
    taken("work")

    def loss(model, x):
        note("work", elsewhere(work))
        return mean_square(model, x)

    captured(model, loss)
    return taken("work")


def test_a_thread_that_seeds_has_its_numbers():
    def work():
        torch.manual_seed(7)
        return torch.rand(2).tolist()

    torch.manual_seed(7)
    expected = torch.rand(2).tolist()
    assert set(map(tuple, while_captured(work))) == {tuple(expected)}


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_the_program_are_refused_beside_those_of_others(draw):
    """Functions that were taken from their modules before the capture are not followed."""

    def loss(model, x):
        factor = elsewhere(lambda: random.random() + np.random.rand())
        return mean_square(model, x) * draw() * min(factor, 0)

    with pytest.raises(CaptureError, match=r"a Random(State)? is drawn from"):
        captured(loss=loss)


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: random.gauss(0, 1), lambda: np.random.rand()])
def test_draws_of_the_program_are_its_own_beside_those_of_others(draw):
    def loss(model, x):
        elsewhere(lambda: random.random() + np.random.rand())
        return mean_square(model, x) * draw()

    assert sum(1 for _ in captured(loss=loss)[0].outputs.draws._calls) == 1


@pytest.mark.parametrize("again", [lambda: torch.manual_seed(0), lambda: torch.default_generator.manual_seed(0), lambda: torch.seed()])
def test_a_program_that_seeds_is_refused(again):
    def loss(model, x):
        again()
        return mean_square(model, x)

    torch.manual_seed(0)
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"seed(s|ed)"):
        captured(net_as_it_is(), loss)
    assert torch.equal(torch.get_rng_state(), before)


def net_as_it_is() -> nn.Module:
    with torch.random.fork_rng([]):
        return net()


def test_a_forked_generator_that_is_drawn_from_is_refused():
    """Eager draws the same numbers again behind it."""

    def loss(model, x):
        with torch.random.fork_rng([]):
            noise = torch.rand_like(x)
        return mean_square(model, x + noise)

    with pytest.raises(CaptureError, match="seed"):
        captured(loss=loss)


def test_a_forked_generator_that_nobody_draws_from():
    def loss(model, x):
        noise = torch.rand_like(x)
        with torch.random.fork_rng([]):
            shifted = x + 1
        return mean_square(model, shifted + noise)

    captured(loss=loss)


def test_modules_are_named_by_their_own_threads_calls():
    graph = captured(net().eval(), loss_beside_another, torch.optim.SGD)[0].graph
    found = {node.source.module for node in graph.nodes if node.source is not None}
    assert found <= {"", "0", "1", "3"}


def loss_beside_another(model, x):
    gate, done = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            gate.set()
            done.wait()
            return x

    thread = threading.Thread(target=lambda: Slow()(X))
    thread.start()
    gate.wait()
    found = mean_square(model, x)
    done.set()
    thread.join()
    return found
