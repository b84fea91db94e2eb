"""The judge: whether an answer to an instance is valid, and what it is worth. README.md says what instances and answers are.

    python check.py INSTANCE ANSWER     prints the value of the answer, or the first reason why it is not valid

Standard library only. Both files are JSON, and may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from bisect import bisect_left
from collections import Counter
from itertools import chain, pairwise


class AnswerError(Exception):
    """The first reason why an answer is not valid."""


def load(path: str) -> dict:
    """The object in a file."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            found = json.load(file)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise AnswerError(f"{path}: expected JSON: {error}") from error
    require(isinstance(found, dict), f"{path}: expected a JSON object")
    return found


def require(holds: bool, reason: str) -> None:
    """Raises AnswerError with the reason unless something holds."""
    if not holds:
        raise AnswerError(reason)


def value_of(instance: dict, answer: dict) -> int:
    """What a valid answer is worth: bytes of `order` and `place`, benefit of `spaces`, cost of the others. Raises AnswerError."""
    require(answer.get("instance") == instance["name"], f"expected the instance {instance['name']!r}, got {answer.get('instance')!r}")
    is_graph = instance["format"] == "yardstick.graph"
    asked = ("order", "remat", "remat-twice", "offload") if is_graph else ("spaces",) if "spaces" in instance else ("place",)
    require(answer.get("problem") in asked, f"problem: expected one of {', '.join(asked)}, got {answer.get('problem')!r}")
    return (sequence_value if is_graph else offsets_value)(instance, answer)


def sequence_value(graph: dict, answer: dict) -> int:
    """The peak of an order; of other sequences the cost of their runs, or with copies the time at which all is done."""
    problem, limit, sequence = answer["problem"], answer.get("limit_bytes"), answer.get("sequence")
    require(isinstance(sequence, list), "sequence: expected a list")
    entries = [each if isinstance(each, list) else ["run", each] for each in sequence]
    kinds = ("run", "store", "drop", "load") if problem == "offload" else ("run",)
    for at, entry in enumerate(entries):
        require(len(entry) == 2 and entry[0] in kinds and type(entry[1]) is int, f"entry {at}: expected an entry of this problem")
    check_sequence(graph, entries)
    runs, peak = [which for kind, which in entries if kind == "run"], peak_of(graph, entries)
    node, most = Counter(runs).most_common(1)[0]
    if problem == "order":
        require(most == 1, f"sequence: expected one run of node {node}, got {most}")
        return peak
    if problem == "remat-twice":
        require(list(dict.fromkeys(runs)) == list(range(len(graph["makes"]))), "sequence: expected first runs in the order of numbers")
        require(most <= 2, f"sequence: expected at most two runs of node {node}, got {most}")
    require(type(limit) is int and peak <= limit, f"peak: expected at most limit_bytes, {limit}, got {peak}")
    return time_of(graph, entries) if problem == "offload" else sum(graph["cost"][node] for node in runs)


def check_sequence(graph: dict, entries: list) -> None:
    """Raises AnswerError at the first entry that is wrong, or at the end where something is missing."""
    makes, reads, sizes = graph["makes"], graph["reads"], graph["bytes"]
    after, until = graph.get("after") or [[]] * len(makes), graph.get("until") or [[]] * len(makes)
    once, there = set(graph.get("once", ())), set(range(len(sizes))) - set(chain(*makes))
    done, copy = set[int](), dict[int, str]()  # on the host, of a tensor: "waits" to be dropped, or is "alone"
    for at, (kind, which) in enumerate(entries):
        where = f"entry {at} ({kind} {which})"
        require(0 <= which < len(makes if kind == "run" else sizes), f"{where}: expected a number of a node or tensor")
        if kind == "run":
            require(there.issuperset(reads[which]), f"{where}: an input is not there")
            require(which in done or done.issuperset(after[which]), f"{where}: a node that comes before it has not run")
            require(which not in done or which not in once, f"{where}: this node runs once")
            require(which not in done or done.isdisjoint(until[which]), f"{where}: what it reads has been written over")
            require(all(copy.get(made) != "waits" for made in makes[which]), f"{where}: makes what is stored and not dropped")
            done.add(which)
            there.update(makes[which])
        elif kind == "store":
            storable = which in there and which not in copy and graph["store"][which] is not None
            require(storable, f"{where}: is not there, stored before, or may not be stored")
            copy[which] = "waits"
        elif kind == "drop":
            require(which in there and which in copy, f"{where}: is not there, or was not stored")
            there.discard(which)
            copy[which] = "alone"
        else:
            require(copy.get(which) == "alone", f"{where}: was never dropped")
            there.add(which)
    require(len(done) == len(makes), f"end: expected all {len(makes)} nodes to have run, got {len(done)}")
    whole = "waits" not in copy.values() and there.issuperset(graph.get("kept", ()))
    require(whole, "end: something is stored and not dropped, or kept and not there")


def peak_of(graph: dict, entries: list) -> int:
    """The most bytes of a right sequence: each copy of a tensor lives from the entry that makes it to the last one that uses it."""
    makes, reads, sizes = graph["makes"], graph["reads"], graph["bytes"]
    takes, workspace = graph.get("takes") or [[]] * len(makes), graph.get("workspace_bytes") or [0] * len(makes)
    latest = {tensor: [0, -1, tensor] for tensor in set(range(len(sizes))) - set(chain(*makes))}  # first entry, last entry, tensor
    copies = list(latest.values())
    for at, (kind, which) in enumerate(entries):
        for tensor in reads[which] if kind == "run" else [which] if kind != "load" else []:
            latest[tensor][1] = at
        for tensor in makes[which] if kind == "run" else [which] if kind == "load" else []:
            latest[tensor] = [at, at, tensor]
            copies.append(latest[tensor])
    for tensor in graph.get("kept", ()):
        latest[tensor][1] = len(entries)
    change, dying = [0] * (len(entries) + 2), {(last, tensor) for _, last, tensor in copies}
    for first, last, tensor in copies:
        if last >= first:
            change[first] += sizes[tensor]
            change[last + 1] -= sizes[tensor]
    peak = live = 0
    for at, (kind, which) in enumerate(entries):
        live += change[at]
        extra = workspace[which] if kind == "run" else 0
        if kind == "run" and any((at, tensor) in dying for tensor in takes[which]):
            extra -= sizes[makes[which][0]]
        peak = max(peak, live + extra)
    return peak + graph.get("resident_bytes", 0)


def time_of(graph: dict, entries: list) -> int:
    """When a right sequence is done: nodes one after another, copies to the host, and copies from it, side by side."""
    clock = out = back = 0
    stored, arrived = [0] * len(graph["bytes"]), dict.fromkeys(range(len(graph["bytes"])), 0)
    for kind, which in entries:
        if kind == "run":
            clock = max([clock, *(arrived[tensor] for tensor in graph["reads"][which])]) + graph["cost"][which]
            arrived.update(dict.fromkeys(graph["makes"][which], 0))
        elif kind == "store":
            out = stored[which] = max(out, clock, arrived[which]) + graph["store"][which]
        elif kind == "drop":
            clock = max(clock, stored[which])
        else:
            back = arrived[which] = max(back, clock) + graph["load"][which]
    return max([clock, *(arrived[tensor] for tensor in graph.get("kept", ()))])


def offsets_value(buffers: dict, answer: dict) -> int:
    """The bytes of the arena; with several spaces, the benefit of what lies in a faster space than the last that it may lie in."""
    count, spaces = len(buffers["size"]), buffers.get("spaces", [None])
    offsets, space = integers(answer, "offsets", count), integers(answer, "space", count) if "spaces" in buffers else [0] * count
    allowed = buffers.get("allowed", [[0]] * count)
    for buffer, where in enumerate(space):
        require(where in allowed[buffer], f"buffer {buffer}: expected one of the spaces {allowed[buffer]}, got {where}")
    arenas = [arena_of(buffers, offsets, [buffer for buffer in range(count) if space[buffer] == index]) for index in range(len(spaces))]
    for index, capacity in enumerate(spaces):
        require(capacity is None or arenas[index] <= capacity, f"space {index}: expected at most {capacity} bytes, got {arenas[index]}")
    ahead = [buffer for buffer in range(count) if space[buffer] != allowed[buffer][-1]]
    return sum(buffers["benefit"][buffer] for buffer in ahead) if "spaces" in buffers else arenas[0]


def integers(answer: dict, name: str, count: int) -> list[int]:
    """A list of so many integers in an answer."""
    found = answer.get(name)
    require(isinstance(found, list) and len(found) == count, f"{name}: expected a list of {count}")
    require(all(type(each) is int for each in found), f"{name}: expected integers")
    return found


def arena_of(buffers: dict, offsets: list[int], chosen: list[int]) -> int:
    """The bytes up to which these buffers of one space reach. Raises AnswerError where two share a byte at a step."""
    size, start, end, align = buffers["size"], buffers["start"], buffers["end"], buffers.get("align", 1)
    for each in chosen:
        require(offsets[each] >= 0 and offsets[each] % align == 0, f"buffer {each}: expected a multiple of {align}, got {offsets[each]}")
    real = [each for each in chosen if size[each] and start[each] < end[each]]
    alive: list[tuple[int, int]] = []  # (offset, buffer), sorted: whoever shares bytes with one shares some with a neighbour
    for step, begins, each in sorted([(start[each], 1, each) for each in real] + [(end[each], 0, each) for each in real]):
        place = bisect_left(alive, (offsets[each], each))
        if begins:
            alive.insert(place, (offsets[each], each))
            for (low, one), (high, other) in pairwise(alive[max(place - 1, 0) : place + 2]):
                require(low + size[one] <= high, f"buffers {one} and {other} share bytes at step {step}")
        else:
            del alive[place]
    return max((offsets[each] + size[each] for each in chosen), default=0)


def main(arguments: list[str]) -> int:
    """The exit status: 0 where the answer is valid."""
    try:
        print("valid", value_of(load(arguments[0]), load(arguments[1])))
    except AnswerError as error:
        print("invalid:", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
