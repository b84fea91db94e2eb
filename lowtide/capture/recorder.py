"""Turns a running program into a graph in normal form, one operator at a time.

The program runs under fake tensors: no memory, no numerics. Each operator that reaches this mode has passed autograd, autocast and
every composite decomposition, so it is a kernel that eager PyTorch would run. Two facts decide what is recorded:

- Aliasing is what storages say. A tensor is looked up by its storage and its geometry, so that views, detached copies and a view of
  a view of a view are one and the same question, and an operator that makes no new value (detach, alias) leaves no node.
- A storage that the program made is written once. `y.add_(x)` on such a storage becomes `y2 = add(y, x)` on a new one, with leave to
work in
  place; a write through a view of it becomes a scatter. Values seen later through any old view are read from the new storage.
  Only storages of the caller (parameters, statistics, optimizer state) keep their in-place operators, each making a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowtide.capture import operators
from lowtide.capture.blocks import Block, Names, address, covers, geometry, in_memory_order, overlaps_itself, same_layout
from lowtide.capture.calls import UNTRACEABLE, atom_of, may_take, results_of, targets_of, tensors_in, why_untraceable
from lowtide.capture.corrections import corrected
from lowtide.capture.prune import needed
from lowtide.capture.sources import Sources, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Graph, Kind, Node, Source, Storage, Value
from lowtide.ir.slots import Slot

_IGNORED_NAMESPACES = {"prim", "profiler"}  # questions and marks, not computation
_SCATTER, _AS_STRIDED = "aten.as_strided_scatter.default", "aten.as_strided.default"


class Recorder(TorchDispatchMode):
    """Records what runs under it. `fork()` gives an independent continuation from the same point."""

    def __init__(self, fake_mode: FakeTensorMode, sources: Sources) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode, self.sources = fake_mode, sources
        self.kind = Kind.ACTIVATION  # of the storages that are made now
        self.inputs: list[Value] = []
        self.slots: list[Slot] = []
        self.nodes: list[Node] = []
        self.constants: list[torch.Tensor] = []
        self.scalar_of: Callable[[float], Value | None] = lambda number: None
        self.read_number: Callable[[torch.Tensor], float] | None = None  # what `item()` gives, where numbers can be traced
        self._blocks: dict[int, Block] = {}
        self._constant_fakes: dict[int, torch.Tensor] = {}
        self._names = Names()
        self._last_random: Node | None = None

    def fork(self) -> Recorder:
        """A recorder that continues from here and leaves this one as it is."""
        twin = Recorder(self.fake_mode, self.sources)
        twin.kind, twin.scalar_of, twin._last_random = self.kind, self.scalar_of, self._last_random
        twin.inputs, twin.slots, twin.nodes, twin.constants = list(self.inputs), list(self.slots), list(self.nodes), list(self.constants)
        twin._blocks = {key: block.fork() for key, block in self._blocks.items()}
        twin._constant_fakes, twin._names = dict(self._constant_fakes), self._names.fork()
        return twin

    # What goes in and out.

    def add_input(self, tensor: torch.Tensor, slot: Slot, kind: Kind, name: str) -> Value:
        """Declare a fake tensor that the caller owns and keeps at `slot`."""
        block = self._block_of(tensor)
        if block is None:
            storage = self._new_storage(tensor, name, kind)
            value = self._value_on(storage, tensor, storage.name)
            self._blocks[address(tensor)] = Block(tensor, value, owned=True)
        elif (known := block.views.get(geometry(tensor))) is not None:
            return known
        else:
            value = self._value_on(block.storage, tensor, self._names.unique(name))
            block.views[geometry(tensor)] = value
        self.inputs.append(value)
        self.slots.append(slot)
        return value

    def add_scalar_input(self, slot: Slot, name: str) -> Value:
        """Declare a Python number that the caller keeps at `slot`."""
        value = self.new_scalar(name)
        self.inputs.append(value)
        self.slots.append(slot)
        return value

    def new_scalar(self, name: str) -> Value:
        """A value that is a Python number."""
        unique = self._names.unique(name)
        return Value(unique, Storage(unique, 0, "cpu", Kind.SCALAR), "scalar", (), ())

    def emit_scalar(self, op: str, args: tuple[Arg, ...]) -> Value:
        """Record arithmetic on Python numbers ("py.mul"), or reading one from a tensor."""
        result = self.new_scalar(op.split(".")[1].strip("_"))
        self.nodes.append(Node(op, args, (result,), source=None))
        return result

    def value(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor of the running program is now."""
        if not isinstance(tensor, FakeTensor):
            tensor = self._constant(tensor)
        block = self._block_of(tensor)
        if block is None:
            raise CaptureError(f"a tensor of shape {tuple(tensor.shape)} came from outside of the captured program, at {users_line()}")
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError(
                f"a lazy conjugate or negative view is used at {users_line()}: make it with resolve_conj() or torch.conj_physical"
            )
        found = block.views.get(geometry(tensor))
        return found if found is not None else self._view_of_root(block, tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the caller owns the storage of `tensor`."""
        block = self._block_of(tensor)
        return block is not None and block.owned

    def graph(self, outputs: Iterable[Value]) -> tuple[Graph, tuple[Slot, ...]]:
        """What was recorded, less the nodes that nothing needs, and the slot of each input."""
        results = tuple(outputs)
        return Graph(tuple(self.inputs), needed(self.nodes, results), results), tuple(self.slots)

    # One operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run `func` on fake tensors and record what it does."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(f"operator {func} at {users_line()} has no schema: it cannot be part of a graph")
        if func.namespace in _IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._literal(args[0])
        args, kwargs = self._fake(args), self._fake(kwargs)
        if operators.changes_geometry_only(func):
            return self._reshape(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.read_number is not None:
            return self.read_number(args[0])
        if operators.draws_in_memory_order(func) and not args[0].is_contiguous() and covers(args[0]) and not self.owns(args[0]):
            self.__torch_dispatch__(func, types, (in_memory_order(args[0]), *args[1:]), kwargs)
            return args[0]
        if func._schema.is_mutable:
            args = operators.with_defaults(func, args)
        recorded = self._arguments(func, args), tuple((key, self._argument(func, item)) for key, item in kwargs.items())
        written = operators.written_positions(func, args)
        functional = self._functional_results(func, written, args, kwargs)
        try:
            out = corrected(func, args, func(*args, **kwargs))
        except UNTRACEABLE as error:
            raise CaptureError(why_untraceable(func, error)) from error
        source = self.sources.current()
        if not written:
            self._record(func, recorded, out, args, kwargs, source)
        elif functional is None:
            self._record_write_to_owned(func, recorded, out, args, kwargs, written, source)
        else:
            self._record_functional(func, recorded, args, kwargs, written, functional, source)
        return out

    def _reshape(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """An operator that changes how a tensor lies over its storage (`t_`, `squeeze_`): no node, later reads see the new geometry."""
        before = geometry(args[0])
        out = func(*args, **kwargs)
        if self.owns(args[0]) and geometry(args[0]) != before:
            name = operators.name_of(func)
            raise CaptureError(f"operator {name} at {users_line()} reshapes a tensor of the caller: use its out-of-place form")
        return out

    def _functional_results(self, func: OpOverload, written: tuple[int | str, ...], args: Any, kwargs: Any) -> list[Any] | None:
        """What the functional form of a writing operator returns, under fake tensors;

        None if the operator writes only what the caller owns.
        """
        targets = targets_of(written, args, kwargs)
        if any(map(overlaps_itself, targets)):
            raise CaptureError(f"operator {operators.name_of(func)} at {users_line()} writes to an expanded tensor: clone it first")
        owned = [self.owns(tensor) for tensor in targets]
        if all(owned):
            return None
        form = operators.functional_form(func)
        if any(owned) or form is None:
            reason = "writes tensors of the caller and of the step in one call" if any(owned) else "has no functional form"
            raise CaptureError(f"operator {operators.name_of(func)} at {users_line()} {reason}: use its out-of-place form")
        kept = {key: item for key, item in kwargs.items() if key not in written}
        return tensors_in(form(*args, **kept))

    def _record(self, func: OpOverload, recorded: Any, out: Any, args: Any, kwargs: Any, source: Source | None) -> None:
        """An operator that writes nothing."""
        name, tensors = operators.name_of(func), results_of(func, out)
        if any(t is not None and self._is_new(t) for t in tensors) or not tensors:
            outputs = tuple(None if t is None or not self._is_new(t) else self._new_value(t, name) for t in tensors)
            random = operators.is_random(func, args, kwargs)
            self._append(Node(name, recorded[0], outputs, recorded[1], inplace=may_take(func, recorded, outputs), source=source), random)

    def _record_write_to_owned(
        self, func: OpOverload, recorded: Any, out: Any, args: Any, kwargs: Any, written: tuple[int | str, ...], source: Source | None
    ) -> None:
        """An operator that writes storages of the caller: it stays as it is, and each written storage goes to its next version."""
        name = operators.name_of(func)
        writes: list[tuple[Value, Value]] = []
        for tensor in targets_of(written, args, kwargs):
            before, block = self.value(tensor), self._blocks[address(tensor)]
            if any(before.storage is done.storage for done, _ in writes):
                raise CaptureError(f"operator {name} at {users_line()} writes one storage through two arguments")
            after = self._value_on(
                block.storage, tensor, self._names.unique(f"{block.storage.name}_v{block.version + 1}"), block.version + 1
            )
            block.renew(after)
            writes.append((before, after))
        outputs = tuple(None if t is None or not self._is_new(t) else self._new_value(t, name) for t in results_of(func, out))
        random = operators.is_random(func, args, kwargs)
        self._append(Node(name, recorded[0], outputs, recorded[1], writes=tuple(writes), source=source), random)

    def _record_functional(
        self,
        func: OpOverload,
        recorded: Any,
        args: Any,
        kwargs: Any,
        written: tuple[int | str, ...],
        results: list[Any],
        source: Source | None,
    ) -> None:
        """An operator that writes storages of the step: its functional form makes new ones."""
        form = operators.functional_form(func)
        assert form is not None
        targets = targets_of(written, args, kwargs)
        random = operators.is_random(func, args, kwargs)
        if (random or isinstance(written[0], str)) and not all(map(same_layout, targets, results)):
            raise CaptureError(
                f"operator {operators.name_of(func)} at {users_line()} writes into another layout or dtype than it makes by itself, which "
                "may give other bits: use its result, and copy_ it where it is wanted"
            )
        kept = tuple((key, item) for key, item in recorded[1] if key not in written)
        covered = [covers(tensor) for tensor in targets]
        name = operators.name_of(form)
        if len(targets) == 1 and covered[0] and geometry(results[0])[:3] == geometry(targets[0])[:3]:
            outputs: tuple[Value, ...] = (self._new_value(results[0], name),)
            own = () if isinstance(written[0], str) else ((recorded[0][written[0]], operators.name_of(func)),)
            node = Node(name, recorded[0], outputs, kept, inplace=own + may_take(form, (recorded[0], kept), outputs), source=source)
            self._append(node, random)
            self._blocks[address(targets[0])].renew(outputs[0])
            return
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape:
            self._scatter(targets[0], self.value(args[1]), source)  # a scatter is a copy already
            return
        outputs = tuple(self._new_value(result, name) for result in results)
        self._append(Node(name, recorded[0], outputs, kept, source=source), random)
        for tensor, update in zip(targets, outputs, strict=True):
            self._scatter(tensor, update, source)

    def _scatter(self, tensor: torch.Tensor, update: Value, source: Source | None) -> None:
        """Make the storage that results from writing `update` where `tensor` lies."""
        block = self._blocks[address(tensor)]
        root, view = block.root, geometry(tensor)
        if view[0] != root.dtype:
            raise CaptureError(f"a write through a view of another dtype at {users_line()} cannot be captured: {view[0]} over {root.dtype}")
        storage = Storage(self._names.unique("scatter"), block.storage.nbytes, block.storage.device, self.kind)
        result = Value(storage.name, storage, root.dtype, root.shape, root.stride, root.offset)
        node = Node(_SCATTER, (root, update, view[1], view[2], view[3]), (result,), inplace=((root, _SCATTER),), source=source)
        self._append(node, random=False)
        block.renew(result)

    def _append(self, node: Node, random: bool) -> None:
        """Add a node; random ones in the order in which they draw."""
        if random:
            if torch._C._current_autograd_node() is not None:
                raise CaptureError(
                    f"operator {node.op} draws random numbers in the backward pass, as torch.utils.checkpoint does when it repeats "
                    "a dropout: "
                    "its mask would not be the forward's. Remove the checkpointing: lowtide decides what to recompute"
                )
            if self._last_random is not None:
                node = Node(
                    node.op, node.args, node.outputs, node.kwargs, node.writes, (self._last_random,), node.inplace, None, node.source
                )
            self._last_random = node
        self.nodes.append(node)

    # Values and storages.

    def _is_new(self, tensor: torch.Tensor) -> bool:
        block = self._block_of(tensor)
        return block is None or geometry(tensor) not in block.views

    def _new_value(self, tensor: torch.Tensor, op: str) -> Value:
        """The value of an operator's result: on a new storage, or a new view of one that is known."""
        base = op.split(".")[1].strip("_")
        block = self._block_of(tensor)
        if block is not None:
            value = self._value_on(block.storage, tensor, self._names.unique(base), block.version)
            block.views[geometry(tensor)] = value
            return value
        storage = self._new_storage(tensor, base, self.kind)
        value = self._value_on(storage, tensor, storage.name)
        self._blocks[address(tensor)] = Block(tensor, value, owned=False)
        return value

    def _view_of_root(self, block: Block, tensor: torch.Tensor) -> Value:
        """A view made before its storage was written, made again from what the storage is now."""
        view = geometry(tensor)
        if view[0] != block.root.dtype:
            raise CaptureError(
                f"a view of another dtype ({view[0]} over {block.root.dtype}), read at {users_line()} after a write, cannot be captured"
            )
        if block.storage.kind is Kind.INPUT:
            raise CaptureError(f"the batch is written in place through a view, at {users_line()}: clone it first")
        value = self._value_on(block.storage, tensor, self._names.unique("view"), block.version)
        self.nodes.append(Node(_AS_STRIDED, (block.root, view[1], view[2], view[3]), (value,), source=self.sources.current()))
        block.views[view] = value
        return value

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a {tensor.layout} tensor at {users_line()}: only dense tensors can be captured (sparse gradients are not supported)"
            )
        return self._blocks.get(address(tensor))

    def _new_storage(self, tensor: torch.Tensor, name: str, kind: Kind) -> Storage:
        return Storage(self._names.unique(name), int(tensor.untyped_storage().nbytes()), str(tensor.device), kind)

    def _value_on(self, storage: Storage, tensor: torch.Tensor, name: str, version: int = 0) -> Value:
        dtype, shape, stride, offset = geometry(tensor)
        return Value(name, storage, dtype, shape, stride, offset, version)

    # Tensors that are not the step's own.

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor that the program closes over, declared as an input on first sight."""
        if id(tensor) not in self._constant_fakes:
            if tensor.requires_grad:
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} that requires gradients, used at {users_line()}, is not a parameter "
                    "of the model: "
                    "make it one, so that the step can train it"
                )
            with _disable_current_modes():  # making a fake is no part of the program
                fake = self.fake_mode.from_tensor(tensor)
            self._constant_fakes[id(tensor)] = fake
            slot = Slot("constant", (len(self.constants),))
            self.constants.append(tensor)  # held, so that its id stays its own
            self.add_input(fake, slot, Kind.CONSTANT, "constant")
        return self._constant_fakes[id(tensor)]

    def _literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor written in the program (`torch.tensor(0.5)`): made anew in every step, as eager does."""
        source = self.sources.current()
        if tensor.numel() == 1:
            with _disable_current_modes():
                size, number = tuple(tensor.shape), tensor.item()
            options = {"dtype": tensor.dtype, "layout": tensor.layout, "device": tensor.device, "pin_memory": False}
            out: torch.Tensor = torch.ops.aten.lift_fresh.default(tensor)  # a fake that remembers its number, so that .item() still works
            args = (size, self._number(number))
            kwargs = tuple((key, self._argument(None, item)) for key, item in options.items())
            self._append(Node("aten.full.default", args, (self._new_value(out, "aten.full.default"),), kwargs, source=source), random=False)
            return out
        fake = self._constant(tensor)
        out = torch.ops.aten.lift_fresh_copy.default(fake)
        name = "aten.lift_fresh_copy.default"
        self._append(Node(name, (self.value(fake),), (self._new_value(out, name),), source=source), random=False)
        return out

    def _fake(self, tree: Any) -> Any:
        """Arguments with the fakes of real tensors in their places."""
        if isinstance(tree, torch.Tensor):
            return tree if isinstance(tree, FakeTensor) else self._constant(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._fake(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._fake(item) for key, item in tree.items()}
        return tree

    def _arguments(self, func: OpOverload, args: tuple[Any, ...]) -> tuple[Arg, ...]:
        return tuple(self._argument(func, item) for item in args)

    def _argument(self, func: OpOverload | None, item: Any) -> Arg:
        """An argument of an operator as the graph writes it."""
        if isinstance(item, torch.Tensor):
            return self.value(item)
        if item is None or isinstance(item, (bool, str, complex)):
            return item
        if isinstance(item, (int, float)):
            return self._number(item)
        if isinstance(item, (list, tuple)):
            return tuple(self._argument(func, part) for part in item)
        if (atom := atom_of(item)) is not None:
            return atom
        name = operators.name_of(func) if func is not None else "an operator"
        raise CaptureError(f"{name} at {users_line()} has an argument of type {type(item).__name__}, which a graph cannot hold")

    def _number(self, number: float) -> Arg:
        """A literal, or the scalar value that this number stands for."""
        value = self.scalar_of(number)
        return number if value is None else value
