"""An inference function that has its weights as they are now, and needs the model no more: what people deploy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lowtide.api.running.inference import Inference, Runs
from lowtide.cpu.build.executable import LoadedNetwork
from lowtide.errors import BatchError
from lowtide.runtime.batch import BatchSpec, NewShapeError
from lowtide.runtime.dynamo_skips import undisturbed
from lowtide.runtime.heap import give_back


class Frozen:
    """Call it as the step that it was made from: `fn(*batch)`. It holds generated kernels and packed weights.

    Changes to the model's weights do not reach it. The exception is weights that torch's operators read between kernels: those are the
    model's own. If nobody else holds the model, its memory is free. The first call returns that memory to the system.
    """

    def __init__(self, runs: Runs, batch: BatchSpec, inputs: Sequence[Any], networks: Mapping[str, LoadedNetwork]) -> None:
        self._batch, self._networks = batch, networks
        self._specs = batch.specs
        self._inference = Inference.of(runs, networks)
        self._kept = self._inference.kept(inputs)
        self._run: Callable[[Sequence[Any]], Any] = self._first

    @property
    def held_bytes(self) -> int:
        """What it holds from call to call for generated kernels: weights as they read them, and arenas."""
        return sum(network.nbytes for network in self._networks.values())

    @undisturbed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result. Raises BatchError for a batch unlike the step's, of another shape, too."""
        if self._specs is not None and self._specs.hold(args, kwargs):
            return self._run(args)
        return self._run(self._leaves(args, kwargs))

    def _first(self, leaves: Sequence[Any]) -> Any:
        """The first call's result. What it took to come here is gone by then, perhaps the model, too: its memory becomes the system's."""
        self._run = partial(self._inference, self._kept)
        give_back()
        return self._run(leaves)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        try:
            return self._batch.leaves_of(args, kwargs)
        except NewShapeError as error:  # whose advice is for steps, which may be captured anew
            raise BatchError(f"{error.difference}: a frozen function is for one shape; make another with `fn.frozen(*batch)`") from None

    def __repr__(self) -> str:
        return f"Frozen({len(self._networks)} generated networks, {self.held_bytes / 2**20:.1f} MiB)"
