"""A graph while it is written: its inputs, its nodes so far, and which value each tensor of the running program is now.

Aliasing is what storages say. A tensor is looked up by its storage and its geometry, so that views, detached copies and a view of a
view of a view are one and the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import calls
from lowtide.capture.blocks import Block, Ends, Names, address, covers, geometry, is_lazy
from lowtide.capture.calls import atom_of, may_take
from lowtide.capture.care.generators import is_default, which
from lowtide.capture.care.instances import lies_in_array
from lowtide.capture.data.batch_counts import BatchCounts
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.sizes.numbers import fraction_of
from lowtide.capture.sizes.symbols import Symbols, size_of
from lowtide.capture.sources import Sources, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Atom, Graph, HeldStorages, Kind, Node, Slot, Source, Storage, Value
from lowtide.ir.operators.row import AS_STRIDED, SCATTER
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import ITEM_BYTES, Size

CallArguments: TypeAlias = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # positional ones, then keywords with theirs
_WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # what a Python number is as a tensor
_KEEP_ZEROS = {f"aten::{name}" for name in ("mul", "div", "add", "sub", "neg", "clone", "dot", "vdot", "linalg_cross")}  # give such again
_COMPLEX_OF = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}
_QUANTISED = ": a quantised layer keeps its weights so; give the module as it was before it was quantised (in bfloat16, say)"


class Draft:
    """Knows the values of tensors and numbers. `fork()` gives an independent continuation from the same point."""

    def __init__(self, fake_mode: FakeTensorMode, sources: Sources, symbols: Symbols, trains: bool) -> None:
        self.fake_mode, self.sources, self.symbols, self.trains = fake_mode, sources, symbols, trains
        self.kind = Kind.ACTIVATION  # of the storages that are made now
        self.inputs: list[Value] = []
        self.slots: list[Slot] = []
        self.nodes: list[Node] = []
        self.constants: list[Any] = []  # tensors that the program closes over, generators that it draws from
        self.generators: dict[Value, torch.Generator] = {}  # those among them
        self.scalar_of: Callable[[float], Value | None] = lambda number: None  # what a number stands for, where one is traced
        self.read_number: Callable[[torch.Tensor], float] | None = None  # what `item()` gives, where numbers can be traced
        self.counts = BatchCounts()
        self.ends = Ends()
        self.shared: set[int] = set()  # addresses on which several of the caller's tensors lie
        self._blocks: dict[int, Block] = {}
        self._constant_fakes: dict[int, torch.Tensor] = {}
        self._names = Names()
        self._lazy: set[Value] = set()  # conjugates and negatives of what lies in memory
        self._in_arrays: set[Storage] = set()  # that lie in arrays of the caller's when the program runs by itself
        self._zeros: set[Storage] = set()  # that may have no memory when the step runs, as those of forward derivatives have none
        self._makers: dict[Value, Node] = {}
        self._makers_of = 0  # how many nodes those are of

    def fork(self) -> Draft:
        """A draft that continues from here and leaves this one as it is."""
        twin = Draft(self.fake_mode, self.sources, self.symbols, self.trains)
        twin.kind, twin.scalar_of, twin.ends = self.kind, self.scalar_of, self.ends
        twin.inputs, twin.slots, twin.nodes, twin.constants = list(self.inputs), list(self.slots), list(self.nodes), list(self.constants)
        twin.generators, twin.shared = dict(self.generators), set(self.shared)
        twin._blocks = {key: block.fork() for key, block in self._blocks.items()}
        twin._constant_fakes, twin._names, twin._lazy = dict(self._constant_fakes), self._names.fork(), set(self._lazy)
        twin._zeros, twin._in_arrays = set(self._zeros), set(self._in_arrays)
        return twin

    def let_go(self) -> None:
        """Hold no fake any more, now that nothing more is recorded: the numbers that were traced hold this draft, and one another."""
        self.scalar_of, self.read_number = lambda number: None, None
        self._constant_fakes.clear()

    # Inputs and numbers.

    def add_input(self, tensor: torch.Tensor, slot: Slot, kind: Kind, name: str) -> Value:
        """Declare a fake tensor that the caller owns and keeps at `slot`."""
        if is_lazy(tensor):
            raise CaptureError(f"{slot} is a lazy conjugate or negative view: keep it as resolve_conj() or resolve_neg() makes it")
        block = self._block_of(tensor)
        if block is None:
            storage = self._new_storage(tensor, name, kind)
            value = self._value_on(storage, tensor, storage.name)
            self._blocks[address(tensor)] = Block(tensor, value, owned=True)
        elif not block.owned:
            raise CaptureError(f"{slot} shares memory with a tensor whose data the program has put elsewhere, at {users_line()}: clone it")
        else:
            self.shared.add(address(tensor))
            value = self._value_on(block.storage, tensor, self._names.unique(name))
        self.inputs.append(value)  # also where another lies there in the same way: each call asks whether it still does
        self.slots.append(slot)
        block = self._blocks[address(tensor)]
        if block.version:  # the step has written there: what lies there now is seen through what it has written
            return self.value(tensor)
        return block.views.setdefault(geometry(tensor), value)

    def add_scalar_input(self, slot: Slot, name: str) -> Value:
        """Declare a Python number that the caller keeps at `slot`."""
        value = self.new_scalar(name)
        self.inputs.append(value)
        self.slots.append(slot)
        return value

    def new_scalar(self, name: str) -> Value:
        unique = self._names.unique(name)
        return Value(unique, Storage(unique, 0, "cpu", Kind.SCALAR), "scalar", (), ())

    def emit_scalar(self, op: str, args: tuple[Arg, ...]) -> Value:
        """Record arithmetic on Python numbers ("py.mul"), or reading one from a tensor."""
        result = self.new_scalar(op.split(".")[1].strip("_"))
        self.nodes.append(Node(op, args, (result,), source=None))
        return result

    def number(self, item: torch.SymInt | torch.SymFloat) -> Value:
        """A size, or a number that follows from one, as a number of the program."""
        written = self._argument(None, item)
        return written if isinstance(written, Value) else self.emit_scalar("py.mul", (written, 1))

    # Tensors and the storages that they lie on.

    def value(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor of the running program is now."""
        if not isinstance(tensor, FakeTensor):
            tensor = self._constant(tensor)
        block = self._block_of(tensor)
        if block is None:
            raise LeavingError(
                f"a tensor of shape {tuple(tensor.shape)}, read at {users_line()}, is one that the program has left outside when it ran "
                "before; a captured step would not put it there: keep what goes on in a tensor that each step writes in place "
                "(`mean.mul_(0.9).add_(loss.detach())`)"
            )
        value = block.views.get(geometry(tensor))
        return value if value is not None else self._view_of_root(block, tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        block = self._block_of(tensor)
        return block is not None and block.owned

    def memory(self, tensor: torch.Tensor) -> tuple[bool, Size, bool] | None:
        """What decides of the memory on which a tensor lies: whether the caller owns it, and its size; None where more than that counts."""
        block = self._block_of(tensor)
        return None if block is None or block.former else (block.owned, block.storage.nbytes, block.storage.kind.caller_owned)

    @property
    def holds_zeros(self) -> bool:
        """Whether some tensors may have no memory when the step runs."""
        return bool(self._zeros)

    def makers(self) -> dict[Value, Node]:
        """The node that made each value, or wrote it."""
        self._makers |= {value: node for node in self.nodes[self._makers_of :] for value in node.results}
        self._makers_of = len(self.nodes)
        return self._makers

    def age(self) -> Callable[[torch.Tensor], int]:
        """How many nodes had been recorded when a tensor was made; -1 of what was there before."""
        ages = {value: number for number, node in enumerate(self.nodes) for value in node.results}
        return lambda tensor: ages.get(self.value(tensor), -1)

    def storages(self) -> list[tuple[StorageWeakRef, Storage]]:
        """The storages seen here, held by none, and what they are in the graph."""
        return [(block.ref, block.storage) for block in self._blocks.values()]

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether no value is known for `tensor` as it lies."""
        block = self._block_of(tensor)
        return block is None or geometry(tensor) not in block.views

    def new_value(self, tensor: torch.Tensor, op: str) -> Value:
        """The value of an operator's result: on a new storage, or a new view of one that is known."""
        base = op.split(".")[1].strip("_")
        block = self._block_of(tensor)
        if block is not None:
            value = self._value_on(block.storage, tensor, self._names.unique(base), block.version)
            block.views[geometry(tensor)] = value
            return value
        storage = self._new_storage(tensor, base, self.kind)
        if tensor._is_zerotensor():
            self._zeros.add(storage)
        value = self._value_on(storage, tensor, storage.name)
        self._follow(tensor, value)
        return value

    def renew(self, tensor: torch.Tensor, value: Value) -> None:
        """The content of the storage that `tensor` lies on is now `value`."""
        block = self._blocks.get(address(tensor))
        if block is None:
            self._follow(tensor, value)
        else:
            _refuse_former(block)
            block.renew(value)

    def _follow(self, tensor: torch.Tensor, value: Value) -> None:
        self._blocks[address(tensor)] = Block(tensor, value, owned=False)
        self.ends.follow(tensor)

    def unused_name(self, name: str) -> str:
        return self._names.unique(name)

    def last_nodes(self) -> dict[Storage, Node]:
        """The last node that was recorded before each storage of the step was let go, of those that were."""
        return self.ends.last_nodes(self._blocks.items(), self.nodes)

    def content(self, tensor: torch.Tensor) -> Value | None:
        """The value of all of the storage that a tensor is on; None where it is on a part, or others of the caller's lie there."""
        block = self._block_of(tensor)
        return None if block is None or block.former or address(tensor) in self.shared or not covers(tensor) else block.root

    def keep(self, tensor: torch.Tensor, value: Value) -> None:
        """A tensor on a storage of its own is this value, which has been made."""
        self._follow(tensor, value)

    def is_as_plain_as(self, earlier: Draft) -> bool:
        """Whether nothing was recorded since beside nodes and inputs."""
        mine, its = ((each.constants, each.generators, each._lazy, each._zeros, each._in_arrays) for each in (self, earlier))
        return [*map(len, mine)] == [*map(len, its)]

    def held_storages(self, whole: Graph) -> HeldStorages:
        """What eager holds on to in the program as it was recorded."""
        return HeldStorages((), self.ends.until(self._blocks.items(), self.nodes, whole.nodes), frozenset(self.ends.summed))

    def moved(self, old: torch.Tensor, new: torch.Tensor, kept: torch.Tensor) -> None:
        """The caller's storage on which `old` lies is that of `new` from here on; who still looks at the old one sees `kept`."""
        block = self._blocks[address(old)]
        self._blocks[address(new)] = Block(new, block.root, owned=True)
        self._blocks[address(old)] = Block(old, self.value(kept), owned=False, former=True)

    def stands_for(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """The program means this fake where it uses a real tensor."""
        self._constant_fakes[id(real)] = fake

    def next_version(self, tensor: torch.Tensor) -> Value:
        """`tensor` after a write through it; its storage goes to the next version."""
        block = self._blocks[address(tensor)]
        version = block.version + 1
        after = self._value_on(block.storage, tensor, self._names.unique(f"{block.storage.name}_v{version}"), version)
        block.renew(after)
        return after

    def scatter(self, tensor: torch.Tensor, update: Value, source: Source | None) -> None:
        """Make the storage that results from writing `update` where `tensor` lies."""
        block = self._blocks[address(tensor)]
        _refuse_former(block)
        view = geometry(tensor)
        root = self._root_as(block, view[0])
        storage = Storage(self._names.unique("scatter"), block.storage.nbytes, block.storage.device, self.kind)
        result = Value(storage.name, storage, root.dtype, root.shape, root.stride, root.offset)
        node = Node(SCATTER, (root, update, view[1], view[2], view[3]), (result,), inplace=((root, SCATTER),), source=source)
        self.nodes.append(node)
        block.renew(result)

    def may_take(self, func: OpOverload, recorded: Any, outputs: tuple[Value | None, ...]) -> tuple[tuple[Value, str], ...]:
        """The inputs whose memory the result may take over; of a lazy one only its bytes lie there."""
        given = Node("", recorded[0], (), recorded[1]).inputs if self._zeros and func._schema.name in _KEEP_ZEROS else ()
        if any(each.storage in self._zeros for each in given):
            self._zeros.update(each.storage for each in outputs if each is not None)
        pairs = may_take(func, recorded, outputs)
        return tuple(each for each in pairs if each[0] not in self._lazy and each[0].storage not in self._zeros)

    def _view_of_root(self, block: Block, tensor: torch.Tensor) -> Value:
        """A view made before its storage was written, made again from what the storage is now."""
        view = geometry(tensor)
        if block.storage.kind is Kind.INPUT:
            raise CaptureError(f"the batch is written in place through a view, at {users_line()}: clone it first")
        value = self._root_as(block, view[0])
        if (value.shape, value.stride, value.offset) != view[1:4]:
            value = self._new_view(block, AS_STRIDED, (value, *view[1:4]), view)
        block.views[view] = self._lazy_view(value, tensor)
        return block.views[view]

    def _root_as(self, block: Block, dtype: str) -> Value:
        """A view of a block's root, from which every view of this dtype can be made."""
        root = block.root
        if root.dtype == dtype:
            return root
        if root.dtype == _COMPLEX_OF.get(dtype):
            shape, stride = (*root.shape, 2), (*(normal(2 * step) for step in root.stride), 1)
            return self._new_view(block, "aten.view_as_real.default", (root,), (dtype, shape, stride, normal(2 * root.offset)))
        pairs = _pairs_of(root)
        if dtype == _COMPLEX_OF.get(root.dtype) and pairs is not None:
            return self._new_view(block, "aten.view_as_complex.default", (root,), (dtype, *pairs))
        larger = max(ITEM_BYTES[root.dtype], ITEM_BYTES[dtype])
        size = block.storage.nbytes
        count = size // larger if isinstance(size, int) else normal(size / larger)  # of whole elements of both
        flat = (count * (larger // ITEM_BYTES[root.dtype]),), (1,), 0
        same = self._new_view(block, AS_STRIDED, (root, *flat), (root.dtype, *flat))
        shape = (count * (larger // ITEM_BYTES[dtype]),)
        return self._new_view(block, "aten.view.dtype", (same, Atom("dtype", dtype)), (dtype, shape, (1,), 0))

    def _new_view(self, block: Block, op: str, args: tuple[Arg, ...], view: tuple[Any, ...]) -> Value:
        """A view of a block as it is now, by an operator of the recorder's own."""
        dtype, shape, stride, offset = view[:4]
        value = Value(self._names.unique("view"), block.storage, dtype, shape, stride, offset, block.version)
        self.nodes.append(Node(op, args, (value,), source=self.sources.current()))
        return value

    def _lazy_view(self, value: Value, tensor: torch.Tensor) -> Value:
        """What a lazy conjugate or negative tensor is, given the value of the bytes that it lies on."""
        for op, applies in (("aten._conj.default", tensor.is_conj()), ("aten._neg_view.default", tensor.is_neg())):
            if applies:
                view = self._value_on(value.storage, tensor, self._names.unique("view"), value.version)
                self.nodes.append(Node(op, (value,), (view,), source=self.sources.current()))
                value = view
        return value

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a {tensor.layout} tensor at {users_line()}: only dense tensors can be captured: embeddings with sparse=False; "
                "of a sparse matrix its indices and values: `torch.zeros(size).index_put(tuple(indices), values, accumulate=True)` is the "
                "matrix, index_select and index_add make a product"
            )
        return self._blocks.get(address(tensor))

    def _new_storage(self, tensor: torch.Tensor, name: str, kind: Kind) -> Storage:
        return Storage(self._names.unique(name), size_of(tensor.untyped_storage().nbytes()), str(tensor.device), kind)

    def _value_on(self, storage: Storage, tensor: torch.Tensor, name: str, version: int = 0) -> Value:
        dtype, shape, stride, offset, _, _ = geometry(tensor)
        value = Value(name, storage, dtype, shape, stride, offset, version)
        if is_lazy(tensor):
            self._lazy.add(value)
        return value

    # Tensors that are not the step's own.

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor that the program closes over, declared as an input on first sight."""
        if id(tensor) not in self._constant_fakes:
            with _disable_current_modes():  # making a fake is no part of the program
                fake = self.fake_mode.from_tensor(tensor.detach() if tensor.requires_grad else tensor)
            self._constant_fakes[id(tensor)] = fake
            slot = Slot("constant", (len(self.constants),))
            self.constants.append(tensor)  # held, so that its id stays its own
            self.add_input(fake, slot, Kind.CONSTANT, "constant")
        return self._constant_fakes[id(tensor)]

    def literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor written in the program (`torch.tensor(0.5)`): made anew in every step, as eager does."""
        out = self._literal(tensor)
        if lies_in_array(tensor):
            self._in_arrays.add(self.value(out).storage)
        return out

    def refuse_writing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise CaptureError for what lies in an array of the caller's, of which a step has a copy."""
        if self._in_arrays and any(self.value(each).storage in self._in_arrays for each in tensors):
            raise CaptureError(
                f"the program writes at {users_line()} into an array of NumPy's by way of a tensor that it makes of that (from_numpy, "
                "as_tensor), which a step would not: make the tensor once, before the step, or keep it in a buffer"
            )

    def _literal(self, tensor: torch.Tensor) -> torch.Tensor:
        source = self.sources.current()
        if tensor.numel() == 1:
            with _disable_current_modes():
                size, number = tuple(tensor.shape), tensor.item()
            if self.read_number is None:
                out: torch.Tensor = torch.ops.aten.lift_fresh.default(tensor)  # a fake that has its number, so that .item() works
            else:  # what is computed of a number that is traced is asked of the graph
                out = torch.empty_strided(size, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            args = (size, self._number(number))
            kwargs = tuple((key, self._argument(None, item)) for key, item in calls.options_like(tensor).items())
            self.nodes.append(Node("aten.full.default", args, (self.new_value(out, "aten.full.default"),), kwargs, source=source))
            return out
        fake = self._constant(tensor)
        out = torch.ops.aten.lift_fresh_copy.default(fake)
        name = "aten.lift_fresh_copy.default"
        self.nodes.append(Node(name, (self.value(fake),), (self.new_value(out, name),), source=source))
        return out

    def literal_number(self, number: complex) -> torch.Tensor:
        """A Python number as the tensor that eager PyTorch wraps it in."""
        with _disable_current_modes():
            tensor = torch.tensor(number, dtype=_WRAPPED[type(number)])
        return self.literal(tensor)

    def fake(self, tree: Any) -> Any:
        """Arguments with the fakes of real tensors in their places."""
        if isinstance(tree, torch.Tensor):
            return tree if isinstance(tree, FakeTensor) else self._constant(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.fake(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self.fake(item) for key, item in tree.items()}
        return tree

    def arguments(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        return tuple(self._argument(func, item) for item in args), tuple((key, self._argument(func, item)) for key, item in kwargs.items())

    def _argument(self, func: OpOverload | None, item: Any) -> Arg:
        """An argument of an operator as the graph writes it."""
        if isinstance(item, torch.Tensor):
            return self.value(item)
        if item is None or isinstance(item, (bool, str, complex)):
            return item
        if isinstance(item, (int, float)):
            return self._number(item)
        if isinstance(item, torch.SymInt):
            return size_of(item)
        if isinstance(item, torch.SymFloat):
            return fraction_of(item, self.emit_scalar)
        if isinstance(item, (list, tuple)):
            return tuple(self._argument(func, piece) for piece in item)
        if isinstance(item, torch.Generator):
            return None if is_default(item) else self._generator(item)
        if (atom := atom_of(item)) is not None:
            return atom
        name = calls.name_of(func) if func is not None else "an operator"
        remedy = _QUANTISED if isinstance(item, torch.ScriptObject) else ""
        raise CaptureError(f"{name} at {users_line()} has an argument of type {type(item).__name__}, which a graph cannot hold{remedy}")

    def _generator(self, generator: torch.Generator) -> Value:
        """A generator of the program's own, declared as an input on first sight: a value of no bytes, as a number is."""
        known = next((value for value, each in self.generators.items() if which(each) == which(generator)), None)
        if known is None:
            known = self.add_scalar_input(Slot("constant", (len(self.constants),)), "generator")
            self.constants.append(generator)
            self.generators[known] = generator
        return known

    def _number(self, number: float) -> Arg:
        """A literal, or the scalar value that this number stands for."""
        value = self.scalar_of(number) or self.counts.share_of(self.emit_scalar, number)
        return number if value is None else value


def _pairs_of(value: Value) -> tuple[tuple[Size, ...], tuple[Size, ...], Size] | None:
    """Shape, strides and offset of the complex numbers that real ones lie for in pairs; None where they do not."""
    steps = [step for step in (*value.stride[:-1], value.offset) if isinstance(step, int) and step % 2 == 0]
    if value.shape[-1:] != (2,) or value.stride[-1:] != (1,) or len(steps) < len(value.stride):
        return None
    return value.shape[:-1], tuple(step // 2 for step in steps[:-1]), steps[-1] // 2


def _refuse_former(block: Block) -> None:
    """Raise CaptureError for a write of old data that others may look at, in the place of which the program has put new ones."""
    if block.former:
        raise CaptureError(
            f"data are written at {users_line()} after the program has put others in their place (`.data = ...`): clone them first"
        )
