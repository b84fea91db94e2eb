"""Numbers and shapes that the program under capture reads from its data: computed from the example, noted as facts to look up again.

What is read must follow from what is there before the step begins: the batch, buffers, constants, parameters that are not trained. Then it
is computed on the example by the very operators that were recorded, and becomes a `Reading`: at each call it is computed again, and where
it comes out otherwise another program is captured. Of trained parameters alone a yes or no can be read (`(scale > 0).all()`): a number
would be another one at each step. What follows from activations or from a random draw can only be refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import operators
from lowtide.capture.calls import torchs
from lowtide.capture.care.failures import mark_as_eager
from lowtide.capture.data.facts import Facts, FactStep, Item, OperatorCall, Question, Reading, Ref, SlotLeaf
from lowtide.capture.draft import Draft
from lowtide.capture.sources import users_line
from lowtide.ir.graph import Arg, Atom, Kind, Node, Slot, Value
from lowtide.ir.operators.nodes import is_arithmetic
from lowtide.ir.operators.row import ITEM
from lowtide.ir.sizes import Size

_BEFORE_THE_STEP = frozenset({Kind.INPUT, Kind.CONSTANT, Kind.BUFFER})


class UnreadableError(Exception):
    """What is read does not follow from what is there before the step; the message says from what else."""


class Reader:
    """Reads from the example. `frozen` are the parameters that no step changes; `number` gives a size in the example."""

    def __init__(self, read: Callable[[Slot], torch.Tensor], frozen: Callable[[Slot], bool], number: Callable[[Size], int]) -> None:
        self.readings: dict[str, Reading] = {}
        self._read, self._frozen, self._number, self._facts = read, frozen, number, Facts(read, number)
        self._steps: dict[Value, tuple[FactStep, ...]] = {}  # those that give a value, its own last

    def number(self, draft: Draft, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> Any:
        """What an operator answers that gives no tensor. Raises UnreadableError, and what the operator raises on such data."""
        return self._ask(self.call(draft, op, args, kwargs), "number", operators.name_of(op))

    def later(self, draft: Draft, value: Value) -> tuple[Callable[[], Any], Callable[[str, int], bool]]:
        """Give the number in a tensor, and how it compares ("gt") with another one: no facts before they are asked for.

        Raises UnreadableError, at once.
        """
        steps = self.steps(draft, value)
        if any(isinstance(step, SlotLeaf) and step.trained for step in steps):
            raise UnreadableError("parameters, which the training changes")

        def ask(steps: tuple[FactStep, ...]) -> Any:
            op = torch.ops.aten._local_scalar_dense.default
            return self._ask((*steps, self._step(op, (Ref(steps[-1].key),), ())), "number", operators.name_of(op))

        def compare(name: str, other: int) -> bool:
            return bool(ask((*steps, self._step(operators.resolve(f"aten.{name}.Scalar"), (Ref(steps[-1].key), other), ()))))

        return lambda: ask(steps), compare

    def values(self, draft: Draft, asked_by: str, value: Value) -> torch.Tensor:
        """A whole tensor, as a copy: its numbers are now part of the program. Raises UnreadableError."""
        values: torch.Tensor = self._ask(self.steps(draft, value), "values", asked_by)
        with _disable_current_modes():
            return values.clone()

    def results(self, draft: Draft, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> Any:
        """What an operator gives whose results have shapes that follow from the data: their layout is now part of the program."""
        return self._ask(self.call(draft, op, args, kwargs), "shape", operators.name_of(op))

    def made_up(self, value: Value) -> Value:
        """A value of zeros that looks like another one: stands for what no answer depends on, and takes no memory."""
        options = (("dtype", getattr(torch, value.dtype)), ("device", torch.device(value.storage.device)))
        twin = Value(value.name, value.storage, value.dtype, value.shape, value.stride, value.offset, value.version)
        zero = self._step(torch.ops.aten.full.default, ((), 0), options)
        self._steps[twin] = (zero, self._step(torch.ops.aten.expand.default, (Ref(zero.key), value.shape), ()))
        return twin

    def close(self) -> None:
        self._facts = Facts(self._read, self._number)
        self._steps.clear()

    def fork(self) -> Reader:
        """An independent copy."""
        twin = Reader(self._read, self._frozen, self._number)
        twin.readings, twin._steps, twin._facts = dict(self.readings), dict(self._steps), self._facts
        return twin

    def _ask(self, steps: tuple[FactStep, ...], kind: str, asked_by: str) -> Any:
        question = Question(steps, kind, asked_by, users_line())
        trained = next((step for step in steps if isinstance(step, SlotLeaf) and step.trained), None)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            answer = self._compute(steps) if trained is None or kind == "number" else None
            if trained is not None and not isinstance(answer, bool):
                raise UnreadableError(f"{trained.slot}, which the training changes")
            if any(isinstance(step, SlotLeaf) for step in steps):
                outcome = self._facts.outcome(question)
                assert outcome is not None, "it was just computed"
                self.readings.setdefault(question.key, Reading(question, outcome))
        return answer

    def _compute(self, steps: tuple[FactStep, ...]) -> Any:
        try:
            return self._facts.tensor(steps)
        except Exception as error:  # whatever the operator raises on real data, eager PyTorch would raise: it goes on, marked so
            mark_as_eager(error)
            raise

    # What leads to a value.

    def call(self, draft: Draft, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> tuple[FactStep, ...]:
        """The steps that lead to an operator's answer on these arguments."""
        given = Node("", args, (), kwargs).inputs
        return joined((*(self.steps(draft, value) for value in given), (self._own(op, args, kwargs),)))

    def steps(self, draft: Draft, value: Value) -> tuple[FactStep, ...]:
        """The steps that lead to a value. Raises UnreadableError."""
        wanted, makers = [value], draft.makers()
        while wanted:
            node = makers.get(wanted[-1])
            missing: tuple[Value, ...] = ()
            if wanted[-1] not in self._steps:
                _refuse_maker(node, wanted[-1])
                missing = () if node is None else tuple(each for each in node.inputs if each not in self._steps)
                if not missing:
                    self._steps[wanted[-1]] = self._leaf(draft, wanted[-1]) if node is None else self._made_by(node, wanted[-1])
            wanted = [*wanted, *missing] if missing else wanted[:-1]
        _refuse_activations(self._steps[value])
        return self._steps[value]

    def _leaf(self, draft: Draft, value: Value) -> tuple[FactStep, ...]:
        slot = next((slot for value_there, slot in zip(draft.inputs, draft.slots, strict=True) if value_there is value), None)
        if slot is None or value.dtype == "scalar":
            raise UnreadableError("a number that only the running step knows")
        if slot.table == "constant":
            constant = draft.constants[int(slot.path[0])]
            return (SlotLeaf(f"constant {id(constant)}", slot, constant),)
        trained = value.storage.kind not in _BEFORE_THE_STEP and not self._frozen(slot)
        if trained and slot.table != "parameter":
            raise UnreadableError(f"{slot}, which the training changes" if slot.table == "state" else str(slot))
        if (real := self._read(slot)).is_meta or isinstance(real, FakeTensor):
            raise UnreadableError(f"{slot}, which has no data here (it lies on the meta device): optimize with an example that has")
        return (SlotLeaf(str(slot), slot, trained=trained),)

    def _made_by(self, node: Node, value: Value) -> tuple[FactStep, ...]:
        op = operators.resolve(node.op)
        call = self._own(op, node.args, node.kwargs)
        own: tuple[FactStep, ...] = (call,)
        if len(op._schema.returns) != 1 or isinstance(op._schema.returns[0].type, torch.ListType):
            index = next(at for at, output in enumerate(node.outputs) if output is value)
            own = (call, Item(f"{call.key}[{index}]", call.key, index))
        return joined((*(self._steps[each] for each in node.inputs), own))

    def _own(self, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> OperatorCall:
        return self._step(op, tuple(map(self._argument, args)), tuple((name, self._argument(arg)) for name, arg in kwargs))

    def _step(self, op: OpOverload, given: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> OperatorCall:
        """The step that calls an operator. Its key is a digest of all that leads to it."""
        text = f"{operators.name_of(op)}{given!r}{named!r}"
        return OperatorCall(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), op, given, named)

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return Ref(self._steps[arg][-1].key)
        if isinstance(arg, Atom):
            return torchs(arg)
        return tuple(self._argument(item) for item in arg) if isinstance(arg, tuple) else arg


def joined(chains: Iterable[tuple[FactStep, ...]]) -> tuple[FactStep, ...]:
    """Several chains of steps as one, each step once."""
    return tuple({step.key: step for chain in chains for step in chain}.values())


def _refuse_maker(node: Node | None, value: Value) -> None:
    """What cannot be computed before the step: draws, what the step writes, arithmetic on numbers of the running step."""
    if node is None:
        return
    where = f" at {node.source.file}:{node.source.line}" if node.source is not None else ""
    if node.writes:
        what = "which updates statistics beside it" if value in node.outputs else "which the step has written by then"
        raise UnreadableError(f"the result of {node.op}{where}, {what}")
    if is_arithmetic(node) or node.op == ITEM:
        raise UnreadableError("a number that only the running step knows")
    if operators.node_is_random(node):
        raise UnreadableError(f"a random draw ({node.op}{where})")


def _refuse_activations(steps: tuple[FactStep, ...]) -> None:
    """A number that follows from data and from parameters would take the model itself to be known before the step."""
    leaves = [step for step in steps if isinstance(step, SlotLeaf)]
    parameter = next((leaf for leaf in leaves if leaf.slot.table == "parameter"), None)
    data = next((leaf for leaf in leaves if _is_data(leaf, any(each.trained for each in leaves))), None)
    if parameter is not None and data is not None:
        what = "the batch" if data.slot.table == "batch" else str(data.slot)
        raise UnreadableError(f"{what} and {parameter.slot}: activations are known only when the step runs")


def _is_data(leaf: SlotLeaf, beside_trained: bool) -> bool:
    """Whether what follows from this and a parameter is an activation. Beside trained parameters, any tensor of more than one number."""
    if leaf.slot.table in ("batch", "parameter") or not beside_trained:
        return leaf.slot.table == "batch"
    return leaf.constant is None or leaf.constant.numel() > 1
