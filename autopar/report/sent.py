"""What a plan sends in a step, added up by collective, axis and part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.cost_model.conversion import STEP, Term
from autopar.layout import Layout
from autopar.report.names import Names
from autopar.search.found import Found
from autopar.search.strategies import Storage

Row = list[Any]


def collectives(analysis: Analysis, found: Found, names: Names) -> list[Row]:
    rows: dict[tuple, Row] = {}
    for part, node, term, times in _terms(analysis, found):
        block, module = names.split(node)
        key = (part, term.kind, term.axis, term.phase, block or module or "(root)")
        if term.kind == "copy":
            key, block = (part, "copy", -1, "", ""), ""
        row = rows.setdefault(key, [*key, [], 0, 0.0, 0.0])
        if block and module not in row[5]:
            row[5].append(module)
        row[6] += times if term.nbytes else 0
        row[7] += times * term.nbytes
        row[8] += times * term.seconds
    return sorted(rows.values(), key=lambda row: -row[8])


def _terms(analysis: Analysis, found: Found) -> Iterator[tuple[str, fx.Node, Term, int]]:
    """Every part of a step's communication: the kind of seconds it counts as, the tensor's node, the term and how often it occurs."""
    problem, microbatches = found.problem, found.costs.microbatches
    for v in problem.vertices:
        choice = found.choice(v.node)
        if isinstance(choice, Storage):
            for term in found.costs.synchronisation(v.node, choice):
                yield "gradient synchronisation", v.node, term, v.count
        else:
            for term in found.costs.sent_by_kernel(v.node, analysis.rules.get(v.node), choice):
                yield "compute", v.node, term, v.count * microbatches
    for g in problem.groups:
        node = problem.vertices[g.producer].node
        for wanted in dict.fromkeys(found.choice(problem.vertices[v].node).ins[p] for v, p in g.ports):
            for term in _path(found, node, found.choice(node).out, wanted):
                yield "conversions", node, term, g.count * microbatches


def _path(found: Found, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
    """The terms of a conversion, with what its steps cost besides as a copy of nothing."""
    value = node.meta["val"]
    if source == target or not isinstance(value, torch.Tensor):
        return []
    tensor = (tuple(value.shape), value.dtype.itemsize, found.costs.differentiable(node), source, target)
    steps = len(found.costs.conversion.path(*tensor))
    return [*found.costs.conversion.terms(*tensor), Term("copy", -1, 0.0, steps * STEP, "forward")]
