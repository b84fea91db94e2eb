"""Hooks on tensors, parameters and modules: what they do to tensors is part of the graph, what they do beside it would be done but once.

A hook that gives nothing back, writes no tensor and puts none into a module can only have done something that no graph holds: counted,
printed, kept. It is refused. Hooks of torch's own files are let through, and those on a module's forward that a library has put there;
torch's own around all modules do not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lowtide.capture.draft import Draft
from lowtide.capture.fakes import FakeModel, ModuleTensors
from lowtide.capture.sources import is_torchs, is_users, users_line
from lowtide.errors import CaptureError
from lowtide.ir import tree

Hook = Callable[..., Any]
_OF_FORWARD, _OF_BACKWARD = ("_forward_pre_hooks", "_forward_hooks"), ("_backward_pre_hooks", "_backward_hooks")


@contextmanager
def without_trackers() -> Iterator[None]:
    """Without torch's own hooks around all modules: those of `torch.utils.module_tracker`, which hold on to graphs of autograd."""
    tables = [table for table, _ in _around_all()]
    before = [(table, dict(table)) for table in tables]
    for table, hooks in before:
        for key in [key for key, hook in hooks.items() if is_torchs(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def _around_all() -> list[tuple[dict[int, Hook], str]]:
    """The tables of hooks that run around every module."""
    return [(vars(torch_module)[f"_global{name}"], name) for name in (*_OF_FORWARD, *_OF_BACKWARD)]


@contextmanager
def watched_hooks(model: nn.Module, fakes: FakeModel, draft: Draft, module_tensors: ModuleTensors) -> Iterator[None]:
    """Hooks of parameters run for their fakes; all hooks are watched. The tables of modules and of torch are as before afterwards."""
    watch = _Watch(draft, module_tensors)
    names = (*_OF_FORWARD, *_OF_BACKWARD)
    tables = [*((module.__dict__[name], name) for module in model.modules() for name in names), *_around_all()]
    before = [(table, dict(table)) for table, _ in tables if table]
    _follow(fakes, watch)
    try:
        for table, name in tables:
            _watch_table(table, name, watch)
        with _watched_registrations(watch):
            yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


class _Watch:
    """Runs hooks and refuses those whose effect is not to be seen."""

    def __init__(self, draft: Draft, module_tensors: ModuleTensors) -> None:
        self.draft, self.module_tensors = draft, module_tensors

    def of(self, hook: Hook, what: str) -> Hook:
        """The hook, watched; `what` it is a hook on."""
        if is_torchs(hook):
            return hook

        @functools.wraps(hook, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            held = _tensors_in(args, kwargs)  # until the hook is done, so that no other gets the id of one
            before = self._seen(held)
            given = hook(*args, **kwargs)
            if given is None and self._seen(_tensors_in(args, kwargs)) == before:
                raise CaptureError(
                    f"the hook {_text(hook)} on {what} returns nothing and writes no tensor: what it does instead (to count, print or keep "
                    "something) would be done once, while the step is captured, and never again; take the hook off, and return what you "
                    "want to see from loss() or after_backward()"
                )
            return given

        return watched

    def _seen(self, given: list[torch.Tensor]) -> tuple[Any, ...]:
        """What a graph knows of: the tensors that a hook is given with their versions, the writes, the tensors put into modules."""
        writes = sum(bool(node.writes) for node in self.draft.nodes)
        return [(id(each), each._version) for each in given], writes, [(slot, id(tensor)) for slot, tensor in self.module_tensors.rebound()]


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a hook is given, also within dictionaries and other structures."""
    return [leaf.value for leaf in tree.flatten((args, kwargs))[0] if isinstance(leaf.value, torch.Tensor)]


def _follow(fakes: FakeModel, watch: _Watch) -> None:
    for real, fake in fakes.parameters.items():
        if fake.requires_grad:
            for hook in (real._backward_hooks or {}).values():
                fake.register_hook(watch.of(hook, f"the gradient of {fakes.names[real]}"))


def _watch_table(table: dict[int, Hook], name: str, watch: _Watch) -> None:
    for key, hook in table.items():
        if name in _OF_BACKWARD or is_users(hook):
            table[key] = watch.of(hook, "a module's backward pass" if name in _OF_BACKWARD else "a module's forward")


@contextmanager
def _watched_registrations(watch: _Watch) -> Iterator[None]:
    """Hooks that the program itself registers on tensors, while it runs, are watched too."""
    register, refused = torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook

    def watched(tensor: torch.Tensor, hook: Hook) -> Any:
        return register(tensor, watch.of(hook, "a tensor's gradient"))  # type: ignore[no-untyped-call]

    def refuse(tensor: torch.Tensor, hook: Hook) -> Any:
        raise CaptureError(
            f"the program registers a hook that runs after a gradient is accumulated, at {users_line()}, which a captured step would "
            "not run: use after_backward"
        )

    torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook = watched, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook = register, refused  # type: ignore[method-assign]


def _text(hook: Hook) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name!r}" if code is None else f"{name!r} ({code.co_filename}:{code.co_firstlineno})"
