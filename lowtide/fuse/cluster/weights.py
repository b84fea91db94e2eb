"""How hard operators are to tune: linear in the extents of their loops (AGO, equation 1); a cluster weighs what its operators do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.ir.graph import Node
from lowtide.ir.operators.nests import Nest, nest_of


@dataclass(frozen=True, slots=True)
class Weights:
    """`slope * extent + bias`, summed over the loops of an operator. A view is index arithmetic within the loops of its result.

    The paper gives neither number. These make the mean cluster of MobileViT weigh what its figure 14 says.
    """

    slope: float = 0.1
    bias: float = 1.0

    def of(self, node: Node) -> float:
        """The weight of an operator. Raises CheckError where a shape is symbolic."""
        return self.of_nest(nest_of(node))

    def of_nest(self, nest: Nest) -> float:
        """The weight of its loops."""
        return sum(self.slope * each.extent + self.bias for each in nest.loops)


def fitted(nests: Sequence[Sequence[Nest]], budgets: Sequence[float]) -> Weights:
    """The weights that fit best how many candidates were tried for each set of operators: least squares, neither number below zero.

    `nests[i]` are the loops of what was tuned together, `budgets[i]` the candidates. Raises ValueError for fewer than two sets.
    """
    if len(nests) < 2 or len(nests) != len(budgets):
        raise ValueError(f"expected two sets of operators or more, and a budget for each; got {len(nests)} and {len(budgets)}")
    extents = np.array([float(sum(loop.extent for nest in found for loop in nest.loops)) for found in nests])
    loops = np.array([float(sum(len(nest.loops) for nest in found)) for found in nests])
    wanted = np.asarray(budgets, dtype=float)
    slope, bias = np.linalg.lstsq(np.stack([extents, loops], axis=1), wanted, rcond=None)[0]
    if slope < 0:
        slope, bias = 0.0, _alone(loops, wanted)
    elif bias < 0:
        slope, bias = _alone(extents, wanted), 0.0
    return Weights(float(slope), float(bias))


def _alone(of: np.ndarray, wanted: np.ndarray) -> float:
    """The best multiple of one column."""
    square = float(of @ of)
    return max(0.0, float(of @ wanted) / square) if square else 0.0
