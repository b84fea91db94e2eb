"""A dynamic programme over a chain of blocks: what each block keeps, and which run forward more than once.

`best[s, t, m]` is the least time, beyond running everything once, in which blocks s to t run forward and then backward in reverse, while
what block s reads is there and m units of memory are free. Either block s chooses an option, keeps what that keeps, and the blocks after it
follow; or some blocks from s on only hand on, and run forward again when their backward part is due. That is the programme of Beaumont
et al. for chains ("Optimal checkpointing for heterogeneous chains", 2019), with several options a block as in Rockmate (ICML 2023).
One table answers all limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel

Times = NDArray[np.float64]
Units = NDArray[np.int64]

HAND_ON, FORWARD, BACKWARD = 0, 1, 2  # what a step of a plan does


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks and their options, in units of memory. Options of all blocks lie end to end; block b's begin at `option_ptr[b]`."""

    option_ptr: Units  # [blocks + 1]
    kept: Units  # [options] while later blocks run
    forward: Units  # [options] the peak of the forward part
    backward: Units  # [options] the peak of the backward part
    extra_us: Times  # [options]
    again_us: Times  # [options] of running the forward part once more, handing on
    inner_us: Times  # [options] the same, handing nothing on
    hand_on: Units  # [blocks] the peak of a forward part that only hands on
    hand_on_us: Times  # [blocks] of running that once more
    handed: Units  # [blocks + 1, blocks + 1] made in blocks from the first index on, alive at the start of the block of the second
    rest_forward: Units  # [blocks] alive besides while blocks up to this one run forward once more
    rest_backward: Units  # [blocks] alive besides while this one runs backward
    pinned: Units  # [blocks + 1] what blocks before each one pin: alive from their first run to their backward part, whatever is chosen

    @property
    def count(self) -> int:
        """How many blocks."""
        return len(self.hand_on)


Step = tuple[int, int, int]  # what is done, the block, its option (-1 where it only hands on)


class ChainTable:
    """The table of a chain for up to so many units of memory."""

    def __init__(self, chain: Chain, most: int) -> None:
        self.chain, self.most = chain, most
        self.arrays = (
            chain.option_ptr, chain.kept, chain.forward, chain.backward, chain.extra_us, chain.again_us, chain.inner_us, chain.hand_on,
            chain.hand_on_us, chain.handed, chain.rest_forward, chain.rest_backward, chain.pinned,
        )  # fmt: skip
        self.best = _table(most, *self.arrays)

    def extra_us(self, units: int) -> float:
        """The least time beyond running everything once; infinite where nothing fits."""
        return float(self.best[0, self.chain.count - 1, min(units, self.most)]) if units >= 0 else float("inf")

    def steps(self, units: int) -> list[Step]:
        """What to do in that time; nothing where nothing fits."""
        if not np.isfinite(self.extra_us(units)):
            return []
        return [(int(deed), int(block), int(option)) for deed, block, option in _steps(self.best, min(units, self.most), *self.arrays)]


@kernel
def _besides(block: Any, t: Any, rest_forward: Any, pinned: Any) -> Any:
    """What is alive besides while a block runs forward and blocks up to t are to follow: the first time, nothing of later blocks."""
    if t == len(rest_forward) - 1:
        return pinned[block]
    return pinned[block] + pinned[t + 1] - pinned[block + 1] + rest_forward[t]


@kernel
def _option_units(option: Any, s: Any, t: Any, forward: Any, backward: Any, rest_forward: Any, rest_backward: Any, pinned: Any) -> Any:
    """The least memory in which block s may choose an option, at the head of blocks s to t."""
    return max(forward[option] + _besides(s, t, rest_forward, pinned), backward[option] + rest_backward[s] + pinned[s])


@kernel
def _option_us(option: Any, s: Any, t: Any, last: Any, extra_us: Any, again_us: Any, inner_us: Any) -> Any:
    """What it costs there: the first forward pass is free."""
    if t == last:
        return extra_us[option]
    return extra_us[option] + (inner_us[option] if s == t else again_us[option])


@kernel
def _hand_on_units(block: Any, s: Any, t: Any, hand_on: Any, handed: Any, rest_forward: Any, pinned: Any) -> Any:
    """The least memory in which a block may only hand on, while blocks s to t are at work."""
    return hand_on[block] + handed[s, block] + _besides(block, t, rest_forward, pinned)


@kernel
def _table(
    most: Any, option_ptr: Any, kept: Any, forward: Any, backward: Any, extra_us: Any, again_us: Any, inner_us: Any, hand_on: Any,
    hand_on_us: Any, handed: Any, rest_forward: Any, rest_backward: Any, pinned: Any,
) -> Any:  # fmt: skip
    count = len(hand_on)
    best = np.full((count, count, most + 1), np.inf, np.float32)
    for length in range(count):
        for s in range(count - length):
            t = s + length
            row = best[s, t]
            for option in range(option_ptr[s], option_ptr[s + 1]):
                least = _option_units(option, s, t, forward, backward, rest_forward, rest_backward, pinned)
                own_us = _option_us(option, s, t, count - 1, extra_us, again_us, inner_us)
                if s == t:
                    for m in range(least, most + 1):
                        row[m] = min(row[m], own_us)
                    continue
                after = best[s + 1, t]
                for m in range(max(least, kept[option]), most + 1):
                    row[m] = min(row[m], own_us + after[m - kept[option]])
            least, own_us = 0, 0.0
            for middle in range(s + 1, t + 1):
                least = max(least, _hand_on_units(middle - 1, s, t, hand_on, handed, rest_forward, pinned))
                own_us += 0.0 if t == count - 1 else hand_on_us[middle - 1]
                after, before, shift = best[middle, t], best[s, middle - 1], handed[s, middle]
                for m in range(max(least, shift), most + 1):
                    row[m] = min(row[m], own_us + after[m - shift] + before[m])
    return best


@kernel
def _steps(
    best: Any, units: Any, option_ptr: Any, kept: Any, forward: Any, backward: Any, extra_us: Any, again_us: Any, inner_us: Any,
    hand_on: Any, hand_on_us: Any, handed: Any, rest_forward: Any, rest_backward: Any, pinned: Any,
) -> Any:  # fmt: skip
    """The steps of the best plan: choices are made once more, as the table does not hold them."""
    count = len(hand_on)
    found = [(0, 0, 0) for _ in range(0)]
    stack = [(0, count - 1, units, -1)]  # blocks s to t in so many units; with an option: the backward part of s
    while len(stack) > 0:
        s, t, m, chosen = stack.pop()
        if chosen >= 0:
            found.append((BACKWARD, s, chosen - option_ptr[s]))
            continue
        least_us = np.inf
        choice, split = -1, -1
        for option in range(option_ptr[s], option_ptr[s + 1]):
            if m < _option_units(option, s, t, forward, backward, rest_forward, rest_backward, pinned) or (s < t and m < kept[option]):
                continue
            us = _option_us(option, s, t, count - 1, extra_us, again_us, inner_us)
            if s < t:
                us += best[s + 1, t, m - kept[option]]
            if us < least_us:
                least_us, choice = us, option
        least, own_us = 0, 0.0
        for middle in range(s + 1, t + 1):
            least = max(least, _hand_on_units(middle - 1, s, t, hand_on, handed, rest_forward, pinned))
            own_us += 0.0 if t == count - 1 else hand_on_us[middle - 1]
            if m < least or m < handed[s, middle]:
                continue
            us = own_us + best[middle, t, m - handed[s, middle]] + best[s, middle - 1, m]
            if us < least_us:
                least_us, split = us, middle
        if split >= 0:
            for block in range(s, split):
                found.append((HAND_ON, block, -1))
            stack.append((s, split - 1, m, -1))
            stack.append((split, t, m - handed[s, split], -1))
            continue
        found.append((FORWARD, s, choice - option_ptr[s]))
        stack.append((s, t, m, choice))
        if s < t:
            stack.append((s + 1, t, m - kept[choice], -1))
    return found
