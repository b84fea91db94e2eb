"""A dynamic programme over a chain of blocks: what each block keeps, and which run forward more than once.

`best[s, t, m]` is the least time, beyond running everything once, in which blocks s to t run forward and then backward in reverse, while
what block s reads is there and m units of memory are free. Either block s chooses an option, keeps what that keeps, and the blocks after it
follow; or some blocks from s on only hand on, and run forward again when their backward pass is due. That is the programme of Beaumont
et al. for chains ("Optimal checkpointing for heterogeneous chains", 2019), with several options a block as in Rockmate (ICML 2023).
One table answers all limits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel

Times = NDArray[np.float64]
Units = NDArray[np.int64]

HAND_ON, FORWARD, BACKWARD = 0, 1, 2  # what a step of a plan does


class Chain(NamedTuple):
    """Blocks and their options, in units of memory. Options of all blocks lie end to end; block b's begin at `option_ptr[b]`."""

    option_ptr: Units  # [blocks + 1]
    checkpoint: Units  # [options] while later blocks run
    forward: Units  # [options] the peak of the forward pass
    backward: Units  # [options] the peak of the backward pass
    extra_us: Times  # [options]
    again_us: Times  # [options] of running the forward pass once more, handing on
    inner_us: Times  # [options] the same, handing nothing on
    hand_on: Units  # [blocks] the peak of a forward pass that only hands on
    hand_on_us: Times  # [blocks] of running that once more
    handed: Units  # [blocks + 1, blocks + 1] made in blocks from the first index on, alive at the start of the block of the second
    rest_forward: Units  # [blocks] alive besides while blocks up to this one run forward once more
    rest_backward: Units  # [blocks] alive besides while this one runs backward
    pinned: Units  # [blocks + 1] what blocks before each one pin: alive from their first run to their backward pass, whatever is chosen


Step = tuple[int, int, int]  # what is done, the block, its option (-1 where it only hands on)


class ChainTable:
    """The table of a chain for up to so many units of memory."""

    def __init__(self, chain: Chain, most: int) -> None:
        self.chain, self.most = chain, most
        self.best = _table(most, chain)

    def extra_us(self, units: int) -> float:
        """The least time beyond running everything once; infinite where nothing fits."""
        return float(self.best[0, len(self.chain.hand_on) - 1, min(units, self.most)]) if units >= 0 else float("inf")

    def steps(self, units: int) -> list[Step]:
        """What to do in that time; nothing where nothing fits."""
        if not np.isfinite(self.extra_us(units)):
            return []
        return [(int(deed), int(block), int(option)) for deed, block, option in _steps(self.best, min(units, self.most), self.chain)]


@kernel(inner=True, borrows=True)
def _besides(block: Any, t: Any, chain: Any) -> Any:
    """What is alive besides while a block runs forward and blocks up to t are to follow: the first time, nothing of later blocks."""
    if t == len(chain.rest_forward) - 1:
        return chain.pinned[block]
    return chain.pinned[block] + chain.pinned[t + 1] - chain.pinned[block + 1] + chain.rest_forward[t]


@kernel(inner=True, borrows=True)
def _option_units(option: Any, s: Any, t: Any, chain: Any) -> Any:
    """The least memory in which block s may choose an option, at the head of blocks s to t."""
    forward = chain.forward[option] + _besides(s, t, chain)
    return max(forward, chain.backward[option] + chain.rest_backward[s] + chain.pinned[s])


@kernel(inner=True, borrows=True)
def _option_us(option: Any, s: Any, t: Any, chain: Any) -> Any:
    """What it costs there: the first forward pass is free."""
    if t == len(chain.hand_on) - 1:
        return chain.extra_us[option]
    return chain.extra_us[option] + (chain.inner_us[option] if s == t else chain.again_us[option])


@kernel(inner=True, borrows=True)
def _hand_on_units(block: Any, s: Any, t: Any, chain: Any) -> Any:
    """The least memory in which a block may only hand on, while blocks s to t are at work."""
    return chain.hand_on[block] + chain.handed[s, block] + _besides(block, t, chain)


@kernel
def _table(most: Any, chain: Any) -> Any:
    count = len(chain.hand_on)
    best, nothing = np.full((count, count, most + 1), np.inf, np.float32), np.zeros(most + 1, np.float32)
    for length in range(count):
        for s in range(count - length):
            t = s + length
            row = best[s, t]
            for option in range(chain.option_ptr[s], chain.option_ptr[s + 1]):
                least = _option_units(option, s, t, chain)
                own_us = _option_us(option, s, t, chain)
                if s == t:
                    for m in range(least, most + 1):
                        row[m] = min(row[m], own_us)
                    continue
                _fill(row, max(least, chain.checkpoint[option]), chain.checkpoint[option], own_us, best[s + 1, t], nothing)
            least, own_us = 0, 0.0
            for middle in range(s + 1, t + 1):
                least = max(least, _hand_on_units(middle - 1, s, t, chain))
                own_us += 0.0 if t == count - 1 else chain.hand_on_us[middle - 1]
                shift = chain.handed[s, middle]
                _fill(row, max(least, shift), shift, own_us, best[middle, t], best[s, middle - 1])
    return best


@kernel(inner=True, borrows=True)
def _fill(row: Any, least: Any, shift: Any, own_us: Any, after: Any, before: Any) -> None:
    """From `least` units on, what that takes which leaves `shift` units less to what follows, where it is less.

    Slices of one length, so that the compiler sees that it may take several units at once.
    """
    if least < len(row):
        own, later, earlier = row[least:], after[least - shift :], before[least:]
        for each in range(len(own)):
            own[each] = min(own[each], own_us + later[each] + earlier[each])


@kernel
def _steps(best: Any, units: Any, chain: Any) -> Any:
    """The steps of the best plan: choices are made once more, as the table does not hold them."""
    count = len(chain.hand_on)
    steps = [(0, 0, 0) for _ in range(0)]
    stack = [(0, count - 1, units, -1)]  # blocks s to t in so many units; with an option: the backward pass of s
    while len(stack) > 0:
        s, t, m, chosen = stack.pop()
        if chosen >= 0:
            steps.append((BACKWARD, s, chosen - chain.option_ptr[s]))
            continue
        least_us = np.inf
        choice, split = -1, -1
        for option in range(chain.option_ptr[s], chain.option_ptr[s + 1]):
            if m < _option_units(option, s, t, chain) or (s < t and m < chain.checkpoint[option]):
                continue
            us = _option_us(option, s, t, chain)
            if s < t:
                us += best[s + 1, t, m - chain.checkpoint[option]]
            if us < least_us:
                least_us, choice = us, option
        least, own_us = 0, 0.0
        for middle in range(s + 1, t + 1):
            least = max(least, _hand_on_units(middle - 1, s, t, chain))
            own_us += 0.0 if t == count - 1 else chain.hand_on_us[middle - 1]
            if m < least or m < chain.handed[s, middle]:
                continue
            us = own_us + best[middle, t, m - chain.handed[s, middle]] + best[s, middle - 1, m]
            if us < least_us:
                least_us, split = us, middle
        if split >= 0:
            for block in range(s, split):
                steps.append((HAND_ON, block, -1))
            stack.append((s, split - 1, m, -1))
            stack.append((split, t, m - chain.handed[s, split], -1))
            continue
        steps.append((FORWARD, s, choice - chain.option_ptr[s]))
        stack.append((s, t, m, choice))
        if s < t:
            stack.append((s + 1, t, m - chain.checkpoint[choice], -1))
    return steps
