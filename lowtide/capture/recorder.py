"""Turns a running program into a graph in normal form, one operator at a time.

The program runs under fake tensors: no memory, no numerics. Each operator that reaches this mode has passed autograd, autocast and
every composite decomposition, so it is a kernel that eager PyTorch would run. Two facts decide what is recorded:

- Aliasing is what storages say, and the draft knows them: an operator that makes no new value (detach, alias) leaves no node.
- A storage that the program made is written once. `y.add_(x)` on such a storage becomes `y2 = add(y, x)` on a new one, and may
  work in place; a write through a view of it becomes a scatter. Values seen later through any old view are read from the new storage.
  Only storages of the caller (parameters, statistics, optimizer state) keep their in-place operators, each making a new version.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture import calls, lists
from lowtide.capture.blocks import address, covers, geometry, in_memory_order, is_lazy, overlaps_itself, same_layout
from lowtide.capture.calls import results_of, targets_of, tensors_in, without_generators
from lowtide.capture.care.failures import mark
from lowtide.capture.care.generators import copies, draw
from lowtide.capture.care.harm import NodeChain, behind, in_order_of_harm, needed
from lowtide.capture.care.instances import refuse_remembered
from lowtide.capture.control import Scripts
from lowtide.capture.data import data_shapes as shaped
from lowtide.capture.data.batch_counts import is_count_of_batches
from lowtide.capture.data.facts import Reader
from lowtide.capture.draft import CallArguments, Draft
from lowtide.capture.effects.data import Data
from lowtide.capture.formulas import gradients, recurrent
from lowtide.capture.formulas.dispatch import calls_within
from lowtide.capture.looks import WRITTEN, fakes_of, is_made_of_tensors, kind_of
from lowtide.capture.ranks.data_parallel import CALLED_BY_LAYERS, REFUSED
from lowtide.capture.ranks.wholes import WholeTensors
from lowtide.capture.real import not_remembered, run, structured
from lowtide.capture.repeats import Repeat, Repeats
from lowtide.capture.results import Number
from lowtide.capture.sizes.symbols import FixedError
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError, LowtideError
from lowtide.ir.graph import Graph, HeldStorages, Node, Slot, Source, Value, values_of, with_values
from lowtide.ir.operators.nodes import begins_collective
from lowtide.kernels.apart import apart

_IGNORED_NAMESPACES = {"prim", "profiler"}  # questions and marks, not computation
_ASKED_IN_CPP = {torch.ops.aten.size.default, torch.ops.aten.stride.default, torch.ops.aten.storage_offset.default}


class _Functional(NamedTuple):
    """A call of an operator that returns what another one would write."""

    form: OpOverload
    recorded: CallArguments
    results: list[Any]  # under fake tensors


class Recorder(TorchDispatchMode):
    """Records what runs under it. `fork()` gives an independent continuation from the same point."""

    def __init__(self, draft: Draft, reader: Reader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draft = draft
        self.reader = reader  # of what the example holds
        self.refusals: list[LowtideError] = []  # errors that were raised from here
        self.data = Data(draft, {}, {}, closed=True)  # where an optimizer steps
        self.scripts: Scripts | None = None  # where gradients are wanted
        self.numbers: list[weakref.ref[Number]] | None = None  # handed out in the place of some that nobody knows yet, where that may be
        self.wholes: WholeTensors | None = None  # tensors of which each rank holds a part
        self.stop: Node | None = None  # that ends the program early: what acts after it in the program does so in every order
        self._repeats = Repeats()
        self._draws, self._collectives, self._sums = NodeChain(), NodeChain(), gradients.GradientSums()
        self._before_loss: frozenset[Node] | None = None  # what the program runs before its last loss exists; None where it has none

    def fork(self) -> Recorder:
        """A recorder that continues from here and leaves this one as it is."""
        twin = Recorder(self.draft.fork(), self.reader.fork())
        twin.refusals, twin.stop, twin._repeats = self.refusals, self.stop, self._repeats
        twin._draws, twin._collectives = replace(self._draws), replace(self._collectives)
        twin._before_loss, twin.scripts = self._before_loss, self.scripts
        return twin

    def graph(self, outputs: Iterable[Value]) -> tuple[Graph, tuple[Slot, ...]]:
        """What was recorded, less the nodes that nothing needs, and the slot of each input.

        Raises what was refused on the way, if the program went on after it: it took another way than it would without a capture.
        """
        if self.refusals:
            raise self.refusals[0]
        results = tuple(outputs)
        nodes = needed(behind(self.stop, self.draft.nodes), results)
        before_loss = frozenset(nodes) if self._before_loss is None else self._before_loss
        return Graph(tuple(self.draft.inputs), in_order_of_harm(nodes, before_loss), results), tuple(self.draft.slots)

    def end_early(self, end: Node, values: Iterable[Value]) -> None:
        """This node may end the program: by then these exist, too."""
        at = self.draft.nodes.index(end)
        self.stop = self.draft.nodes[at] = replace(end, args=(end.args[0], *dict.fromkeys((*end.args[1:], *values))))

    def held_storages(self, graph: Graph) -> HeldStorages:
        """What eager holds on to beside gradients, and computes beside the graph that was made of this."""
        kept, results = iter(graph.nodes), {value for node in graph.nodes for value in node.results}
        recorded = behind(self.stop, self.draft.nodes)
        alone = (node if not node.after else replace(node, after=()) for node in recorded)  # edges of what nobody needs
        pairs = zip(recorded, alone, strict=True)
        nodes = [next(kept) if not node.results or node.results[0] in results else free for node, free in pairs]
        usual, chosen = gradients.of_usual_data(nodes, self.draft.ends.rare)
        whole = replace(graph, nodes=usual)
        storages = self.draft.held_storages(whole)
        return replace(storages, summed=storages.summed | chosen, program=None if usual == graph.nodes else whole)

    def note_loss(self) -> None:
        """The loss exists from here on; the latest call counts."""
        if self.scripts is not None:
            self.scripts.refuse()
        self._before_loss = frozenset(self.draft.nodes)

    def record(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run an operator of the recorder's own making as if the program had called it."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run `func` on fake tensors and record what it does. What is refused stays refused, also where the program catches the error."""
        if any(map(is_made_of_tensors, types)):
            return NotImplemented  # its class takes it apart, and comes back with the tensors that it is made of
        try:
            return self._run(func, types, args, kwargs or {})
        except LowtideError as error:
            if isinstance(error, FixedError) and not error.operator:
                error = FixedError(error.name, error.equal_to, "" if func in _ASKED_IN_CPP else calls.name_of(func))
            self.refusals.append(error)
            raise error from error.__cause__
        except Exception as error:  # a fake kernel may raise anything: it goes on, and says which operator it came from
            mark(error, calls.name_of(func))
            raise

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            raise CaptureError(f"operator {func} at {users_line()} has no schema: it cannot be part of a graph")
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:  # asked for at each turn
            return args[0].fake_device
        if func.namespace in _IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        if self.scripts is not None:
            self.scripts.refuse()
        if func.namespace in CALLED_BY_LAYERS:
            raise CaptureError(f"operator {calls.name_of(func)} at {users_line()} {REFUSED}")
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self.draft.literal(args[0])
        if (form := gradients.form_of(func, args, self.draft) or recurrent.form_of(func, args)) is not None:
            return self.__torch_dispatch__(form, types, args, kwargs)
        if calls.row(func).view and isinstance(args[0], (bool, int, float, complex)):
            args = (self.draft.literal_number(args[0]), *args[1:])  # so a dispatch mode is handed what eager wraps in a tensor
        args, kwargs = self.draft.fake(args), self.draft.fake(kwargs)
        if (within := calls_within(func, args, kwargs, tensors_in((*args, *kwargs.values())))) is not None:
            with self:
                return within()
        if (instead := lists.run(func, args, kwargs, self.draft)) is not None:
            with self:
                return instead()
        if self.wholes is not None and self.wholes.run(func, args, kwargs, self.draft, self):
            return args[0] if func._schema.returns else None
        call = self._repeats.call(func, args, kwargs, self.draft) if self.wholes is None else None
        if call is not None and call.earlier is not None:
            return self._record_again(call.earlier, call.tensors[0], func, args, kwargs)
        if func.overloadpacket is torch.ops.aten.set_:
            return self._set(func, args, kwargs)
        if func is torch.ops.aten.resize_.default and "memory_format" not in kwargs and tuple(args[0].shape) == tuple(args[1]):
            return args[0]
        if calls.changes_geometry_only(func):
            return self._reshape(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.draft.read_number is not None:
            return self.draft.read_number(args[0])
        if func is torch.ops.aten._local_scalar_dense.default and is_count_of_batches(args[0]) and self.draft.owns(args[0]):
            return self.draft.counts.read(self.draft.emit_scalar, self.draft.value(args[0]))
        if calls.row(func).in_memory_order and not args[0].is_contiguous() and covers(args[0]) and not self.draft.owns(args[0]):
            self.__torch_dispatch__(func, types, (in_memory_order(args[0]), *args[1:]), kwargs)
            return args[0]
        if (positions := shaped.without_masks(self, func, args)) is not None:
            return self.__torch_dispatch__(func, types, positions, kwargs)
        if calls.rounds_number(func, args):
            number = self.record(torch.ops.aten.scalar_tensor.default, args[1], dtype=args[0].dtype)
            return self.__torch_dispatch__(torch.ops.aten.mul_.Tensor, types, (args[0], number))
        rounded = calls.complex_in_place(func, args)
        if rounded is not None and not is_lazy(args[0]) and not self.draft.owns(args[0]):
            return self.__torch_dispatch__(torch.ops.aten.copy_.default, types, (args[0], self.__torch_dispatch__(rounded, types, args)))
        if (laid := calls.in_layout(func, args, kwargs)) is not None and not self.draft.owns(out := kwargs.get("out", args[0])):
            result = self.__torch_dispatch__(laid[0], types, *laid[1:])
            return self.__torch_dispatch__(torch.ops.aten.copy_.default, types, (out, result))
        if func._schema.is_mutable:
            args = calls.with_defaults(func, args)
        recorded = self.draft.arguments(func, args, kwargs)
        args, kwargs = without_generators(args, kwargs)
        written = calls.written_positions(func, args)
        self.draft.refuse_writing(targets := targets_of(written, args, kwargs))
        owned = any(map(self.draft.owns, targets))
        with_writes = calls.form_with_writes(func) if written and not owned else None
        before = [geometry(target) for target in targets] if owned else []
        form = None if with_writes else self._apart(func, written, args, targets)
        functional = None if with_writes or form else self._functional(func, recorded, written, args, kwargs)
        if calls.row(func).answers_without_data:
            return shaped.number(self, func, recorded, args)
        try:
            out = None if calls.row(func).gradients else self._results_of(func, recorded, args, kwargs)
        except DataDependentOutputException:
            return shaped.number(self, func, recorded, args)
        except DynamicOutputShapeException:
            out = shaped.results(self, func, *recorded)
        if before and before != [geometry(target) for target in targets_of(written, args, kwargs)]:
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} gives a tensor of the caller another size: make it of the size that "
                "it is to have, before the step"
            )
        source = self.draft.sources.current()
        if not written:
            self._record(func, recorded, out, args, kwargs, source)
        elif form is not None:
            self._record_apart(form, func, recorded, args, kwargs, targets, source)
        elif with_writes is not None:
            self._record_with_writes(with_writes, func, recorded, results_of(func, out)[: with_writes[1]], args, kwargs, source)
        elif functional is None:
            self._record_write_to_owned(func, recorded, out, args, kwargs, written, source)
        else:
            self._record_functional(func, args, kwargs, written, functional, source)
        if call is not None:
            self._repeats.keep(call, func, out, *((None, []) if functional is None else (functional.form, functional.results)))
        return out

    def _record_again(self, earlier: Repeat, first: FakeTensor, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call as an earlier one that looked the same. `first`: the first tensor that it is given."""
        if func._schema.is_mutable:
            args = calls.with_defaults(func, args)
        recorded = self.draft.arguments(func, args, kwargs)
        if kind_of(func) is not WRITTEN:
            out = structured(func, fakes_of(func, earlier.layouts, first))
            self._record(func, recorded, out, args, kwargs, self.draft.sources.current())
            return out
        self.draft.refuse_writing(args[:1])
        if earlier.form is None:
            self._record_write_to_owned(func, recorded, first, args, kwargs, (0,), self.draft.sources.current())
        else:
            refuse_remembered(first, calls.name_of(func))
            keywords, _ = self._keywords(earlier.form, recorded, (0,), first, kwargs)
            functional = _Functional(earlier.form, (recorded[0], keywords), fakes_of(earlier.form, earlier.layouts, first))
            self._record_functional(func, args, kwargs, (0,), functional, self.draft.sources.current())
        return first if func._schema.returns else None

    def _results_of(self, func: OpOverload, recorded: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives under fake tensors, as the real one does."""
        whole = {self.draft.scalar_of(item) for item in (*args, *kwargs.values()) if type(item) is int}
        given = with_values(recorded, lambda value: 1 if value in whole else value)  # where it is tried, too, it decides a dtype
        call = Node(calls.name_of(func), given[0], (), given[1])
        return run(func, args, kwargs, call, self.draft.nodes, self.draft.symbols)

    def _reshape(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """An operator that changes how a tensor lies over its storage (`t_`, `squeeze_`): no node, later reads see the new geometry."""
        before = geometry(args[0])
        out = func(*args, **kwargs)
        if self.draft.owns(args[0]) and geometry(args[0]) != before:
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} reshapes a tensor of the caller: {calls.instead_of(func)}"
            )
        return out

    def _set(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """`set_` puts a tensor's data elsewhere."""
        if not self.draft.owns(args[0]):
            with not_remembered(self.draft.fake_mode):
                return func(*args, **kwargs)
        if func is not torch.ops.aten.set_.source_Tensor:
            raise CaptureError(f"set_ of a tensor of the caller, at {users_line()}: give it a tensor, not a storage, or copy_ into it")
        self.data.put(args[0], args[1], self.record)
        return args[0]

    def _apart(self, func: OpOverload, written: tuple[int | str, ...], args: Any, targets: Sequence[torch.Tensor]) -> OpOverload | None:
        """Another library's operator, with what it writes of the step's own made anew; None where that is not needed."""
        mine = tuple(at for at in written if isinstance(at, int) and isinstance(args[at], torch.Tensor) and not self.draft.owns(args[at]))
        if not mine or (len(mine) == len(targets) and calls.functional_form(func) is not None):
            return None
        reads = [each for at, item in enumerate(args) if at not in written for each in tensors_in([item])]
        written_to = {*map(address, targets)}  # what it reads there would be what it has written
        if len(written_to) < len(targets) or any(address(each) in written_to for each in reads):
            return None
        if any(is_lazy(each) or overlaps_itself(each) for each in targets):
            return None
        form: OpOverload | None = apart(func, mine)
        return form

    def _functional(self, func: OpOverload, recorded: Any, written: tuple[int | str, ...], args: Any, kwargs: Any) -> _Functional | None:
        """A call of the functional form of a writing operator; None if it writes only what the caller owns."""
        targets = targets_of(written, args, kwargs)
        if any(map(is_lazy, targets)):
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} writes through a lazy conjugate or negative view: write into what "
                "resolve_conj() or resolve_neg() of it gives"
            )
        if any(map(overlaps_itself, targets)):
            raise CaptureError(f"operator {calls.name_of(func)} at {users_line()} writes to an expanded tensor: clone it first")
        owned = [self.draft.owns(tensor) for tensor in targets]
        if all(owned):
            return None
        for tensor in targets:
            refuse_remembered(tensor, calls.name_of(func))
        form = calls.functional_form(func)
        if any(owned) or form is None or calls.written_positions(form, args):
            reason = "writes tensors of the caller and of the step in one call" if any(owned) else "has no functional form"
            raise CaptureError(f"operator {calls.name_of(func)} at {users_line()} {reason}: {calls.instead_of(func)}")
        keywords, read = self._keywords(form, recorded, written, targets[0], kwargs)
        return _Functional(form, (recorded[0], keywords), tensors_in(self._results_of(form, (recorded[0], keywords), args, read)))

    def _keywords(self, form: OpOverload, recorded: Any, written: tuple[int | str, ...], target: Any, kwargs: dict[str, Any]) -> Any:
        """Those of a functional form, as the graph writes them and as torch takes them."""
        options = calls.options_like(target) if calls.is_factory(form) else {}
        read = {key: item for key, item in kwargs.items() if key not in written} | options
        return (*((key, item) for key, item in recorded[1] if key not in written), *self.draft.arguments(form, (), options)[1]), read

    def _record(self, func: OpOverload, recorded: Any, out: Any, args: Any, kwargs: Any, source: Source | None) -> None:
        name, tensors = calls.name_of(func), results_of(func, out)
        if any(t is not None and self.draft.is_new(t) for t in tensors) or not tensors:
            outputs = tuple(None if t is None or not self.draft.is_new(t) else self.draft.new_value(t, name) for t in tensors)
            random, taken = calls.is_random(func, args, kwargs), self.draft.may_take(func, recorded, outputs)
            node = Node(name, recorded[0], outputs, recorded[1], inplace=taken, source=source)
            if taken and self._sums.has(node, self.draft.nodes, args[0]):
                self.draft.ends.summed.add(node.results[0].name)
            self._append(node, random)

    def _record_write_to_owned(
        self, func: OpOverload, recorded: Any, out: Any, args: Any, kwargs: Any, written: tuple[int | str, ...], source: Source | None
    ) -> None:
        """An operator that writes storages of the caller: it stays as it is, and each written storage goes to its next version."""
        name = calls.name_of(func)
        writes: list[tuple[Value, Value]] = []
        for tensor in targets_of(written, args, kwargs):
            before = self.draft.value(tensor)
            if any(before.storage is done.storage for done, _ in writes):
                raise CaptureError(f"operator {name} at {users_line()} writes one storage through two arguments")
            writes.append((before, self.draft.next_version(tensor)))
        outputs = tuple(None if t is None or not self.draft.is_new(t) else self.draft.new_value(t, name) for t in results_of(func, out))
        random = calls.is_random(func, args, kwargs)
        self._append(Node(name, recorded[0], outputs, recorded[1], writes=tuple(writes), source=source), random)

    def _record_apart(
        self, form: OpOverload, func: OpOverload, recorded: Any, args: Any, kwargs: Any, targets: list[torch.Tensor], source: Source | None
    ) -> None:
        """An operator that writes storages of the step, and perhaps of the caller: these go to their next version, those are new."""
        results = tensors_in([self._results_of(form, recorded, args, kwargs)])
        owned, mine = [each for each in targets if self.draft.owns(each)], [each for each in targets if not self.draft.owns(each)]
        for tensor in mine:
            refuse_remembered(tensor, calls.name_of(func))
        writes = tuple((self.draft.value(tensor), self.draft.next_version(tensor)) for tensor in owned)
        outputs = tuple(self.draft.new_value(result, calls.name_of(form)) for result in results)
        node = Node(calls.name_of(form), recorded[0], outputs, recorded[1], writes=writes, source=source)
        self._append(node, calls.is_random(func, args, kwargs))
        self._put(mine, outputs, source)

    def _put(self, tensors: Iterable[torch.Tensor], updates: Iterable[Value | None], source: Source | None) -> None:
        """What lies in tensors of the step is these values now."""
        for tensor, update in zip(tensors, updates, strict=True):
            assert update is not None, "what is written is returned"
            if covers(tensor):
                self.draft.renew(tensor, update)
            else:
                self.draft.scatter(tensor, update, source)

    def _record_functional(
        self, func: OpOverload, args: Any, kwargs: Any, written: tuple[int | str, ...], functional: _Functional, source: Source | None
    ) -> None:
        """An operator that writes storages of the step: its functional form makes new ones."""
        recorded: Any
        form, recorded, results = functional
        targets = targets_of(written, args, kwargs)
        random = calls.is_random(func, args, kwargs)
        any_layout = calls.rounds_once(form, kwargs, results[0]) and results[0].dtype == targets[0].dtype
        any_layout |= calls.is_factory(form) and not random
        if (random or isinstance(written[0], str)) and not any_layout and not all(map(same_layout, targets, results)):
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} writes into another layout or dtype than it makes by itself, which "
                "may give other bits: use its result, and copy_ it where it is wanted"
            )
        name = calls.name_of(form)
        if len(targets) == 1 and covers(targets[0]) and geometry(results[0])[:3] == geometry(targets[0])[:3]:
            outputs: tuple[Value, ...] = (self.draft.new_value(results[0], name),)
            own = () if isinstance(written[0], str) else ((values_of(recorded[0][written[0]])[0], calls.name_of(func)),)
            inplace = own + self.draft.may_take(form, recorded, outputs)
            self._append(Node(name, recorded[0], outputs, recorded[1], inplace=inplace, source=source), random)
            self.draft.renew(targets[0], outputs[0])
            return
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape:
            self.draft.scatter(targets[0], self.draft.value(args[1]), source)  # a scatter is a copy already
            return
        outputs = tuple(self.draft.new_value(result, name) for result in results)
        self._append(Node(name, recorded[0], outputs, recorded[1], source=source), random)
        for tensor, result, update in zip(targets, results, outputs, strict=True):
            if covers(tensor) and geometry(result)[:3] == geometry(tensor)[:3]:  # also where the operator has given it its size
                self.draft.renew(tensor, update)
            else:
                self.draft.scatter(tensor, update, source)

    def _record_with_writes(
        self,
        form: tuple[OpOverload, int],
        func: OpOverload,
        recorded: Any,
        results: list[Any],
        args: Any,
        kwargs: Any,
        source: Source | None,
    ) -> None:
        """An operator that writes storages of the step beside what it returns: its functional form returns both."""
        op, own = form
        targets = targets_of(calls.written_positions(func, args), args, kwargs)
        results = [*results, *map(torch.empty_like, targets)]  # the functional form clones what it writes
        if not all(map(same_layout, targets, results[own:])):
            raise CaptureError(
                f"operator {calls.name_of(func)} at {users_line()} writes into a layout that it does not make by itself: make the "
                "tensors that it writes contiguous"
            )
        outputs = tuple(None if result is None else self.draft.new_value(result, calls.name_of(op)) for result in results)
        random = calls.is_random(func, args, kwargs)
        self._append(Node(calls.name_of(op), recorded[0], outputs, recorded[1], source=source), random)
        self._put(targets, outputs[own:], source)

    def _append(self, node: Node, random: bool) -> None:
        """Add a node; random ones in the order in which they draw, collectives in that in which they begin."""
        self._sums.note(len(self.draft.nodes))
        if gradients.rare_data.get():
            self.draft.ends.rare.update(value.name for value in node.results)
        if random:
            drawn = draw(node, next((self.draft.generators[value] for value in node.inputs if value in self.draft.generators), None))
            if drawn is not None:
                self.draft.nodes.extend(copies(node, drawn, self.draft.nodes))
                return
            if torch._C._current_autograd_node() is not None:
                raise CaptureError(
                    f"operator {node.op} draws random numbers in the backward pass, as torch.utils.checkpoint does when it repeats "
                    "a dropout with preserve_rng_state=False: its mask would not be the forward's. Remove the checkpointing: lowtide "
                    "decides what to recompute; or set the dropout to 0"
                )
            node = self._draws.next(node)
        self.draft.nodes.append(self._collectives.next(node) if begins_collective(node) else node)
