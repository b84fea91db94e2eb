"""What a step that failed has changed, told to its caller.

Until the loss exists a step changes only what eager PyTorch would have changed by then, so a failure there is passed on as it is. After
that, gradients are used as soon as they exist: when a later operator fails, some parameters have been updated and others have not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import StepError
from lowtide.ir.graph import Kind, Node, Storage
from lowtide.ir.operators.collectives.nodes import is_collective
from lowtide.ir.operators.nodes import is_transfer
from lowtide.lower.python import positions
from lowtide.plan.contents import Decision
from lowtide.runtime.program import Program
from lowtide.runtime.ranks.peers import UNANSWERED


@dataclass(frozen=True)
class Harm:
    """What a step has written of what it trains, before the node that failed."""

    updated: int  # parameters
    trained: int  # parameters that a whole step updates
    touched: bool  # whether any parameter or optimizer state was written
    node: Node

    @classmethod
    def of(cls, plan: Decision, position: int) -> Harm:
        """Of a step whose node at `position` of the order has failed."""
        nodes = [plan.graph.nodes[index] for index in plan.order]
        done = _written(nodes[:position])
        whole = [storage for storage in _written(nodes) if storage.kind is Kind.PARAMETER]
        return cls(sum(storage in done for storage in whole), len(whole), bool(done), nodes[position])

    def __str__(self) -> str:
        source = self.node.source
        where = f" ({source.file}:{source.line})" if source is not None else ""
        return (
            f"the step failed in {self.node.op}{where}, after its loss: {self.updated} of {self.trained} parameters were updated, "
            "and the optimizer's state of some; go on from a checkpoint"
        )


def tell_harm(error: BaseException, plan: Decision, program: Program) -> None:
    """Raise StepError from `error` where the run that it ended has begun to update; an interrupt is told by a note instead.

    Returns where nothing was updated: then the error tells all.
    """
    line = program.line_of(error)
    position = positions(plan)[line - 1] if line else -1
    if not 0 <= position < len(plan.order):
        return
    harm = Harm.of(plan, position)
    if not harm.touched:
        if is_collective(harm.node) and isinstance(error, RuntimeError):
            raise StepError(f"{UNANSWERED}. No parameter was updated in this step. What failed: {error}") from error
        return
    if isinstance(error, Exception):
        raise StepError(f"{harm}. What failed: {type(error).__name__}: {error}") from error
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(str(harm))


def _written(nodes: list[Node]) -> set[Storage]:
    """The parameters and optimizer state that these nodes write; a copy to the host and back is no change."""
    writes = (before.storage for node in nodes if not is_transfer(node) for before, _ in node.writes)
    return {storage for storage in writes if storage.kind in (Kind.PARAMETER, Kind.STATE)}
