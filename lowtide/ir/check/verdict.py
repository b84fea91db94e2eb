"""What a check can find, in sentences, and how it says where."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NoReturn

from lowtide.errors import CheckError
from lowtide.ir.graph import Node


class Verdict(enum.Enum):
    """What can be wrong with a graph, an order or reuses. The members are the sentences that errors start with."""

    NODE_TWICE = "a node stands in the graph twice"
    DUPLICATE_NAME = "two values or two storages have the same name"
    MADE_TWICE = "a value is made twice"
    READ_BEFORE_MADE = "a value is read before it is made"
    UNKNOWN_DTYPE = "the size of a dtype is unknown"
    MALFORMED = "shape and strides differ in length, or a size is negative"
    OUTSIDE_STORAGE = "a value reaches beyond the bytes of its storage"
    INPUT_VERSIONS = "two inputs on one storage are of different versions"
    MADE_AT_VERSION = "a node makes a storage that is not at version 0"
    REMADE = "a storage that exists is made again, by a node that reads nothing of it"
    VIEW_APART = "an operator that only looks at what it is given makes a storage of its own"
    OTHER_VERSION = "a view is of another version than its storage is at"
    STALE = "a version of a storage is read that is not the current one"
    WRITE_NOT_OWNED = "a node writes a storage that the caller does not own"
    WRITE_STEP = "a write does not leave the same tensor at the next version"
    INPLACE_NOT_READ = "a node may work in place of a value that it does not read"
    CONTROL_OUTSIDE = "a control edge comes from a node outside of the graph"
    CONTROL_LATE = "a control edge comes from a node further down in the program"

    HOST_FORM = "a copy does not have the form host.store(t) -> h, host.save(t, h) writing h, host.drop(t, h) or host.load(h) -> t2"
    HOST_ENDS = "a copy to the host or back does not lie on the device at one end and on the host at the other"
    HOST_UNLIKE = "what is on the host does not look like what it is a copy of"
    HOST_FIXED = "a copy to the host or back is of an input or an output of the graph"
    HOST_TOUCHED = "what is on the host is used by something else than stores, drops and loads"
    HOST_NOT_DROPPED = "what a store copies is not dropped after it, and may be gone before the copy is whole"
    HOME_ENDS = "state that lies on the host between steps is not loaded as state, or is saved from something else than what was loaded"
    HOME_LEFT = "state that lies on the host between steps is loaded and written, and not saved as it is in the end"
    OFFLOADED_WRITE = "a drop of what the caller lends has to write it, since it is emptied, and no other copy to the host or back writes"
    OFFLOADED_WRITTEN = "what the caller lends is copied to the host or dropped after it has been written"
    OFFLOADED_STILL_THERE = "what the caller lends is loaded without a drop that comes before"
    OFFLOADED_NOT_RESTORED = "what the caller lends is not there in the end"

    COLLECTIVE_FREE = "a collective has no fixed place among those of the program, which meet in one order on all ranks"
    COLLECTIVE_TOUCHED = "what a collective has begun to make is used by something else than the wait for its end"

    LOOP_FORM = "a loop does not say along, into, extent and part, or has no body over one dimension, its part"
    LOOP_ENDS = "what a loop is given or makes is not what its body takes"
    LOOP_RESULT = "a loop's result is not written once, by what puts parts together as said, and left alone otherwise"
    LOOP_WRITES = "a loop writes in its body what it does not say, or says what it does not write"
    LOOP_SHARES = "parts of a loop share what one of them writes"
    LOOP_TAKES = "a loop may take over an argument that is not cut and laid out as its first result, or is read once that is written"
    LOOP_ONCE = "a loop repeats what may run only once: random numbers, statistics, decisions, copies to the host"
    LOOP_AGAIN = "a loop computes the same in every part"

    REGION_FORM = "a region does not say fixed, arena_bytes and packed_bytes, or has no body"
    REGION_ENDS = "what a region is given or makes is not what its body takes or gives"
    REGION_PURE = "a region's body writes, draws, or has a body itself"

    NOT_A_PERMUTATION = "the order does not name every node once"
    ORDER_DATA = "the order runs a node before one that makes what it reads"
    ORDER_HAZARD = "the order runs a node while a storage is at another version than the one it reads"
    ORDER_CONTROL = "the order breaks a control edge"

    REUSE_COUNT = "there is not one reuse, or -1, for every node"
    REUSE_NOT_LISTED = "a node takes over an input that it does not list for that"
    REUSE_FOR_NOTHING = "a node takes over memory without making a storage for its first result"
    REUSE_OWNED = "a node takes over memory that the caller owns"
    REUSE_KEPT = "a node takes over memory that holds an output of the graph"
    REUSE_UNFIT = "a node takes over memory of another size or device"
    REUSE_ALIASED = "a node takes over memory that it also reads laid out in another way"
    REUSE_ALIVE = "a node takes over memory that is used after it"


def refuse(verdict: Verdict, where: object) -> NoReturn:
    raise CheckError(f"{verdict.value}: {where}")


@dataclass(frozen=True, slots=True)
class NodeLocation:
    """Where a node is, written out only where something is wrong: index, operator, first result, source line, and bodies around it."""

    index: int
    node: Node
    within: str = ""

    def __str__(self) -> str:
        node, source = self.node, self.node.source
        result = "".join(f" -> {value.name}" for value in node.results[:1])
        line = f" at {source.file}:{source.line}" if source is not None else ""
        module = f" in {source.module}" if source is not None and source.module else ""
        return f"node {self.index} ({node.op}{result}){line}{module}{self.within}"
