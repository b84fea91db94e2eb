"""How hard operators are to tune: linear in the extents of their loops (AGO, equation 1); a cluster weighs what its operators do."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir.graph import Node
from lowtide.ir.operators.nests import Nest, nest_of


@dataclass(frozen=True, slots=True)
class LoopWeights:
    """`slope * extent + bias`, summed over the loops of an operator. A view is index arithmetic within the loops of its result.

    The paper gives neither number. These make the mean cluster of MobileViT weigh what its figure 14 says.
    """

    slope: float = 0.1
    bias: float = 1.0

    def of(self, node: Node) -> float:
        """The weight of an operator. Raises CheckError where a shape is symbolic."""
        return self.of_nest(nest_of(node))

    def of_nest(self, nest: Nest) -> float:
        return sum(self.slope * each.extent + self.bias for each in nest.loops)
