"""All storages of a plan, the largest first: what each is, and over which steps it lives."""

from __future__ import annotations

from lowtide.base.units import bytes_text, op_text
from lowtide.plan.contents import Contents
from lowtide.plan.promises import lives
from lowtide.plan.snapshot import LiveTensor, storage_specs
from lowtide.plan.where import source_text


def live_tensors(plan: Contents) -> list[LiveTensor]:
    """Every storage that has bytes, by bytes, of equal ones the earliest; what is resident lives from the first step to the last."""
    spans, seen = lives(plan), storage_specs(plan.graph)
    found = [LiveTensor.of(seen[storage], nbytes, start, end) for storage, (nbytes, start, end) in spans.items() if nbytes]
    return sorted(found, key=lambda tensor: (-tensor.nbytes, tensor.start, tensor.end, tensor.name))


def table(plan: Contents, most: int | None = None) -> str:
    """The first `most` of them, all where that is None, a line each: bytes, name, dtype and shape, kind, steps, and what makes it."""
    tensors = live_tensors(plan)
    rows = [("bytes", "name", "tensor", "kind", "steps", "made by"), *map(_row, tensors[:most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{row[0]:>{widths[0]}}  " + "  ".join(map(str.ljust, row[1:], widths[1:])) for row in rows]
    rest = tensors[most:] if most is not None else []
    if rest:
        lines.append(f"{bytes_text(sum(tensor.nbytes for tensor in rest)):>{widths[0]}}  in {len(rest)} more")
    return "\n".join(line.rstrip() for line in lines)


def _row(tensor: LiveTensor) -> tuple[str, ...]:
    where = source_text(tensor.source)
    made_by = f"{op_text(tensor.op)}{f' of {where}' if where else ''}" if tensor.op else "the caller"
    shape = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    return bytes_text(tensor.nbytes), tensor.name, shape, tensor.kind.value, f"{tensor.start} to {tensor.end}", made_by
