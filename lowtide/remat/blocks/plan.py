"""The block plan of a segment: its blocks, the options of each, and the sequence that a plan of steps stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.problems.order import Ints
from lowtide.remat.blocks.chain import BACKWARD, FORWARD, HAND_ON, Chain, Step
from lowtide.remat.blocks.find import Blocks
from lowtide.remat.blocks.options import REPEATED, SINGLE, Option, OptionEffort, forward_twice, option_of, options_of
from lowtide.remat.blocks.problem import BlockProblem, block_problems
from lowtide.remat.problem import RematProblem

KnownOptions = dict[tuple[bytes, OptionEffort, bool], list[Option]]  # by block, how far was looked, and whether it was made of smaller ones


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The blocks of a segment, and what can be done with each."""

    problem: RematProblem
    blocks: Blocks
    block_problems: list[BlockProblem]
    options: list[list[Option]]  # by block; equal blocks share theirs

    @classmethod
    def of(cls, problem: RematProblem, blocks: Blocks, known: KnownOptions, finer: BlockPlan | None = None) -> BlockPlan:
        """Every distinct block planned once, where it is not in `known`; with what was found for the blocks of `finer` inside."""
        own = block_problems(problem, blocks)
        repeats = Counter(each.key for each in own)
        keys = [(each.key, REPEATED if repeats[each.key] > 1 else SINGLE, finer is not None) for each in own]
        for block, (each, key) in enumerate(zip(own, keys, strict=True)):
            if key not in known:
                known[key] = options_of(each, finer.inside(blocks, block) if finer else (), key[1])
        return cls(problem, blocks, own, [known[key] for key in keys])

    def inside(self, coarser: Blocks, block: int) -> list[list[Option]]:
        """The options of the blocks that a coarser one is made of."""
        first, last = np.searchsorted(self.blocks.starts, coarser.starts[block : block + 2])
        return self.options[first:last]

    def checkpointed(self, size: int) -> list[Step]:
        """Blocks in groups of so many: all but the last group only hand on, and run forward again before the group's backward pass."""
        groups = [range(start, min(start + size, self.blocks.count)) for start in range(0, self.blocks.count, size)]
        steps: list[Step] = [(HAND_ON, block, -1) for group in groups[:-1] for block in group]
        for group in reversed(groups):
            steps += [(FORWARD, block, 0) for block in group]  # the fastest option keeps all
            steps += [(BACKWARD, block, 0) for block in reversed(group)]
        return steps

    def chain(self, unit_bytes: int) -> Chain:
        """The chain in units of so many bytes, to the nearest: what a plan really takes is seen when it is written out."""
        flat = [option for options in self.options for option in options]

        def units(values: ArrayLike) -> NDArray[np.int64]:
            return (np.asarray(values, np.int64) + unit_bytes // 2) // unit_bytes

        handing = [option_of(each, forward_twice(each)) for each in self.block_problems]
        forward, backward = self.rest()
        return Chain(
            option_ptr=np.concatenate([[0], np.cumsum([len(options) for options in self.options])]).astype(np.int64),
            checkpoint=units([option.checkpoint_bytes for option in flat]),
            forward=units([option.forward_bytes for option in flat]),
            backward=units([option.backward_bytes for option in flat]),
            extra_us=np.array([option.extra_us for option in flat]),
            again_us=np.array([option.again_us for option in flat]),
            inner_us=np.array([option.inner_us for option in flat]),
            hand_on=units([option.forward_bytes for option in handing]),
            hand_on_us=np.array([option.again_us for option in handing]),
            handed=units(self.handed()),
            rest_forward=units(forward),
            rest_backward=units(backward),
            pinned=units(np.cumsum([0, *(each.pinned_bytes for each in self.block_problems)])),
        )

    def handed(self) -> NDArray[np.int64]:
        """[blocks + 1, blocks + 1] the bytes made in blocks from s on and alive for the forward pass at the start of block k."""
        blocks, count = self.blocks, self.blocks.count
        handed_bytes = np.zeros((count + 1, count + 1), np.int64)
        sizes = self.problem.problem.tensor_bytes
        born = np.searchsorted(blocks.starts, blocks.made_at, side="right") - 1
        dies = np.searchsorted(blocks.starts, blocks.forward_at, side="right") - 1  # the last block that reads it forward
        inside = (blocks.made_at >= blocks.begin) & (blocks.made_at < blocks.boundary) & (dies > born)
        by_span = np.zeros((count + 1, count + 1), np.int64)
        np.add.at(by_span, (born[inside], dies[inside]), sizes[inside])
        for start in range(count + 1):
            for at in range(start + 1, count + 1):
                handed_bytes[start, at] = by_span[start:at, at:].sum()
        return handed_bytes

    def rest(self) -> tuple[list[int], list[int]]:
        """By block: bytes that no forward pass makes, alive before the backward pass, and through it though it does not touch them."""
        blocks, base = self.blocks, self.problem.problem
        forward, backward = [], []
        late = (blocks.made_at >= blocks.boundary) | base.kept & (blocks.made_at >= 0)
        until = np.where(base.kept, len(blocks.sequence), blocks.read_at)
        for block, own in enumerate(self.block_problems):
            begin, end = blocks.ends[block + 1], blocks.ends[block]
            before = late & (blocks.made_at < begin)
            forward.append(int(base.tensor_bytes[before & (until >= begin)].sum()))
            through = before & (until >= end)
            through[own.tensors] = False
            backward.append(int(base.tensor_bytes[through].sum()))
        return forward, backward

    def around_bytes(self) -> int:
        """What is alive all along beside what these blocks make: what is there from the start, and what was made before."""
        blocks, base = self.blocks, self.problem.problem
        before = (blocks.made_at >= 0) & (blocks.made_at < blocks.begin) & (blocks.read_at >= blocks.begin) & ~base.kept
        return int(base.resident_bytes + base.start_bytes + base.tensor_bytes[before].sum())

    def written(self, steps: Sequence[Step]) -> Ints:
        """The sequence of a plan, some of its runs needless."""
        for step in steps:
            if step not in self._pieces:
                self._pieces[step] = self.piece(*step)
        return np.concatenate([self._pieces[step] for step in steps])

    @cached_property
    def _pieces(self) -> dict[Step, Ints]:
        return {}

    def piece(self, deed: int, block: int, option: int) -> Ints:
        if deed == HAND_ON:
            return self.blocks.forward_of(block).astype(np.int32)
        sequence, own = self.options[block][option].sequence, self.block_problems[block]
        boundary = int(np.flatnonzero(sequence == own.boundary)[0])
        return own.nodes[sequence[:boundary] if deed == FORWARD else sequence[boundary + 1 :]]
