"""Devices as numbers, and what an operator takes on one by its roofline: the time of its arithmetic or of its bytes, whichever is more.

A CPU takes both, as products pack what they read before they compute with it.

Peak rates are those of the makers' data sheets, without sparsity; `efficiency` is the share of them that real kernels reach.

What an operator does: floating-point operations and bytes moved, from its shapes alone. A multiplication and an addition are two
operations. Operators whose row says nothing do as good as none: moving their bytes is what takes their time. Each element that an operator
has to touch is moved once: a lookup reads the rows that it looks up and not the table, an argument that is asked for its shape alone is not
read. Views move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.cost.bodies import runs_of
from lowtide.errors import CheckError
from lowtide.ir.bodies import is_loop, is_region
from lowtide.ir.graph import Graph, Node
from lowtide.ir.operators.nodes import begins_collective, is_arithmetic, is_collective, is_transfer, is_view, loads_parts, row_of
from lowtide.ir.operators.own import SUM
from lowtide.ir.operators.row import bytes_of, read_bytes
from lowtide.ir.sizes import ITEM_BYTES, ROW_BYTES


def node_flops(node: Node) -> int:
    """Floating-point operations of one run. Raises CheckError where a shape is symbolic."""
    count = row_of(node.op).flops
    return 0 if count is None else count(node)


def node_moved_bytes(node: Node) -> int:
    """Bytes read and written by one run, each element that is touched once. Raises CheckError where a shape is symbolic."""
    row = row_of(node.op)
    if is_view(node) or row.untouched:
        return 0
    return read_bytes(node, row.unread) + bytes_of(node.results) if row.moved_bytes is None else row.moved_bytes(node)


def compute_dtype(node: Node) -> str:
    """In what a node computes: the widest of what it reads and makes, by which the peak rate of a device is chosen."""
    kinds = [value.dtype for value in (*node.outputs, *node.inputs) if value is not None and "float" in value.dtype]
    return max(kinds, key=lambda dtype: ITEM_BYTES[dtype], default="float32")


_VIEW = 0.3  # of what an operator takes the host that launches something


@dataclass(frozen=True)
class Device:
    """A machine: what it does in a second, and what each call to it costs."""

    name: str
    flops_per_s: Mapping[str, float]  # by dtype; "float32" is what matrix products of float32 run at
    bandwidth_bytes_per_s: float  # of its memory
    launch_us: float  # before an operator does anything
    to_host_bytes_per_s: float  # of the link to a host with memory of its own; 0 where there is none to swap to
    from_host_bytes_per_s: float
    efficiency: float = 1.0  # of peak rate and, where it is not `moving_efficiency`, bandwidth
    half_flops: float = 0.0  # an operator of this many operations reaches half of what a large one does
    granule_bytes: int = 1  # its allocator rounds sizes up to this
    memory_bytes: int = 0  # 0 where it has no memory of its own
    peers_bytes_per_s: float = 0.0  # of its links to the other devices of one machine; 0 where they are not known
    moving_efficiency: float | None = None
    askew: float = 1.0  # by so much products of 16 bits take longer whose rows are no multiple of 16 bytes
    issue_us: float = 0.0  # of the host for an operator, from Python; 0 where the host itself computes
    capability: tuple[int, int] = (8, 0)  # of CUDA, by which torch chooses among kernels
    moves_beside: bool = True  # whether bytes move while it computes; else one comes after the other

    def node_us(self, node: Node) -> float:
        """The time of one run by roofline; 0 for views, Python's arithmetic, and copies to the host and back, which run beside.

        That of a loop is that of all its parts, which are small, and so take more than their share.
        """
        if is_loop(node) or is_region(node):
            return sum(run.times * self.node_us(run.node) for run in runs_of(node))
        if is_view(node) or is_transfer(node) or is_arithmetic(node):
            return 0.0
        if is_collective(node) and self.peers_bytes_per_s:
            return self._exchange_us(node) if begins_collective(node) or loads_parts(node) else 0.0
        flops = node_flops(node)
        rate = self.flops_per_s.get(compute_dtype(node), self.flops_per_s["float32"])
        arithmetic_s = (flops + self.half_flops) / (rate * self.efficiency) * (self.askew if _is_askew(node) else 1.0) if flops else 0.0
        moving_s = node_moved_bytes(node) / (self.bandwidth_bytes_per_s * (self.moving_efficiency or self.efficiency))
        taken_s = max(arithmetic_s, moving_s) if self.moves_beside else arithmetic_s + moving_s
        return self.launch_us * row_of(node.op).launches + 1e6 * taken_s

    def _exchange_us(self, node: Node) -> float:
        """What the links take: of a sum each byte goes out twice, else once. Of n ranks (n - 1) / n stay less; that is not taken off."""
        sent_bytes = max(bytes_of(node.inputs), bytes_of(node.results))
        return self.launch_us + 1e6 * sent_bytes * (2 if node.op == SUM else 1) / self.peers_bytes_per_s

    def node_issue_us(self, node: Node) -> float:
        """What it takes the host to have a node run; less for views, which launch nothing, and none for Python's arithmetic."""
        if is_arithmetic(node) or is_transfer(node) or not self.issue_us:
            return 0.0
        if is_loop(node):
            return sum(run.times * self.node_issue_us(run.node) for run in runs_of(node))
        return self.issue_us * (_VIEW if is_view(node) else row_of(node.op).launches)

    def graph_issue_us(self, graph: Graph) -> tuple[float, ...]:
        """The same of a graph's nodes; empty where the host itself computes."""
        return tuple(map(self.node_issue_us, graph.nodes)) if self.issue_us else ()

    def graph_us(self, graph: Graph) -> tuple[float, ...]:
        return tuple(map(self.node_us, graph.nodes))

    @property
    def can_swap(self) -> bool:
        """Whether there is a host with memory of its own to keep tensors in. A CPU has none: its memory is the host's."""
        return self.to_host_bytes_per_s > 0 and self.from_host_bytes_per_s > 0

    def store_us(self, nbytes: int) -> float:
        """The time to copy bytes to the host. Raises CheckError where there is no host to swap to."""
        return self._copy_us(nbytes, self.to_host_bytes_per_s)

    def load_us(self, nbytes: int) -> float:
        """The time to copy bytes back from the host. Raises CheckError where there is no host to swap to."""
        return self._copy_us(nbytes, self.from_host_bytes_per_s)

    def _copy_us(self, nbytes: int, bytes_per_s: float) -> float:
        if not self.can_swap:
            raise CheckError(f"expected a device with a link to a host, got {self.name}, which has none to swap to: ask `can_swap` first")
        return self.launch_us + 1e6 * nbytes / bytes_per_s


def _is_askew(node: Node) -> bool:
    """Whether it is a product of matrices of 16 bits of which one has rows that begin where no kernel for tensor cores can read them."""
    values = [value for value in (*node.inputs, *node.results) if value.dtype in ("float16", "bfloat16") and len(value.shape) in (2, 3)]
    strides = [step for value in values for step in value.stride if isinstance(step, int)]
    return any(step > 1 and 2 * step % ROW_BYTES for step in strides)


def half_flops_of(samples: Sequence[tuple[int, float]], flops_per_ns: float, launch_ns: float) -> float:
    """The operations at which a device reaches half its rate, from (operations, nanoseconds) of products of rising size.

    By the roofline a product takes `launch + (flops + half) / rate`: the half that is nearest to all samples, each weighed by its time.
    """
    rests = [((took - launch_ns) * flops_per_ns - flops, took**-2) for flops, took in samples]
    total = sum(weight for _, weight in rests)
    return max(0.0, sum(rest * weight for rest, weight in rests) / total) if total else 0.0
