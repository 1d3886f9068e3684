"""Units: the smallest parts of a graph that a stage cut, or a choice of a solution, leaves whole.

A unit ends where few tensors are alive: at no place near by is only a part of these tensors alive.
A transformer layer has two such places, where only the residual stream goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.fx as fx

from autopar.rules.analysis import Analysis

_HEAVY = ("matmul", "conv", "attention")
_NEAR = 6  # cuts on each side that a cut is compared with

_Cut = tuple[int, frozenset[fx.Node]]  # the index of the first call after it, and what is alive


@dataclass(frozen=True)
class Units:
    """The units of a graph.

    Attributes:
        nodes: the calls of each unit, in the graph's order.
        duplicated: calls that each stage runs for itself (masks, positions).
        has_parameter: for each unit, whether it reads a parameter.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    duplicated: frozenset[fx.Node]
    has_parameter: tuple[bool, ...]

    @property
    def starts(self) -> tuple[fx.Node, ...]:
        """The first node of each unit."""
        return tuple(unit[0] for unit in self.nodes)


def split_into_units(
    analysis: Analysis, duplicated: Collection[fx.Node], user_cuts: Collection[fx.Node] = ()
) -> Units:
    """The units of a graph.

    Args:
        duplicated: calls that belong to no unit: each stage runs them for itself.
        user_cuts: nodes with which a unit must begin, because the user cuts there.
    """
    calls = [n for n in analysis.graph.nodes if n.op == "call_function" and n not in duplicated]
    place = {n: i for i, n in enumerate(calls)}
    cuts = _possible_cuts(analysis, calls, place)
    chosen = {
        i
        for k, (i, alive) in enumerate(cuts)
        if not _is_dominated(alive, cuts[max(0, k - _NEAR) : k + _NEAR + 1])
    }
    chosen |= {place[n] for n in user_cuts if n in place}
    bounds = [0, *sorted(chosen - {0}), len(calls)]
    nodes = tuple(tuple(calls[a:b]) for a, b in pairwise(bounds))
    parameters = {n for n, state in analysis.state.items() if state.kind == "parameter"}
    has_parameter = tuple(
        any(not parameters.isdisjoint(n.all_input_nodes) for n in unit) for unit in nodes
    )
    return Units(nodes, frozenset(duplicated), has_parameter)


def _possible_cuts(
    analysis: Analysis, calls: Sequence[fx.Node], place: dict[fx.Node, int]
) -> list[_Cut]:
    """For each heavy call the cut before it where fewest tensors are alive, after the heavy call
    before.
    """
    last_use = {n: max((place[u] for u in n.users if u in place), default=-1) for n in calls}
    alive: set[fx.Node] = set()
    best: tuple[int, int, frozenset[fx.Node]] | None = None
    cuts: list[_Cut] = []
    module = None
    for i, node in enumerate(calls):
        alive = {n for n in alive if last_use[n] >= i}
        begins_module = (own := node.meta.get("module", "").rpartition(".")[0]) != module
        module = own
        # Among equally good cuts the first in a module is best, because people cut there.
        if i and (best is None or (len(alive), not begins_module) < (best[0], best[1])):
            best = (len(alive), int(not begins_module), frozenset(alive))
            where = i
        rule = analysis.rules.get(node)
        if rule is not None and rule.kind in _HEAVY:
            if best is not None:
                cuts.append((where, best[2]))
            best = None
        alive.add(node)
    return cuts


def _is_dominated(alive: frozenset[fx.Node], near: Sequence[_Cut]) -> bool:
    """Whether at a cut near by only a part of these tensors is alive."""
    return any(other < alive for _, other in near)


def rank_without_parameter(
    has_parameter: Sequence[bool], starts: Sequence[int], pipeline: int
) -> int | None:
    """The first of ``pipeline`` ranks that reads no parameter in any of its stages; None where each
    rank reads one. A rank without a parameter could not make an optimizer.

    Args:
        has_parameter: for each unit, whether it reads a parameter.
        starts: the first unit of each stage.
    """
    ranges = zip(starts, [*starts[1:], len(has_parameter)], strict=True)
    ranks = {stage % pipeline for stage, (a, b) in enumerate(ranges) if any(has_parameter[a:b])}
    return next((rank for rank in range(pipeline) if rank not in ranks), None)
