"""An inference function that has its weights as they are now, and needs the model no more: what people deploy; and how its calls run.

Calls of a program that leaves nothing but its result, on what an earlier call found: only the batch is another.

A small network cannot wait for all that a call looks up otherwise. While the caller's objects are the same as in the last call, the inputs
from there are right again, and regions of generated kernels need not be given their constants: their networks remember them.
A frozen function runs this way alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn

import torch

from lowtide.cpu.executable import LoadedNetwork, UnlikeConstantsError
from lowtide.errors import BatchError, StepError
from lowtide.ir.bodies import is_region
from lowtide.ir.graph import Graph, Slot
from lowtide.lower.python import lower, without_constants
from lowtide.plan.contents import Decision
from lowtide.runtime.batch import BatchSpec, NewShapeError, TensorSpecs, refuse_surroundings
from lowtide.runtime.caller import ChangedError, InputCheck
from lowtide.runtime.premises import Premises
from lowtide.runtime.program import Program, undisturbed

UNLIKE = object()  # a call's answer where it has to go the long way, and nothing ran
Network = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Inference:
    """A program on the inputs of an earlier call, of which the batch is replaced."""

    program: Program
    result: Callable[[Sequence[Any]], Any]
    given: tuple[int, ...]  # which of the graph's inputs it takes
    places: tuple[tuple[int, int], ...]  # which of those are of the batch: (input, leaf)
    check: InputCheck  # of those
    alone: tuple[Network, tuple[int, ...]] | None = None  # where it is one network that reads the batch alone: that, and which leaves

    @classmethod
    def of(
        cls, decision: Decision, program: Program, slots: Sequence[Slot], result: Callable[[Sequence[Any]], Any],
        networks: Mapping[str, Network],
    ) -> Inference:  # fmt: skip
        """Of a program whose regions these networks run, which have their constants; without any, of the program as it is.

        `slots` are of its inputs, `result` is what it returns, of its outputs.
        """
        if not networks:
            given = tuple(range(len(slots)))
            return cls(program, result, given, _batch_places(slots), InputCheck.of(decision.graph, slots))
        short, given = without_constants(decision)
        slots = tuple(slots[at] for at in given)
        places = _batch_places(slots)
        leaves = _leaves_of_only_region(short.graph, dict(places))
        alone = None if leaves is None else (networks[short.graph.nodes[0].results[0].name], leaves)
        program = replace(program, source=lower(short), regions=networks)
        return cls(program, result, given, places, InputCheck.of(short.graph, slots), alone)

    def kept(self, inputs: Sequence[Any]) -> list[Any]:
        """What it takes of a call's inputs; the batch is not kept."""
        kept = [inputs[at] for at in self.given]
        for at, _ in self.places:
            kept[at] = None
        return kept

    def filled(self, kept: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        inputs = [*kept]
        for at, leaf in self.places:
            inputs[at] = leaves[leaf]
        return inputs

    def __call__(self, kept: Sequence[Any], leaves: Sequence[Any]) -> Any:
        if self.alone is None:
            return self.result(self.program(self.filled(kept, leaves)))
        network, which = self.alone
        return self.result(network(*[leaves[at] for at in which]))


class RepeatedCalls:
    """Calls like the last one: on tensors that look alike, while all that the program takes for granted lies where it lay."""

    def __init__(self, inference: Inference, premises: Premises, specs: TensorSpecs, inputs: Sequence[Any]) -> None:
        self._inference, self._premises, self._specs, self._kept = inference, premises, specs, inference.kept(inputs)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; UNLIKE for a call that has to go the long way."""
        if not self._specs.hold(args, kwargs) or not self._premises.unmoved():
            return UNLIKE
        inference = self._inference
        if inference.alone is None:
            refuse_surroundings()
            try:
                inference.check(inference.filled(self._kept, args))
            except (ChangedError, BatchError):  # the long way says what is wrong, or captures anew
                return UNLIKE
        try:
            return inference(self._kept, args)
        except UnlikeConstantsError:
            return UNLIKE


def _batch_places(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    return tuple((at, int(slot.path[0])) for at, slot in enumerate(slots) if slot.table == "batch")


def _leaves_of_only_region(graph: Graph, leaves: Mapping[int, int]) -> tuple[int, ...] | None:
    """The leaves of the batch that a graph's one region reads; None for a graph of more than that. `leaves` are by input."""
    if len(graph.nodes) != 1 or len(leaves) != len(graph.inputs):
        return None
    (node,) = graph.nodes
    if not is_region(node) or node.results != graph.outputs:
        return None
    return tuple(leaves[graph.inputs.index(value)] for value in node.inputs)


def stored_bytes(inputs: Iterable[Any]) -> int:
    """What the tensors among them hold; a storage of several counts once."""
    storages = (tensor.untyped_storage() for tensor in inputs if isinstance(tensor, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def give_back() -> None:
    """Give back what is free. Takes about a millisecond; does nothing where the C library knows no such thing."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc
    except (OSError, TypeError, AttributeError):
        return None


class Frozen:
    """Call it as the step that it was made from: `fn(*batch)`. It holds generated kernels and packed weights.

    Changes to the model's weights do not reach it. The exception is weights that torch's operators read between kernels: those are the
    model's own. If nobody else holds the model, its memory is free. The first call returns that memory to the system.
    """

    def __init__(self, inference: Inference, batch: BatchSpec, inputs: Sequence[Any], networks: Mapping[str, LoadedNetwork]) -> None:
        self._inference, self._batch, self._networks = inference, batch, networks
        self._specs, self._kept = batch.specs, inference.kept(inputs)
        self._run: Callable[[Sequence[Any]], Any] = self._first

    @property
    def held_bytes(self) -> int:
        """What it holds from call to call: weights as kernels read them, their arenas, and weights that torch's operators read."""
        return sum(network.nbytes for network in self._networks.values()) + stored_bytes(self._kept)

    @undisturbed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result. Raises BatchError for a batch unlike the step's, of another shape, too."""
        if self._specs is not None and self._specs.hold(args, kwargs):
            return self._run(args)
        return self._run(self._leaves(args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """It is bound to kernels of this process. Raises StepError, also for `copy.copy` and `copy.deepcopy`."""
        raise StepError(
            "a frozen function cannot be pickled or copied: its kernels are loaded into this process. For "
            "another process write it with step.save_frozen(path, *batch), and load it there with lowtide.load_frozen(path)"
        )

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
