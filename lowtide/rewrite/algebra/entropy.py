"""The gradient of a cross entropy's scores in one go, where their logarithms of probabilities lay.

    back = nll_loss_backward(g, logs, labels, ..)           grad = cross_entropy_backward(g, logs, labels, ..)
    grad = _log_softmax_backward_data(back, logs, 1)

`back`, as large as the scores, is never whole, and `grad` may take the memory of `logs`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node, Value
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_row_by_row, layout

_OWN = "lowtide.cross_entropy_backward"


def gradients_of_scores(uses: Uses) -> Iterator[Match]:
    """Of losses over rows of scores, [rows, classes]."""
    for node in uses.nodes_of("aten._log_softmax_backward_data.default"):
        back, logs, dim, _ = node.args
        first, made = uses.maker(back, "aten.nll_loss_backward.default"), node.outputs[0]
        if first is None or made is None or not isinstance(back, Value) or not isinstance(logs, Value):
            continue
        alone = uses.users[back] == [node] and back.storage not in uses.kept and first.args[1] is logs
        rows = len(logs.shape) == 2 and dim in (1, -1) and all(is_row_by_row(each) for each in (logs, made))
        if alone and rows and layout(logs) == layout(made) == layout(back) and not uses.written_between(first, node):
            inplace = ((logs, f"{_OWN}_.default"),) if logs in uses.makers and logs.storage not in uses.kept else ()
            at_once = Node(f"{_OWN}.default", first.args, (made,), after=_after(first, node), inplace=inplace, source=node.source)
            yield Match({first: (), node: (at_once,)}, back.storage)


def _after(first: Node, node: Node) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(other for other in (*first.after, *node.after) if other is not first))
