"""What a program reads from its data, as facts that can be looked up again before each step.

A program may branch on a number that follows from the batch, from buffers or from constants: `if labels.max() >= vocab`. What leads from
those to the number is kept as a chain of steps, and the number itself as the outcome for which the captured program is the right one.
`Facts` computes outcomes from what the caller holds at one moment, each once, however many programs ask for it. What an optimizer decides
on numbers is computed by the same steps (`capture/optimizers/derived_numbers.py`).

`Reader` notes them during a capture. What is read must follow from what is there before the step begins: the batch, buffers, constants,
parameters that are not trained. Then it is computed on the example by the very operators that were recorded, and becomes a `Reading`: at
each call it is computed again, and where it comes out otherwise another program is captured. Of trained parameters alone a yes or no can be
read (`(scale > 0).all()`): a number would be another one at each step. What follows from activations or from a random draw can only be
refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import calls
from lowtide.capture.calls import torchs
from lowtide.capture.care.failures import mark_as_eager
from lowtide.capture.draft import Draft
from lowtide.capture.formulas.dispatch import computing_device
from lowtide.capture.sources import users_line
from lowtide.ir.graph import Arg, Atom, Kind, Node, Slot, Value
from lowtide.ir.operators.nodes import is_arithmetic
from lowtide.ir.operators.row import ITEM
from lowtide.ir.sizes import Size

SizeAt: TypeAlias = "Callable[[Size], int]"  # what a size is in the batch at hand
Read: TypeAlias = "Callable[[Any], Any]"  # what a slot holds, or what is given at a position
FactStep: TypeAlias = "SlotLeaf | NumberLeaf | OperatorCall | Item"  # `key` is the same for what gives the same
_LARGE = 2**12  # elements of what is computed again rather than kept
_BEFORE_THE_STEP = frozenset({Kind.INPUT, Kind.CONSTANT, Kind.BUFFER})


@dataclass(frozen=True, eq=False, slots=True)
class SlotLeaf:
    """What the caller keeps at a slot, or a tensor that the program closes over."""

    key: str
    slot: Slot
    constant: torch.Tensor | None = None
    trained: bool = False  # a parameter that each step changes

    def run(self, known: Mapping[str, Any], read: Read, number: SizeAt) -> Any:
        return read(self.slot) if self.constant is None else self.constant


@dataclass(frozen=True, slots=True)
class NumberLeaf:
    """A number that is given at a position, as a tensor that nothing else holds; of the dtype "scalar" as it is."""

    at: int
    dtype: str
    shape: tuple[Any, ...]

    @property
    def key(self) -> str:
        return f"number {self.at}: {self.dtype}{self.shape}"

    def run(self, known: Mapping[str, Any], read: Read, number: SizeAt) -> Any:
        return read(self.at) if self.dtype == "scalar" else torch.full(self.shape, read(self.at), dtype=getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that an earlier step gives."""

    key: str


@dataclass(frozen=True, eq=False, slots=True)
class OperatorCall:
    """An operator, or a function of numbers, on the results of earlier steps, which stand as `Ref` among its arguments."""

    key: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def run(self, known: Mapping[str, Any], read: Read, number: SizeAt) -> Any:
        given = [filled(arg, known, number) for arg in self.args]
        return self.op(*given, **{name: filled(arg, known, number) for name, arg in self.kwargs})


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """One of several results of a call."""

    key: str
    of: str
    index: int

    def run(self, known: Mapping[str, Any], read: Read, number: SizeAt) -> Any:
        return known[self.of][self.index]


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    steps: tuple[FactStep, ...]  # in an order that can be run; what is asked is of the last
    kind: str  # "number", "values" or "shape"
    op: str  # the operator that asked
    line: str  # of the user's program

    @property
    def key(self) -> str:
        """The same for questions that have the same answer."""
        return f"{self.kind} {self.steps[-1].key}"


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """A question and the answer for which the captured program is the right one."""

    question: Question
    outcome: str

    def __str__(self) -> str:
        return f"{self.question.op} at {self.question.line}"

    @property
    def answer_text(self) -> str:
        return f"{self} gave {brief(self.outcome)}"


def brief(outcome: str) -> str:
    return outcome if len(outcome) <= 40 else f"{outcome[:37]}..."


def at_numbers(reading: Reading, number: SizeAt) -> Reading:
    """The same question about batches in which sizes are these numbers."""
    steps = tuple(_numbered(step, number) for step in reading.question.steps)
    return replace(reading, question=replace(reading.question, steps=steps))


def _varies(step: FactStep) -> bool:
    """Whether another batch or another moment may give it something else."""
    return isinstance(step, SlotLeaf) or (isinstance(step, OperatorCall) and _has_sizes((step.args, *(arg for _, arg in step.kwargs))))


def _has_sizes(arg: Any) -> bool:
    return any(map(_has_sizes, arg)) if isinstance(arg, tuple) else isinstance(arg, sympy.Expr)


def _numbered(step: FactStep, number: SizeAt) -> FactStep:
    if not isinstance(step, OperatorCall):
        return step
    kwargs = tuple((name, _in_numbers(arg, number)) for name, arg in step.kwargs)
    return replace(step, args=tuple(_in_numbers(arg, number) for arg in step.args), kwargs=kwargs)


def _in_numbers(arg: Any, number: SizeAt) -> Any:
    if isinstance(arg, tuple):
        return tuple(_in_numbers(item, number) for item in arg)
    return number(arg) if isinstance(arg, sympy.Expr) else arg


class Facts:
    """Answers to questions about what slots hold at one moment. Let go of it soon: it holds what it computed."""

    def __init__(self, read: Read, number: SizeAt = int) -> None:
        """`number` gives a size that is an expression, where the questions have some."""
        self._read, self._number = read, number
        self._known: dict[str, Any] = {}
        self._outcomes: dict[str, str | None] = {}

    def known(self, steps: Iterable[FactStep]) -> Mapping[str, Any]:
        """What these steps give, by key. Raises whatever an operator raises."""
        with _plainly():
            for step in steps:
                if step.key not in self._known:
                    self._known[step.key] = step.run(self._known, self._read, self._number)
        return self._known

    def tensor(self, steps: tuple[FactStep, ...]) -> Any:
        return self.known(steps)[steps[-1].key]

    def outcome(self, question: Question) -> str | None:
        """The answer as text, the same where it is the same to the last bit; None where an operator fails."""
        if question.key not in self._outcomes:
            try:
                self._outcomes[question.key] = outcome_of(question.kind, self.tensor(question.steps))
            except Exception:  # whatever it is, the program that relies on the answer is not the one to run
                self._outcomes[question.key] = None
            for step in question.steps:  # of parameters, say, which are asked for one after the other
                if isinstance(result := self._known.get(step.key), torch.Tensor) and result.numel() > _LARGE:
                    del self._known[step.key]
        return self._outcomes[question.key]

    def hold(self, readings: Iterable[Reading]) -> bool:
        """Whether all of these come out as they did. In the program's order: an early one may guard a later one from failing."""
        return self.unlike(readings) is None

    def unlike(self, readings: Iterable[Reading]) -> Reading | None:
        """The first of these that comes out otherwise now."""
        return next((reading for reading in readings if self.outcome(reading.question) != reading.outcome), None)


def outcome_of(kind: str, answer: Any) -> str:
    """An answer as text: of a number, of all numbers of a tensor, or of how its results lie."""
    if kind == "shape":
        results = answer if isinstance(answer, (tuple, list)) else (answer,)
        return repr([(tuple(result.shape), result.stride()) for result in results])
    return repr(answer.tolist() if isinstance(answer, torch.Tensor) else answer)


def filled(arg: Any, known: Mapping[str, Any], number: SizeAt = int) -> Any:
    """An argument as the operator takes it, with results in the place of each `Ref`."""
    if isinstance(arg, Ref):
        return known[arg.key]
    if isinstance(arg, sympy.Expr):
        return number(arg)
    if isinstance(arg, torch.device):
        return computing_device(arg)
    return [filled(item, known, number) for item in arg] if isinstance(arg, tuple) else arg


@contextmanager
def _plainly() -> Iterator[None]:
    """As the program's own operators run: beneath autograd and autocast, which have had their say when they were recorded."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


class UnreadableError(Exception):
    """What is read does not follow from what is there before the step; the message says from what else."""


class Reader:
    """Reads from the example. `frozen` are the parameters that no step changes; `number` gives a size in the example."""

    def __init__(self, read: Callable[[Slot], torch.Tensor], frozen: Callable[[Slot], bool], number: Callable[[Size], int]) -> None:
        self.readings: dict[str, Reading] = {}
        self._settings: dict[Slot, Any] = {}
        self._read, self._frozen, self._number, self._facts = read, frozen, number, Facts(self._held, number)
        self._steps: dict[Value, tuple[FactStep, ...]] = {}  # those that give a value, its own last

    def answer(self, draft: Draft, kind: str, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Any:
        """What an operator answers: a "number", or what it gives whose "shape" follows from the data, and is now part of the program.

        Raises UnreadableError, and what the operator raises on such data.
        """
        node = Node(calls.name_of(op), args, (), kwargs)
        given = [self.steps(draft, value) for value in node.inputs]
        return self._ask(joined((*given, (step_of(node, self._key),))), kind, node.op)

    def later(self, draft: Draft, value: Value) -> tuple[Callable[[], Any], Callable[[str, int], bool]]:
        """Give the number in a tensor, and how it compares ("gt") with another one: no facts before they are asked for.

        Raises UnreadableError, at once.
        """
        steps = self.steps(draft, value)
        if any(isinstance(step, SlotLeaf) and step.trained for step in steps):
            raise UnreadableError("parameters, which the training changes")

        def ask(steps: tuple[FactStep, ...]) -> Any:
            op = "aten._local_scalar_dense.default"
            return self._ask((*steps, called(op, (Ref(steps[-1].key),))), "number", op)

        def compare(name: str, other: int) -> bool:
            return bool(ask((*steps, called(f"aten.{name}.Scalar", (Ref(steps[-1].key), other)))))

        return cache(lambda: ask(steps)), cache(compare)  # a key of a dictionary is asked for its hash behind the capture, too

    def values(self, draft: Draft, asked_by: str, value: Value) -> torch.Tensor:
        """A whole tensor, as a copy: its numbers are now part of the program. Raises UnreadableError."""
        values: torch.Tensor = self._ask(self.steps(draft, value), "values", asked_by)
        with _disable_current_modes():
            return values.clone()

    def made_up(self, value: Value) -> Value:
        """A value of zeros that looks like another one: stands for what no answer depends on, and takes no memory."""
        options = (("dtype", getattr(torch, value.dtype)), ("device", torch.device(value.storage.device)))
        twin = Value(value.name, value.storage, value.dtype, value.shape, value.stride, value.offset, value.version)
        zero = called("aten.full.default", ((), 0), *options)
        self._steps[twin] = (zero, called("aten.expand.default", (Ref(zero.key), value.shape)))
        return twin

    def learn(self, slot: Slot, number: Any) -> None:
        """What an optimizer's setting is in the example."""
        self._settings[slot] = number

    def _held(self, slot: Slot) -> Any:
        return self._settings[slot] if slot in self._settings else self._read(slot)

    def close(self) -> None:
        self._facts = Facts(self._held, self._number)
        self._steps.clear()

    def fork(self) -> Reader:
        twin = Reader(self._read, self._frozen, self._number)
        twin.readings, twin._steps, twin._settings = dict(self.readings), dict(self._steps), dict(self._settings)
        return twin

    def _ask(self, steps: tuple[FactStep, ...], kind: str, asked_by: str) -> Any:
        question = Question(steps, kind, asked_by, users_line())
        trained = next((step for step in steps if isinstance(step, SlotLeaf) and step.trained), None)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            answer = self._compute(steps) if trained is None or kind == "number" else None
            if trained is not None and not isinstance(answer, bool):
                raise UnreadableError(f"{trained.slot}, which the training changes")
            if any(map(_varies, steps)):
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
        if slot is not None and slot in self._settings:
            return (SlotLeaf(str(slot), slot),)
        if slot is None or value.dtype == "scalar":
            raise UnreadableError("a number that only the running step knows")
        if slot.table == "constant":
            constant = draft.constants[int(slot.path[0])]
            return (SlotLeaf(f"constant {id(constant)}", slot, constant),)
        trained = value.storage.kind not in _BEFORE_THE_STEP and not self._frozen(slot)
        if trained and slot.table != "parameter":
            raise UnreadableError(f"{slot}, which the training changes" if slot.table in ("state", "optimizer") else str(slot))
        if (real := self._read(slot)).is_meta or isinstance(real, FakeTensor):
            raise UnreadableError(f"{slot}, which has no data here (it lies on the meta device): optimize with an example that has")
        return (SlotLeaf(str(slot), slot, trained=trained),)

    def _made_by(self, node: Node, value: Value) -> tuple[FactStep, ...]:
        call = step_of(node, self._key)
        return joined((*(self._steps[each] for each in node.inputs), (call, result_of(call, node, value))))

    def _key(self, value: Value) -> str:
        return self._steps[value][-1].key


def step_of(node: Node, key: Callable[[Value], str], function: Callable[..., Any] | None = None) -> OperatorCall:
    """The step that does what a node does. `key` gives the key of the step that leads to a value."""

    def written(arg: Arg) -> Any:
        if isinstance(arg, Value):
            return Ref(key(arg))
        if isinstance(arg, Atom):
            return torchs(arg)
        return tuple(map(written, arg)) if isinstance(arg, tuple) else arg

    given = tuple(map(written, node.args))
    return called(node.op, given, *((name, written(arg)) for name, arg in node.kwargs), function=function)


def called(name: str, args: tuple[Any, ...], *kwargs: tuple[str, Any], function: Callable[..., Any] | None = None) -> OperatorCall:
    """The step that calls the operator of a name, or a function. Its key is a digest of all that leads to it."""
    key = hashlib.blake2b(f"{name}{args!r}{kwargs!r}".encode(), digest_size=16).hexdigest()
    return OperatorCall(key, function or calls.resolve(name), args, kwargs)


def result_of(call: OperatorCall, node: Node, value: Value) -> FactStep:
    """The step that gives one of a node's outputs: the node's call, or what takes one out of several results."""
    returns = call.op._schema.returns if isinstance(call.op, OpOverload) else ()
    if not returns or (len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)):
        return call
    index = next(at for at, output in enumerate(node.outputs) if output is value)
    return Item(f"{call.key}[{index}]", call.key, index)


def joined(chains: Iterable[tuple[FactStep, ...]]) -> tuple[FactStep, ...]:
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
    if calls.node_is_random(node):
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
    if leaf.slot.table in ("batch", "parameter", "group") or not beside_trained:
        return leaf.slot.table == "batch"
    return leaf.constant is None or leaf.constant.numel() > 1
