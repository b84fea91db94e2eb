"""What cannot be captured is refused: the message says what, where and what to do, and nothing is touched."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.training import Settings as Plain
from tests.training import Snapshot, eager_step

HERE = r"test_refusals\.py:\d+"
WHERE = rf"\S*{HERE}"


class Net(nn.Module):
    """Something with everything a failure could leave changed: statistics, hooks, lists, optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(9, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.recurrent = nn.GRU(4, 4)
        self.calls, self.log, self.cache = 0, [0], {}
        self.last: Tensor | None = None
        self.linear.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.recurrent(x)[0]))


def refused(
    loss: Callable[..., Any], message: str, *, optimizer: Any = optim.AdamW, error: type = lowtide.CaptureError, **arguments: Any
) -> None:
    """`optimize` raises this error, before and after training has begun, and leaves everything as it was."""
    torch.manual_seed(0)
    model = Net()
    made = optimizer(model.parameters(), lr=0.1)
    batch = arguments.pop("batch", (torch.randn(6, 4),))
    for _ in range(2):
        before = Snapshot.of(model, made)
        with pytest.raises(error, match=message):
            lowtide.optimize(model, batch, loss=loss, optimizer=made, workspaces=False, **arguments)
        before.assert_same(model, made)
        if isinstance(made, (optim.LBFGS, optim.SparseAdam)):
            return
        eager_step(model, lambda model, x: model(x).square().sum(), made, (torch.randn(6, 4),), {}, Plain())


def branching(model: Net, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    return loss if loss > 0 else -loss


def reading(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() * model.linear.weight.max().item()


def listing(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() * model(x)[0].tolist()[1]


def drawing(model: Net, x: Tensor) -> Tensor:
    return model(x).sum() if torch.rand(()) > 0.5 else -model(x).sum()


def counting(model: Net, x: Tensor) -> Tensor:
    model(x)
    return model(x).sum() / model.norm.num_batches_tracked.item()


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
        (drawing, rf"depends on data: .*{HERE}.*a random draw \(aten\.rand\.default"),
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


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), r"must return a scalar; it returned a tensor of shape \(6, 4\).*\.mean\(\)"),
        (lambda model, x: None, r"must return a scalar tensor, .*returned a NoneType"),
        (lambda model, x: {"value": model(x).sum()}, "returned a dict"),
        (lambda model, x: model(x).sum().item, "returned a builtin"),
        (lambda model, x: model(x).sum().detach(), r"loss \(float32\) does not depend on any parameter"),
        (lambda model, x: x.sum(), "does not depend on any parameter"),
    ],
)
def test_losses_that_are_none(loss, message):
    refused(loss, message)


def drawing(draw: Callable[[], float]) -> Callable[..., Tensor]:
    return lambda model, x: model(x).sum() * draw()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (random.random, "draws from random: .*repeat the same choice"),
        (np.random.rand, r"draws from numpy\.random"),
        (lambda: torch.manual_seed(0) and 1.0, "seeds torch's generator"),
        (lambda: torch.rand((), generator=torch.Generator()), "aten.rand.generator .*Generator"),
    ],
)
def test_randomness_that_no_graph_can_follow(draw, message):
    refused(drawing(draw), message)


def counting(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    return model(x).sum()


def logging(model: Net, x: Tensor) -> Tensor:
    model.log[0] += 1
    return model(x).sum()


def gathering(model: Net, x: Tensor) -> Tensor:
    y = model(x)
    model.log.append(y)
    return y.sum()


def caching(model: Net, x: Tensor) -> Tensor:
    model.cache["y"] = y = model(x)
    return y.sum()


@pytest.mark.parametrize(("loss", "name"), [(counting, "calls"), (logging, "log"), (gathering, "log"), (caching, "cache")])
def test_a_module_that_counts_in_python(loss, name):
    refused(loss, f"module 'Net' changes its attribute '{name}' in its forward.*buffer")


def test_checkpointed_dropout():
    def loss(model, x):
        return checkpoint(lambda x: functional.dropout(model(x)), x, use_reentrant=False).square().sum()

    refused(loss, r"aten\.bernoulli.* draws random numbers in the backward pass.*Remove the checkpointing")


def test_sparse_gradients():
    tokens = torch.randint(0, 9, (6,))
    refused(lambda model, x: functional.embedding(tokens, model.embedding.weight, sparse=True).sum(), "sparse")


def test_a_tensor_that_should_be_a_parameter():
    outside = torch.ones(4, requires_grad=True)
    refused(lambda model, x: (model(x) * outside).sum(), rf"shape \(4,\) that requires gradients, used at .*{HERE}.*is not a parameter")


def test_whatever_the_program_raises_is_told_with_operator_and_line():
    def failing(model, x):
        return model(x)[:, :3] @ x

    refused(failing, rf"loss\(model, \.\.\.\) failed in operator aten\.mm\.default at {WHERE}, which raised RuntimeError: .*reduction dim")

    def raising(model, x):
        model(x)
        raise KeyError("mine")

    refused(raising, rf"loss\(model, \.\.\.\) raised KeyError: 'mine', at {WHERE}; where plain PyTorch raises this too")
    refused(lambda model, x: functional.linear(model(x), x.numpy()), rf"raised \w+: .*, at {WHERE}")


def test_a_loss_that_does_not_take_the_batch():
    refused(lambda model, x, y: model(x), r"raised TypeError: .*missing 1 required positional argument: 'y'")


def test_an_error_in_a_librarys_line_names_the_users_too():
    def failing(model, x):
        raise_within_numpy = np.zeros((2, 2)).reshape
        return model(x).sum() * raise_within_numpy(3, x=4)

    refused(failing, rf"raised TypeError: .*, at {WHERE}")


def test_errors_in_the_backward_pass_and_in_the_hook_on_gradients():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("in backward")

    refused(lambda model, x: Fails.apply(model(x)).sum(), rf"the backward pass raised ZeroDivisionError: in backward, at {WHERE}")

    def hook(model: nn.Module) -> None:
        raise LookupError("in the hook")

    refused(square, rf"after_backward\(model\) raised LookupError: in the hook, at {WHERE}", after_backward=hook)


def test_a_refusal_that_the_program_catches_is_one_all_the_same():
    def careful(model, x):
        y = model(x)
        try:
            scale = x.max().item() * y.max().item()
        except Exception:
            scale = 1.0  # the way that eager never takes
        return y.sum() * scale

    refused(careful, "control flow depends on data")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optim.LBFGS, "LBFGS evaluates the model several times a step.*first-order"),
        (optim.SparseAdam, "SparseAdam works on sparse gradients.*Adam"),
    ],
)
def test_optimizers_that_cannot_be_captured(optimizer, message):
    refused(lambda model, x: model(x).square().sum(), message, optimizer=optimizer)


class Own(optim.Optimizer):
    """SGD whose step size is a function of its learning rate."""

    def __init__(self, parameters: Any, lr: float, rule: Callable[[float], Any]) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * self.rule(group["lr"]))


@pytest.mark.parametrize("rule", [math.sqrt, math.exp, lambda lr: float.__add__(lr, 1.0)], ids=range(3))
def test_a_hyper_parameter_that_escapes(rule):
    refused(
        lambda model, x: model(x).sum(),
        "Own turns a hyper-parameter into a constant .*cannot be captured",
        optimizer=lambda parameters, lr: Own(parameters, lr, rule),
    )


@pytest.mark.parametrize(
    "rule",
    [
        lambda lr: lr**2 / 3 - 1 // (1 + lr),
        lambda lr: 0.5**lr % 0.3,
        lambda lr: -abs(-lr) if lr > 0.15 else +lr,
        lambda lr: float(lr) + int(10 * lr) + round(lr, 1),
        lambda lr: math.floor(10 * lr) + math.ceil(10 * lr) + math.trunc(10 * lr) + divmod(10 * lr, 3)[0] + divmod(7, lr)[1],
        lambda lr: float(f"{lr:.3f}") + max(lr, 0.15) + len(range(int(lr * 20))),
        lambda lr: torch.full((), lr),
        lambda lr: torch.tensor(lr).sqrt() + torch.as_tensor(lr, dtype=torch.float64),
        lambda lr: math.sqrt(lr) + math.pow(2, lr) - math.log(lr, 3) * math.exp(-lr),
        lambda lr: max(lr, 0.25) + min([lr, 0.25, 0.5]) + max(lr * 2, 3 * lr**2, key=lambda number: -number),
        lambda lr: float(np.sqrt(lr)),
    ],
    ids=range(11),
)
def test_arithmetic_on_hyper_parameters_follows_their_changes(rule):
    def run(optimized: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = Own(model.parameters(), 0.1, rule)
        step = lowtide.optimize(model, torch.ones(2, 3), loss=square, optimizer=optimizer, workspaces=False) if optimized else None
        for lr in (0.1, 0.2, 0.27, 0.5):
            optimizer.param_groups[0]["lr"] = lr
            step(torch.ones(2, 3)) if step else eager_step(model, square, optimizer, (torch.ones(2, 3),), {}, Plain())
        return [parameter.detach() for parameter in model.parameters()]

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    "rule",
    [
        lambda lr, weight: 1.0 if weight.norm() > 0.5 else 2.0,
        lambda lr, weight: max(lr, weight.norm()),
        lambda lr, weight: 1.0 if weight.norm().item() > 0.5 else 2.0,
        lambda lr, weight: 1.0 if torch.is_nonzero(weight.sum()) else 2.0,
        lambda lr, weight: [1.0, 2.0][int(weight.norm() > 0.5)],
        lambda lr, weight: float(weight.norm()),
    ],
    ids=range(6),
)
def test_optimizers_that_decide_on_parameters(rule):
    class Decides(Own):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in (each for each in group["params"] if each.grad is not None):
                    parameter.sub_(parameter.grad * rule(group["lr"], parameter))

    refused(
        lambda model, x: model(x).sum(), "control flow depends on data|a number read from a tensor leaves the traced arithmetic",
        optimizer=lambda parameters, lr: Decides(parameters, lr, abs),
    )  # fmt: skip


def test_an_optimizer_that_counts_beside_its_state():
    class Counts(Own):
        def step(self) -> None:
            self.count = getattr(self, "count", 0) + 1
            super().step()

    refused(
        lambda model, x: model(x).sum(), "the optimizer's step changes its attribute 'count'.*`state`",
        optimizer=lambda parameters, lr: Counts(parameters, lr, abs),
    )  # fmt: skip


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def test_hooks_after_accumulation():
    model = Net()
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(lowtide.CaptureError, match=r"linear\.weight has a hook that runs after its gradient.*after_backward"):
        lowtide.optimize(model, torch.ones(6, 4), loss=square, optimizer=optim.SGD(model.parameters(), 0.1))


def test_a_parameter_that_is_not_the_models():
    def foreign(parameters, lr):
        return optim.SGD([{"params": parameters}, {"params": [nn.Parameter(torch.ones(2, 3))]}], lr)

    refused(
        lambda model, x: model(x).sum(),
        r"parameter 0 of SGD's group 1, of shape \(2, 3\), is not a parameter of the model",
        optimizer=foreign,
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(6, 4, requires_grad=True), r"batch.* requires gradients.*detached"),
        (torch.ones(6, 4).to_sparse(), r"batch.* has layout torch\.sparse_coo"),
    ],
)
def test_batches_that_cannot_be_captured(batch, message):
    refused(lambda model, x: model(x).sum(), message, batch=(batch,))


def test_micro_batches_that_do_not_divide_the_batch():
    refused(
        lambda model, x: model(x).sum(), r"batch\[0\]\[0\] has 6 rows, which 4 micro-batches cannot share equally|batch 0 has 6 rows",
        accumulate=4, error=lowtide.BatchError,
    )  # fmt: skip


def test_micro_batches_with_more_results_than_the_loss():
    refused(lambda model, x: (model(x).sum(), x), r"accumulate > 1, loss\(\) must return the loss alone", accumulate=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": square}, TypeError, "optimizer: a training step needs both"),
        ({"after_backward": print}, TypeError, "belong to training"),
        ({"accumulate": 0, "loss": square, "optimizer": optim.SGD([torch.ones(1)], 0.1)}, ValueError, "accumulate: expected a positive"),
        ({"optimizer": 3, "loss": square}, TypeError, "optimizer: expected a torch.optim.Optimizer, got a int"),
        ({"device": "cuda"}, ValueError, "device: the model lies on cpu"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, error, message):
    with pytest.raises(error, match=message):
        lowtide.optimize(nn.Linear(4, 4), torch.ones(6, 4), **arguments)


def test_a_model_on_the_meta_device_is_planned_and_not_run():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    step = lowtide.optimize(model, torch.ones(6, 4), loss=square, optimizer=optim.Adam(model.parameters()))
    assert step.plan.peak_bytes > step.plan.resident_bytes > 0
    with pytest.raises(lowtide.StepError, match=r"meta device: .*to_empty"):
        step(torch.ones(6, 4))


def test_lazy_conjugates_within_a_program_are_eagers():
    def product(x: Tensor) -> Tensor:
        return torch.view_as_real((torch.complex(x, x).conj() * torch.complex(x, 2 * x)).resolve_conj())

    x = torch.rand(2)
    assert torch.equal(lowtide.optimize(Function(product), x, workspaces=False)(x), product(x))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *batch: Any) -> Any:
        return self.function(*batch)


def test_a_plan_for_another_machine_is_not_run():
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    step = lowtide.optimize(model, (x,), simulate="a100")
    assert step.plan.provenance.device == "a100"
    with pytest.raises(lowtide.StepError, match=r"for another machine.*without `simulate`"):
        step(x)
    with pytest.raises(ValueError, match="expected one of cpu, rtx3090, a100, h100, h200, got 'abacus'"):
        lowtide.optimize(model, (x,), simulate="abacus")


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


def test_forked_generators_that_nobody_seeds_are_eagers():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                return x + torch.zeros_like(x)

    assert torch.equal(lowtide.optimize(Noisy(), torch.ones(2), workspaces=False)(torch.ones(2)), torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda x: x.to_sparse_csr(), r"batch.* has layout torch\.sparse_csr: dense tensors.*padded"),
        (lambda x: torch.nested.nested_tensor([x, x]), "batch.* is a nested tensor: dense tensors"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "batch.* is a nested tensor: dense tensors"),
    ],
    ids=["csr", "nested", "jagged"],
)
def test_tensors_that_are_not_dense(batch, message):
    refused(square, message, batch=(batch(torch.ones(6, 4)),))


def test_sections_that_a_tensor_gives():
    """A tensor of the program's own says where to cut, as in eager; one that depends on activations is refused."""
    x = torch.arange(24.0).reshape(6, 4)
    cut = lowtide.optimize(Function(lambda x: torch.tensor_split(x * 2, torch.tensor([2, 3]))[1]), x, workspaces=False)
    assert torch.equal(cut(x), (x * 2)[2:3])
    refused(lambda model, x: torch.tensor_split(model(x), model(x)[0].argsort()[:1])[0].sum(), rf"at {WHERE}")


def test_a_conversion_that_changes_something():
    refused(
        lambda model, x: square(model.double(), x.double()), rf"weight of a \w+ is converted while the program runs, at {WHERE}.*before"
    )


def test_conversions_that_change_nothing():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.inner = self.inner.to(x.dtype)
            return self.inner.to("cpu").float()(x)[0].sum()

    def run(optimized: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Careful(), torch.randn(4, 3)
        optimizer = optim.SGD(model.parameters(), 0.1)
        step = lowtide.optimize(model, x, loss=Careful.__call__, optimizer=optimizer, workspaces=False) if optimized else None
        for _ in range(2):
            step(x) if step else eager_step(model, Careful.__call__, optimizer, (x,), {}, Plain())
        return [parameter.detach() for parameter in model.parameters()]

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection():
    with torch.autograd.detect_anomaly():
        refused(square, "anomaly detection is on, which looks at the values of all gradients")


def test_a_lazy_conjugate_in_the_batch():
    x = torch.complex(torch.ones(6, 4), torch.ones(6, 4))
    refused(lambda model, x: model(x.abs()).sum(), r"batch.* is a lazy conjugate.*resolve_conj\(\)", batch=(x.conj(),))
    step = lowtide.optimize(Function(lambda x: x * 2), x, workspaces=False)
    with pytest.raises(lowtide.BatchError, match=r"batch \[0\]: expected complex64.*got a lazy conjugate.*resolve_conj\(\)"):
        step(x.conj())
