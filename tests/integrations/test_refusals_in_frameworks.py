"""What is refused is refused in a loop, a Trainer's `compute_loss`, Lightning's `training_step`, and its remedy trains there."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import lowtide
from bench import torchvision_shim

torchvision_shim.install()
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402

from lowtide.integrations.lightning import LowtideStrategy  # noqa: E402
from lowtide.integrations.transformers import LowtideMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|GPU|LeafSpec|isinstance|log_every_n_steps|dataloader_iter|pin_memory).*", "ignore::FutureWarning"
)
PLAIN = {"planning": lowtide.Planning(workspaces=False)}
Loss = Callable[[nn.Module, Tensor], Tensor]


class Kind(NamedTuple):
    refused: Loss
    sentence: str
    remedy: Loss


STRAY, EYE = nn.Parameter(torch.ones(())), torch.eye(2)
NOISE = torch.Generator()
MEANS = {"loss": torch.zeros(())}


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, number: float) -> None:
        self.total += number


METERS = collections.defaultdict[str, Meter](Meter, known=Meter())
GATED = torch.jit.CompilationUnit("def gated(x):\n    return x * torch.sigmoid(x)\n").gated


def averaged(net: nn.Module, x: Tensor) -> Tensor:
    loss = net(x).square().mean()
    MEANS["loss"] = MEANS["loss"] * 0.9 + loss.detach()
    return loss


def averaged_in_place(net: nn.Module, x: Tensor) -> Tensor:
    loss = net(x).square().mean()
    MEANS["loss"].mul_(0.9).add_(loss.detach())
    return loss


def metered(key: str) -> Loss:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value = net(x).square().mean()
        METERS[key].update(value.item())
        return value

    return loss


def nested(net: nn.Module, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([net(x)[:1], net(x)]).to_padded_tensor(0.0).sum()


KINDS = {
    "a branch": Kind(
        lambda net, x: net(x).mean() if net(x).sum() > 0 else -net(x).mean(),
        "control flow depends on data.*use torch.where",
        lambda net, x: torch.where(net(x).sum() > 0, net(x).mean(), -net(x).mean()),
    ),
    "a shape": Kind(
        lambda net, x: net(x)[net(x) > 0].sum(),
        "a shape depends on data.*use masks",
        lambda net, x: (net(x) * (net(x) > 0)).sum(),
    ),
    "no scalar": Kind(
        lambda net, x: net(x), r"must return a scalar.*reduce it, for instance with \.mean\(\)", lambda net, x: net(x).mean()
    ),
    "another's parameter": Kind(
        lambda net, x: (net(x) * STRAY).mean(),
        r"is not a parameter of the model.*\.detach\(\)",
        lambda net, x: (net(x) * STRAY.detach()).mean(),
    ),
    "sparse": Kind(
        lambda net, x: torch.sparse.mm(EYE.to_sparse(), net(x)).sum(),
        r"sparse.*index_put\(tuple\(indices\), values",
        lambda net, x: (torch.zeros(2, 2).index_put((torch.arange(2), torch.arange(2)), torch.ones(2)) @ net(x)).sum(),
    ),
    "nested": Kind(
        nested, "nested tensor.*pad the rows", lambda net, x: nn.utils.rnn.pad_sequence([net(x)[:1], net(x)]).sum()
    ),
    "a function that is called": Kind(
        lambda net, x: scan(lambda carry, row: (carry + row, carry + row), torch.zeros(3), net(x))[1].sum(),
        "scan at .*Python's own `if`",
        lambda net, x: net(x).cumsum(0).sum(),
    ),
    "a compiled function": Kind(
        lambda net, x: GATED(net(x)).sum(),
        "compiled by torch.jit.script.*Call the plain function",
        lambda net, x: (net(x) * torch.sigmoid(net(x))).sum(),
    ),
    "a generator": Kind(
        lambda net, x: (net(x) + torch.randn(2, 3, generator=torch.Generator())).sum(),
        "make it once, before the step",
        lambda net, x: (net(x) + torch.randn(2, 3, generator=NOISE)).sum(),
    ),
    "an average in a dictionary": Kind(averaged, r"in a dict that it changes: keep .* in place \(`mean\.mul_", averaged_in_place),
    "a missing meter": Kind(metered("new"), "defaultdict makes a Meter for the key 'new'.* by asking for that key", metered("known")),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


def in_a_loop(loss: Loss, folder: Path) -> None:
    net, x = Net(), torch.ones(2, 3)
    lowtide.optimize(net, x, loss=loss, optimizer=torch.optim.SGD(net.parameters(), 0.1), planning=lowtide.Planning(workspaces=False))(x)


def in_a_trainer(loss: Loss, folder: Path) -> None:
    class Own(LowtideMixin, transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
            return loss(model, inputs["x"])

    said = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "optim": "sgd", "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(folder), remove_unused_columns=False, disable_tqdm=True, **said)
    Own(model=Net(), args=args, train_dataset=[{"x": torch.ones(3)}] * 2, optimize=PLAIN).train()


def in_lightning(loss: Loss, folder: Path) -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    said: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(default_root_dir=folder, max_steps=1, strategy=LowtideStrategy(optimize=PLAIN), accelerator="cpu", **said)
    trainer.fit(Own(), torch.utils.data.DataLoader([torch.ones(2, 3)], batch_size=None))


PLACES = {"a loop": in_a_loop, "compute_loss": in_a_trainer, "training_step": in_lightning}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_its_remedy_trains_where_the_user_is(kind: str, place: str, tmp_path: Path) -> None:
    if (kind, place) == ("an average in a dictionary", "a loop"):  # where it goes on from step to step
        PLACES[place](KINDS[kind].refused, tmp_path)
        return
    with pytest.raises(lowtide.CaptureError, match=KINDS[kind].sentence) as told:
        PLACES[place](KINDS[kind].refused, tmp_path)
    if "loss()" in str(told.value) and place != "a loop":
        assert f"loss() is {place} here" in str(told.value)
    PLACES[place](KINDS[kind].remedy, tmp_path)


@pytest.mark.parametrize("place", ["compute_loss", "training_step"])
def test_an_argument_of_a_loop_is_said_to_be_one(place: str, tmp_path: Path) -> None:
    def hooked(net: nn.Module, x: Tensor) -> Tensor:
        net.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[union-attr]
        return net(x).sum()

    with pytest.raises(lowtide.CaptureError, match=r"after_backward=\.\.\.\) is for lowtide\.optimize in a loop of your own"):
        PLACES[place](hooked, tmp_path)
