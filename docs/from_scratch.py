"""lowtide from scratch: a memory optimizer for training steps, once more, in one file that you can read from top to bottom.

    python docs/from_scratch.py

It captures a training step as a list of operators, finds an order of them that needs less memory, keeps to a limit by computing
tensors again, runs the result, and compares all that with plain PyTorch: the numbers must be equal to the last bit, and the peaks must
be those that were promised. The library does each of these steps better; after each section a remark says how.

Bytes are counted above what the caller holds (parameters, the optimizer's state, the batch), which no plan can move.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

# 0. The program that is to be optimized: any model and optimizer in the usual loop.


class Block(nn.Module):
    """One block of a transformer: attention, then a perceptron, each beside a shortcut. [batch, length, width] in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small transformer and its optimizer, the same at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), *(Block(128) for _ in range(3)), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [2, 32, 32] and classes [2, 32]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 32, 32, generator=generator), torch.randint(10, (2, 32), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step, as everybody writes it."""
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# 1. Capture. Memory belongs to storages, not to tensors: a view (`x.t()`, `x[0]`, `x.detach()`) takes none. So a graph is a list of
#    nodes that make, read and write *storages*, and a tensor is only a way to look at one: sizes, strides, an offset.


class View(NamedTuple):
    """A tensor in the graph: which storage, and how it lies there."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Node:
    """One operator call. Tensors among its arguments are `View`s."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]  # by result: the storage that it makes; None for a view of something that is there already
    reads: set[int]
    writes: set[int]  # of the caller's storages: parameters, the optimizer's state
    after: set[int] = field(default_factory=set)  # nodes that must have run

    @property
    def makes(self) -> set[int]:
        return {storage for storage in self.results if storage is not None}


class Recorder(TorchDispatchMode):
    """Every operator that runs under it becomes a node. It sits below autograd, so backward passes arrive here like all else."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.nbytes: list[int] = []  # by storage
        self.number: dict[int, int] = {}  # from torch's storage to ours
        self.alive: list[Tensor] = []  # a storage that is freed could give its identity to another
        for tensor in held:
            self.new_storage(tensor)
        self.held = len(held)  # the first storages are the caller's

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        written = [args[i] for i, argument in enumerate(op._schema.arguments) if argument.alias_info and argument.alias_info.is_write]
        if not written or self.storage_of(written[0]) < self.held:
            result = op(*args, **(kwargs or {}))
            self.record(op, args, kwargs or {}, result, [self.storage_of(tensor) for tensor in written])
            return result
        # A write to a tensor of the step itself, `y.add_(x)`, becomes `y2 = y.add(x)`; from now on y's storage means that of y2. Then each
        # storage of the step is written once, by the node that makes it, and that node can run again.
        (target,) = written
        pure = getattr(getattr(torch.ops.aten, op._schema.name.split("::")[1].removesuffix("_")), op._overloadname)
        result = pure(*args, **(kwargs or {}))
        assert (result.stride(), result.numel()) == (target.stride(), target.untyped_storage().nbytes() // target.element_size()), op
        self.record(pure, args, kwargs or {}, result, [])
        self.number[target.untyped_storage()._cdata] = self.storage_of(result)
        return target

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, writes: list[int]) -> None:
        reads: set[int] = set()
        recorded = self.as_views(args, reads), self.as_views(kwargs, reads)
        results = [self.new_storage(t) if self.is_new(t) else None for t in (result if isinstance(result, (tuple, list)) else [result])]
        if writes or any(storage is not None for storage in results):  # else it only makes views, which are no nodes
            self.nodes.append(Node(op, *recorded, results, reads, set(writes)))

    def as_views(self, item: Any, reads: set[int]) -> Any:
        if isinstance(item, Tensor):
            view = View(self.storage_of(item), tuple(item.size()), item.stride(), item.storage_offset())
            reads.add(view.storage)
            return view
        if isinstance(item, dict):
            return {key: self.as_views(value, reads) for key, value in item.items()}
        return type(item)(self.as_views(each, reads) for each in item) if isinstance(item, (list, tuple)) else item

    def new_storage(self, tensor: Tensor) -> int:
        storage = self.number[tensor.untyped_storage()._cdata] = len(self.nbytes)
        self.nbytes.append(tensor.untyped_storage().nbytes())
        self.alive.append(tensor)
        return storage

    def storage_of(self, tensor: Tensor) -> int:
        return self.number[tensor.untyped_storage()._cdata]

    def is_new(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.number


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """What the caller holds, always in the same order."""
    parameters = list(model.parameters())
    return [*parameters, *(optimizer.state[parameter]["momentum_buffer"] for parameter in parameters), *batch]


@dataclass
class Graph:
    """A captured step."""

    nodes: list[Node]
    nbytes: list[int]  # by storage
    held: int  # storages below are the caller's
    loss: int  # the storage to hand back

    def __post_init__(self) -> None:
        self.maker = {storage: index for index, node in enumerate(self.nodes) for storage in node.makes}
        self.readers: dict[int, set[int]] = defaultdict(set)
        last_write: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            node.after = {self.maker[s] for s in self.made(node.reads)} | {last_write[s] for s in node.reads if s in last_write}
            for storage in node.writes:  # a write waits for all that read what it replaces
                node.after |= self.readers[storage]
                last_write[storage] = index
            for storage in node.reads:
                self.readers[storage].add(index)
            node.after.discard(index)

    def made(self, storages: set[int]) -> set[int]:
        """Those that the step makes, without the caller's."""
        return {storage for storage in storages if storage >= self.held}

    def bytes_of(self, storages: set[int]) -> int:
        return sum(self.nbytes[storage] for storage in storages)


def capture() -> Graph:
    """Runs a twin of the training under fake tensors, which have shapes but no data, and records its second step.

    The first step makes the optimizer's state, so that it is there to be found.
    """
    with FakeTensorMode() as fakes:
        model, optimizer = make_training()
        batch = tuple(fakes.from_tensor(tensor) for tensor in make_batch(0))
        train(model, optimizer, *batch)
        with Recorder(held_tensors(model, optimizer, batch)) as recorder:
            loss = train(model, optimizer, *batch)
        return Graph(recorder.nodes, recorder.nbytes, recorder.held, recorder.storage_of(loss))


# lowtide also takes optimizers that compute with Python numbers (Adam), keeps random numbers as they are, notices when the
# program changes between two steps, and works in place again where it may.

# 2. Memory. A storage lives from the node that makes it to the last that reads it, or to the next that makes it again. One pass from
#    the end to the start is enough: what is alive before a node is what is alive after it, plus what it reads, less what it makes.


def footprints(graph: Graph, sequence: list[int]) -> tuple[list[int], list[set[int]]]:
    """By step of a sequence of nodes, in which nodes may come more than once: the bytes in use, and what is to be freed after it."""
    in_use, freed = [0] * len(sequence), [set[int]()] * len(sequence)
    alive = {graph.loss}
    for step in reversed(range(len(sequence))):
        node = graph.nodes[sequence[step]]
        during = alive | node.makes | graph.made(node.reads)
        in_use[step], freed[step] = graph.bytes_of(during), during - alive
        alive = during - node.makes
    return in_use, freed


def peak_bytes(graph: Graph, sequence: list[int]) -> int:
    return max(footprints(graph, sequence)[0])


# lowtide also counts what an operator takes for itself while it runs, which it learns by trying each operator once.

# 3. Order. Any order that keeps to `after` computes the same numbers. Which one peaks lowest? What is alive depends only on the *set* of
#    nodes that have run. So a beam search keeps, for each number of executed nodes, the most promising sets.


class Partial(NamedTuple):
    """Some best way to have run a set of nodes."""

    peak_bytes: int
    alive_bytes: int
    last: int  # the node that ran last
    before: Partial | None


def order(graph: Graph, width: int = 16) -> list[int]:
    """An order with a low peak. Sets of nodes are bits of an integer."""
    after = [sum(1 << index for index in node.after) for node in graph.nodes]
    readers = {storage: sum(1 << index for index in graph.readers[storage]) for storage in graph.maker}
    beam = {0: Partial(0, 0, -1, None)}
    for _ in graph.nodes:
        found: dict[int, Partial] = {}
        for done, state in beam.items():
            ready = [i for i, needed in enumerate(after) if not done >> i & 1 and needed & ~done == 0]
            steps = [(i, done | 1 << i, _run(graph, readers, done | 1 << i, state, i)) for i in ready]
            # A node that leaves no more alive than before, and does not raise the peak, may as well run at once.
            free = [step for step in steps if step[2].alive_bytes <= state.alive_bytes and step[2].peak_bytes == state.peak_bytes]
            for _, now, then in free[:1] or steps:
                if now not in found or then[:2] < found[now][:2]:
                    found[now] = then
        beam = dict(sorted(found.items(), key=lambda item: item[1][:2])[:width])
    (state,) = beam.values()
    found_order = []
    while state.before is not None:
        found_order.append(state.last)
        state = state.before
    return min(found_order[::-1], list(range(len(graph.nodes))), key=lambda each: peak_bytes(graph, each))


def _run(graph: Graph, readers: dict[int, int], done: int, state: Partial, index: int) -> Partial:
    node = graph.nodes[index]
    during = state.alive_bytes + graph.bytes_of(node.makes)
    freed = {storage for storage in node.makes | graph.made(node.reads) if readers[storage] & ~done == 0 and storage != graph.loss}
    return Partial(max(state.peak_bytes, during), during - graph.bytes_of(freed), index, state)


# lowtide searches exactly: minimum cuts bound every order from below, and on training steps that bound is mostly met at once.

# 4. A limit. Walk along the order. Where the next node does not fit, evict a tensor: the one that costs least to compute again, for its
#    bytes and for the time until it is needed. Where a node reads what was evicted, run that tensor's maker again.


class DoesNotFitError(Exception):
    """Nothing is left to evict."""


class Eviction:
    """Turns an order into a sequence within a limit, in which nodes may run again."""

    def __init__(self, graph: Graph, order: list[int], limit_bytes: int) -> None:
        self.graph, self.limit_bytes = graph, limit_bytes
        self.uses = {s: [step for step, index in enumerate(order) if index in graph.readers[s]][::-1] for s in graph.maker}
        self.uses[graph.loss] = [len(order)]
        self.alive: set[int] = set()
        self.evicted: set[int] = set()
        self.overwritten: set[int] = set()  # storages of the caller that no longer hold what the forward pass read
        self.sequence: list[int] = []
        for self.step, index in enumerate(order):
            self.run(index, set())

    def run(self, index: int, pinned: set[int]) -> None:
        """Runs a node, after what it reads has been computed again where it is gone. `pinned` must stay: a node further out reads it."""
        node = self.graph.nodes[index]
        inputs = self.graph.made(node.reads)
        for storage in sorted(inputs | self.last_call(node.writes)):
            if storage not in self.alive:
                self.run(self.graph.maker[storage], pinned | inputs)
        if node.reads & self.overwritten and index in self.sequence:
            raise DoesNotFitError
        self.make_room(node.makes, pinned | inputs)
        self.sequence.append(index)
        self.overwritten |= node.writes
        self.alive |= node.makes
        self.evicted -= node.makes

    def last_call(self, writes: set[int]) -> set[int]:
        """What was evicted and could not be computed again once these storages of the caller have been written."""
        return {storage for storage in self.evicted if writes and self.held_reads({storage}, self.alive) & writes}

    def make_room(self, makes: set[int], pinned: set[int]) -> None:
        """Evicts until a node's results fit."""
        while self.graph.bytes_of(self.alive | makes) > self.limit_bytes:
            victim = next(filter(self.may_go, sorted(self.alive - pinned, key=self.regret)), None)
            if victim is None:
                raise DoesNotFitError
            self.alive.remove(victim)
            if self.next_use(victim) is not None:
                self.evicted.add(victim)

    def may_go(self, storage: int) -> bool:
        """Whether all that is evicted, this one included if it is wanted, could still be computed as it was."""
        wanted = self.evicted | ({storage} if self.next_use(storage) is not None else set())
        return not self.overwritten or not self.held_reads(wanted, self.alive - {storage}) & self.overwritten

    def regret(self, storage: int) -> float:
        """What it costs to have a tensor again, for each byte and step that it is away; 0 where nobody reads it any more."""
        until = self.next_use(storage)
        maker = self.graph.nodes[self.graph.maker[storage]]
        return 0.0 if until is None else cost(self.graph, maker) / (self.graph.nbytes[storage] * (until - self.step + 1))

    def held_reads(self, storages: set[int], alive: set[int]) -> set[int]:
        """What of the caller's is read to have tensors again, also for those of their inputs that are gone."""
        found, gone, seen = set[int](), list(storages), set(storages)
        while gone:
            reads = self.graph.nodes[self.graph.maker[gone.pop()]].reads
            made = self.graph.made(reads)
            found |= reads - made
            gone += made - alive - seen
            seen |= made
        return found

    def next_use(self, storage: int) -> int | None:
        """The step that reads a tensor next, this one included."""
        while self.uses[storage] and self.uses[storage][-1] < self.step:
            self.uses[storage].pop()
        return self.uses[storage][-1] if self.uses[storage] else None


def cost(graph: Graph, node: Node) -> float:
    """A guess at a node's time: its bytes, and 50 times as much where it multiplies matrices."""
    nbytes = sum(graph.nbytes[storage] for storage in node.reads | node.makes)
    return nbytes * (50 if any(name in str(node.op) for name in ("mm", "attention", "convolution")) else 1)


# lowtide measures each operator's time, tries thousands of sequences that differ in what is evicted, plans repeated blocks once, copies
# tensors to the host's memory where that is cheaper, and keeps the whole frontier of memory against time.

# 5. Run. A sequence is a program: look at the storages as each node wants to see them, call the operator, let go of what is over.


class Program:
    """A training step that runs a sequence on the caller's own tensors."""

    def __init__(self, graph: Graph, sequence: list[int]) -> None:
        self.graph, self.sequence, self.freed = graph, sequence, footprints(graph, sequence)[1]

    @torch.no_grad()
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        """Trains one step and returns the loss."""
        tensors = dict(enumerate(held_tensors(model, optimizer, batch)))
        for index, freed in zip(self.sequence, self.freed, strict=True):
            node = self.graph.nodes[index]
            results = node.op(*as_tensors(node.args, tensors), **as_tensors(node.kwargs, tensors))
            for storage, result in zip(node.results, results if isinstance(results, (tuple, list)) else [results], strict=True):
                if storage is not None:
                    tensors[storage] = result
            del results, result  # a name that is left over would hold memory
            for storage in freed:
                del tensors[storage]
        return tensors[self.graph.loss]


def as_tensors(item: Any, tensors: dict[int, Tensor]) -> Any:
    """Arguments with real tensors in the place of `View`s."""
    if isinstance(item, View):
        return tensors[item.storage].as_strided(item.size, item.stride, item.offset)
    if isinstance(item, dict):
        return {key: as_tensors(value, tensors) for key, value in item.items()}
    return type(item)(as_tensors(each, tensors) for each in item) if isinstance(item, (list, tuple)) else item


# lowtide writes such a program as Python source, and can serve its memory from one arena with planned addresses.

# 6. Compare. Train eagerly and by each plan, from the same start, and ask the allocator what each took.


def measured_peak_bytes(call: Any) -> int:
    """The allocator's highest level during a call, above the level at its start."""
    call()  # makes what is made once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def trained(step: Any, steps: int = 3) -> tuple[list[Tensor], int]:
    """All losses, parameters and momenta after some steps, and the peak of one more. The first step is eager: it makes the momenta."""
    model, optimizer = make_training()
    losses = [train(model, optimizer, *make_batch(0)), *(step(model, optimizer, *make_batch(i)) for i in range(1, steps))]
    numbers = [tensor.detach().clone() for tensor in [*losses, *held_tensors(model, optimizer, ())]]
    return numbers, measured_peak_bytes(lambda: step(model, optimizer, *make_batch(steps)))


def main() -> None:
    """Plan, train, compare, print."""
    graph = capture()
    print(f"captured: {len(graph.nodes)} operators")
    eager, eager_bytes = trained(train)
    print(f"{'':>24}{'promised':>12}{'measured':>12}{'run again':>11}  numbers")
    print(f"{'eager PyTorch':>24}{'':>12}{mib(eager_bytes)}{'':>11}")
    least = order(graph)
    plans = {"captured order": list(range(len(graph.nodes))), "better order": least}
    for share in (0.6, 0.5):
        plans[f"at most {share:.0%} of eager"] = Eviction(graph, least, int(share * eager_bytes)).sequence
    for name, sequence in plans.items():
        numbers, taken_bytes = trained(Program(graph, sequence))
        same = all(torch.equal(one, two) for one, two in zip(eager, numbers, strict=True))
        again = len(sequence) - len(graph.nodes)
        verdict = "equal to the last bit" if same else "DIFFERENT"
        print(f"{name:>24}{mib(peak_bytes(graph, sequence))}{mib(taken_bytes)}{again:>11}  {verdict}")


def mib(nbytes: int) -> str:
    """For a column of the table."""
    return f"{nbytes / 2**20:>8.2f} MiB"


if __name__ == "__main__":
    main()
