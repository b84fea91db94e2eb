"""Recurrent layers of cuDNN with dropout, as operators that leave their random state with ATen.

ATen makes that state, one for a device, of a number of the default generator's when the first such layer runs, and anew after the generator
was seeded or its state was put back. It hands it to `_cudnn_rnn`, which moves it on, and keeps other streams from it meanwhile. So these
operators take what ATen's take, a state left out, and have ATen run them where it would: within a layer that one of their numbers makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.kernels.library import LIBRARY, define

_ATEN = torch.ops.aten


_OF_ATEN: dict[torch.device, torch.Tensor] = {}  # states that layers have used: their gradients are told which, and draw nothing
_states: ContextVar[dict[torch.device, torch.Tensor]] = ContextVar("states", default=_OF_ATEN)


def cudnn_rnn(*args: Any) -> Any:
    """The layers, with the state that ATen has for them now."""
    states, device, dropout = _states.get(), args[0].device, args[11]

    def run(given: tuple[Any, ...]) -> Any:
        states[device] = given[15]
        return _ATEN._cudnn_rnn.default(*args[:15], given[15])

    if states is not _OF_ATEN:
        if device not in states:
            states[device] = _ATEN._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=device)
        return run((*args[:15], states[device]))
    one = args[4].view(-1)[:1].view(1, 1, 1)
    with torch.no_grad(), InPlaceOfLayers(run) as layer:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd  # beneath autograd a mode is handed layers whole
        _ATEN.rnn_tanh.input._op_dk(composite, one, one, [one[0], one[0]], False, 1, dropout, True, False, False)
    assert layer.out is not None, "whether cuDNN is switched on is compared before"
    return layer.out


def cudnn_rnn_backward(*args: Any) -> Any:
    """Their gradient. Raises RuntimeError where they have not run, as where `verify` computes in double what follows them."""
    if (state := _states.get().get(args[0].device)) is None:
        raise RuntimeError("what recurrent layers of cuDNN with dropout keep for their gradient is of their own precision")
    return _ATEN._cudnn_rnn_backward.default(*args[:19], state, *args[20:])


class InPlaceOfLayers(TorchDispatchMode):
    """Calls `run` with what ATen hands to recurrent layers of cuDNN, in their place."""

    def __init__(self, run: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.out = run, None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not _ATEN._cudnn_rnn.default:
            return func(*args, **(kwargs or {}))
        self.out = self.run(args)
        return (args[0], args[4], *[args[0].view(-1)[:0]] * 3)  # whose cells, reserve and weights nobody reads


for _kernel in (cudnn_rnn, cudnn_rnn_backward):
    define(str(getattr(_ATEN, f"_{_kernel.__name__}").default._schema).removeprefix("aten::_"), _kernel)
torch.library.register_fake("lowtide::cudnn_rnn", _ATEN._cudnn_rnn.default, lib=LIBRARY)


@contextmanager
def draws_apart(devices: Iterable[str]) -> Iterator[None]:
    """What is drawn inside is drawn nowhere else: generators go on as if it had not been, and cuDNN has states of this time alone.

    On a GPU a generator is given another state in the place of its own, as CUDA graphs do: where one is put back, as by `fork_rng`, ATen
    makes cuDNN's state anew, and the caller's layers drop something else from then on.
    """
    on_gpu = [torch.device(each) for each in devices if each.startswith("cuda")]
    if on_gpu:
        torch.cuda.init()
    generators = [torch.cuda.default_generators[torch.cuda.current_device() if each.index is None else each.index] for each in on_gpu]
    before, token = [each.graphsafe_get_state() for each in generators], _states.set({})
    try:
        for generator, state in zip(generators, before, strict=True):
            generator.graphsafe_set_state(state.clone_state())
        with torch.random.fork_rng([]):
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.graphsafe_set_state(state)
        _states.reset(token)
