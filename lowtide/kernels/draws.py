"""What is drawn apart from the program: random states that go on as if it had not been.

Neither numba nor sympy is imported here: processes that try operators start sooner without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

OF_ATEN: dict[torch.device, torch.Tensor] = {}  # cuDNN's states that layers have used: gradients are told which, and draw nothing
STATES: ContextVar[dict[torch.device, torch.Tensor]] = ContextVar("states", default=OF_ATEN)


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
    before, token = [each.graphsafe_get_state() for each in generators], STATES.set({})
    try:
        for generator, state in zip(generators, before, strict=True):
            generator.graphsafe_set_state(state.clone_state())
        with torch.random.fork_rng([]):
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.graphsafe_set_state(state)
        STATES.reset(token)
