"""Model and optimizer as a checkpoint of torch.distributed.checkpoint: all ranks write what they hold, as many as come read.

Optimizer state lies flat in it, as long as its parameter has elements: what was saved in shards of one number is loaded into shards of
another, or as a whole. Numbers of the optimizer's are tensors there, and the settings of its groups text: nothing but bytes is read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowtide.base.skeleton import leaves
from lowtide.errors import FormatError, StepError
from lowtide.runtime.ranks import Peers, SinglePeer

_GROUPS = "optimizer_groups"
_NUMBERS = frozenset({"step", "mu_product", "mu", "eta"})  # of torch's optimizers: numbers also where the parameter has no dimension


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    peers: SinglePeer
    in_shards: bool  # the optimizer's state is

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; all ranks come here."""
        tensors = {**self._own_of_model(), **{key: self._saved(key, item, of) for key, item, of in self._state()}}
        with _alone_without_warning():
            save({**tensors, **self._groups()}, checkpoint_id=path, **self._how())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a checkpoint into the very tensors that are there. Raises FormatError where it is not one of this model and optimizer."""
        there = FileSystemReader(path).read_metadata().state_dict_metadata
        self._make_state(there)
        flat = {key: (item, self._saved(key, item, of)) for key, item, of in self._state()}
        wanted = {**self._of_model(), **{key: saved for key, (_, saved) in flat.items()}}
        if missing := sorted(wanted.keys() - there.keys()):
            raise FormatError(f"{path}: expected a checkpoint of this model and optimizer; it has no {missing[0]}")
        for key in self._groups():
            wanted[key] = torch.empty(_size_of(there, key, path), dtype=torch.uint8)
        with _alone_without_warning():
            load(wanted, checkpoint_id=path, **self._how())
        for key, (item, saved) in flat.items():
            self._put_back(key, item, saved)
        if _GROUPS in wanted:
            self._set_groups(json.loads(bytes(wanted[_GROUPS].tolist())))

    def _how(self) -> dict[str, Any]:
        return {"process_group": self.peers.group} if isinstance(self.peers, Peers) else {"no_dist": True}

    def _of_model(self) -> dict[str, torch.Tensor]:
        return {f"model.{name}": item for name, item in self.model.state_dict().items() if isinstance(item, torch.Tensor)}

    def _own_of_model(self) -> dict[str, torch.Tensor]:
        """What this rank writes of it: buffers are rank 0's, as they are at the start of each step."""
        trained = {f"model.{name}" for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {key: item for key, item in self._of_model().items() if self.peers.leads or key in trained}

    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def _state(self) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """The optimizer's state by parameter and key, and the parameter; no flags."""
        if self.optimizer is None:
            return
        names = self._names()
        for parameter, entries in self.optimizer.state.items():
            if isinstance(parameter, str) or any(len(path) > 1 for path, _ in leaves(entries)):
                raise StepError(
                    f"{type(self.optimizer).__name__} keeps state in lists, dictionaries or for no parameter, which this "
                    "checkpoint does not hold: save what optimizer.state_dict() gives"
                )
            for key, item in entries.items():
                if isinstance(item, (torch.Tensor, int, float)) and not isinstance(item, bool):
                    yield f"optimizer.{names[parameter]}.{key}", item, parameter

    def _saved(self, key: str, item: Any, parameter: torch.Tensor) -> torch.Tensor:
        """An entry as a checkpoint has it, in its own memory where that can be."""
        if not isinstance(item, torch.Tensor):
            return torch.tensor(item, dtype=torch.float64 if isinstance(item, float) else torch.int64)
        if not item.dim() and (parameter.dim() or key.rpartition(".")[2] in _NUMBERS):
            return item
        if not item.dim() or not self.in_shards or not isinstance(self.peers, Peers):
            return item.reshape(-1)
        numel = parameter.numel()
        mesh = DeviceMesh.from_group(self.peers.main, item.device.type)
        mine = item[: max(0, min(len(item), numel - self.peers.main.rank() * len(item)))]
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,))

    def _put_back(self, key: str, item: Any, saved: torch.Tensor) -> None:
        if not isinstance(item, torch.Tensor):
            parameter, _, entry = key.removeprefix("optimizer.").rpartition(".")
            position = next(each for each, name in self._names().items() if name == parameter)
            self.optimizer.state[position][entry] = type(item)(saved.item())  # type: ignore[union-attr]
        elif not isinstance(saved, DTensor) and saved.data_ptr() != item.data_ptr():
            item.copy_(saved.view(item.shape))

    def _make_state(self, there: Mapping[str, Any]) -> None:
        """State that a checkpoint has and the optimizer has not yet: made like what will be read."""
        if self.optimizer is None:
            return
        for parameter, name in self._names().items():
            prefix = f"optimizer.{name}."
            for key in [each for each in there if each.startswith(prefix) and "." not in each[len(prefix) :]]:
                entries = self.optimizer.state[parameter]
                if key[len(prefix) :] not in entries:
                    entries[key[len(prefix) :]] = self._like(parameter, there[key])

    def _like(self, parameter: torch.Tensor, there: TensorStorageMetadata) -> Any:
        dtype = there.properties.dtype
        if not there.size:
            return torch.zeros((), dtype=dtype)
        if self.in_shards and isinstance(self.peers, Peers):
            return parameter.new_zeros(-(-parameter.numel() // self.peers.main.size()), dtype=dtype)
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def _groups(self) -> dict[str, torch.Tensor]:
        if self.optimizer is None:
            return {}
        text = json.dumps([{key: _plain(item) for key, item in group.items() if key != "params"} for group in self.optimizer.param_groups])
        return {_GROUPS: torch.tensor(list(text.encode()), dtype=torch.uint8)}

    def _set_groups(self, groups: list[dict[str, Any]]) -> None:
        assert self.optimizer is not None, "only its groups are asked for"
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, item in saved.items():
                setting = group.get(key)
                if isinstance(setting, torch.Tensor):
                    setting.fill_(item)
                elif item is not None:
                    group[key] = tuple(item) if isinstance(setting, tuple) else item


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _plain(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.item()
    return list(item) if isinstance(item, tuple) else item if isinstance(item, (int, float, str, bool, list, type(None))) else None


def _size_of(there: Mapping[str, Any], key: str, path: Any) -> torch.Size:
    if key not in there:
        raise FormatError(f"{path}: expected a checkpoint of a step that trains; it has no settings of an optimizer")
    size: torch.Size = there[key].size
    return size
