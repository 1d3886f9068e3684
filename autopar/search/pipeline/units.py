"""Where a graph may be cut: its units, the smallest parts that a pipeline stage or a choice of what
to recompute is made of.

A unit ends where few tensors live: no other place near by has fewer of the same. In a transformer
these are the two places in a layer where only the residual stream goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.fx as fx

from autopar.rules.analysis import Analysis

_HEAVY = ("matmul", "conv", "attention")
_NEAR = 6  # candidates on each side that a candidate is compared with


@dataclass(frozen=True)
class Units:
    """``nodes``: the calls of each unit, in the graph's order; ``duplicated``: those that every
    part of the graph makes for itself;
    ``has_parameter``: which units read a parameter."""

    nodes: tuple[tuple[fx.Node, ...], ...]
    duplicated: frozenset[fx.Node]
    has_parameter: tuple[bool, ...]

    @property
    def starts(self) -> tuple[fx.Node, ...]:
        """The first node of each unit."""
        return tuple(unit[0] for unit in self.nodes)


def units(analysis: Analysis, shared: Collection[fx.Node], also: Collection[fx.Node] = ()) -> Units:
    """The units of a graph.

    Args:
        shared: nodes that are not cut apart (masks, positions): each part makes its own.
        also: nodes before which the user wants to cut.
    """
    calls = [n for n in analysis.graph.nodes if n.op == "call_function" and n not in shared]
    place = {n: i for i, n in enumerate(calls)}
    last = {n: max((place[u] for u in n.users if u in place), default=-1) for n in calls}
    alive: set[fx.Node] = set()
    best: tuple[int, int, frozenset[fx.Node]] | None = None
    candidates: list[tuple[int, frozenset[fx.Node]]] = []
    block = None
    for i, node in enumerate(calls):
        alive = {n for n in alive if last[n] >= i}
        changes = (at := node.meta.get("module", "").rpartition(".")[0]) != block
        block = at
        # Of equally good places, the first of a module: there people would cut.
        if i and (best is None or (len(alive), not changes) < (best[0], best[1])):
            best = (len(alive), int(not changes), frozenset(alive))
            where = i
        rule = analysis.rules.get(node)
        if rule is not None and rule.kind in _HEAVY:
            if best is not None:
                candidates.append((where, best[2]))
            best = None
        alive.add(node)
    wanted = {place[n] for n in also if n in place}
    kept = {
        i
        for k, (i, live) in enumerate(candidates)
        if not _worse(live, candidates[max(0, k - _NEAR) : k + _NEAR + 1])
    } | wanted
    cuts = [0, *sorted(kept - {0}), len(calls)]
    found = tuple(tuple(calls[a:b]) for a, b in pairwise(cuts))
    parameters = {n for n, state in analysis.state.items() if state.kind == "parameter"}
    has_parameter = tuple(
        any(not parameters.isdisjoint(n.all_input_nodes) for n in unit) for unit in found
    )
    return Units(found, frozenset(shared), has_parameter)


def rank_without_parameter(
    has_parameter: Sequence[bool], starts: Sequence[int], pipeline: int
) -> int | None:
    """The first of ``pipeline`` ranks that reads no parameter in any of its stages, which begin
    with the units ``starts``: no optimizer could be made there. None, where each has some."""
    runs = zip(starts, [*starts[1:], len(has_parameter)], strict=True)
    having = {stage % pipeline for stage, (a, b) in enumerate(runs) if any(has_parameter[a:b])}
    return next((rank for rank in range(pipeline) if rank not in having), None)


def _worse(live: frozenset[fx.Node], near: list[tuple[int, frozenset[fx.Node]]]) -> bool:
    """Whether a place near by has all but some of these tensors."""
    return any(other < live for _, other in near)
