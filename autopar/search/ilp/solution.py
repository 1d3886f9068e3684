"""A solution of a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.search.ilp.cost_weights import CostBreakdown
from autopar.search.ilp.problem import RecomputedConversions


@dataclass(frozen=True)
class Solution:
    """A solution of a problem.

    Attributes:
        chosen: the number of the choice of each vertex.
        recomputed: the conversions that are recomputed in the backward.
        cost_breakdown: what the solution costs.
        value: its cost at the weights that were solved for.
        bound: a cost that no solution is below, proven at these weights.
    """

    chosen: tuple[int, ...]
    recomputed: RecomputedConversions
    cost_breakdown: CostBreakdown
    value: float = math.nan
    bound: float = -math.inf
