"""What a search found on one mesh."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch.fx as fx

from autopar.search.costs import Costs
from autopar.search.options import Axis
from autopar.search.problem import Choice, Problem
from autopar.search.solve import Solution
from autopar.search.strategies import Storage


@dataclass
class Found:
    """The best plan of one mesh: the problem, the solution, and how far it may be from the optimum."""

    axes: tuple[Axis, ...]
    problem: Problem
    costs: Costs
    solution: Solution
    gap: float

    def choice(self, node: fx.Node) -> Choice:
        v = self.problem.vertex_of[node]
        return self.problem.vertices[v].choices[self.solution.chosen[v]]

    def seconds_by_kind(self) -> dict[str, float]:
        """The step time; conversions are what is left of it."""
        kinds = dict.fromkeys(("compute", "conversions", "gradient synchronisation", "optimizer"), 0.0)
        for v, k in zip(self.problem.vertices, self.solution.chosen, strict=True):
            choice = v.choices[k]
            if isinstance(choice, Storage):
                kinds["gradient synchronisation"] += v.count * sum(t.seconds for t in self.costs.synchronisation(v.node, choice))
                kinds["optimizer"] += v.count * self.costs.update(v.node, choice)
            else:
                kinds["compute"] += v.count * float(v.seconds[k])
        kinds["conversions"] = self.solution.seconds - sum(kinds.values())
        return kinds

    def nbytes_by_kind(self) -> dict[str, float]:
        """One device's memory; activations are what is left of it."""
        kinds: dict[str, float] = defaultdict(float)
        for v, k in zip(self.problem.vertices, self.solution.chosen, strict=True):
            choice = v.choices[k]
            if isinstance(choice, Storage):
                for kind, nbytes in self.costs.state_bytes(v.node, choice).items():
                    kinds[kind] += v.count * nbytes
        kinds["activations"] = self.solution.nbytes - sum(kinds.values())
        return {kind: n for kind, n in kinds.items() if n}
