"""What a plan sends in a step, added up by collective, axis and part of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from autopar.cost_model.conversion import STEP_SECONDS
from autopar.cost_model.conversion_steps import Term
from autopar.ir.layout import Layout
from autopar.report.block_rows import BlockRows
from autopar.report.module_paths import ModulePaths
from autopar.search.result.end_of_step import end_of_step, has_no_bucket
from autopar.search.result.priced_plan import SYNC, PricedPlan
from autopar.search.space.recompute_policy import RECOMPUTED
from autopar.search.space.strategies import ParameterStrategy

Row = list[Any]


@dataclass
class _Sum:
    """What one row adds up: the numbers of the blocks, the modules in them, how often, bytes and
    seconds.
    """

    numbers: set[int] = field(default_factory=set)
    modules: dict[str, None] = field(default_factory=dict)
    times: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0


def collectives(found: PricedPlan, names: ModulePaths, blocks: BlockRows) -> list[Row]:
    """The rows of one rank: of a pipeline's, the one that has most to do."""
    sums: dict[tuple, _Sum] = defaultdict(_Sum)
    for part, nodes, term, each in _terms(found):
        for node in nodes:
            instance, module = names.split(node)
            alike, prefix = (
                (blocks.alike[instance], instance[0])
                if instance is not None
                else (-1, module or "(root)")
            )
            row = sums[
                (part, "copy", -1, "", -1, "")
                if term.kind == "copy"
                else (part, term.kind, term.axis, term.phase, alike, prefix)
            ]
            if instance is not None and term.kind != "copy":
                row.numbers.add(instance[1])
                row.modules[module] = None
            row.times += each if term.nbytes else 0
            row.nbytes += each * term.nbytes
            row.seconds += each * term.seconds
    rows: list[Row] = [
        [
            *key[:4],
            names.label(key[5], row.numbers) if row.numbers else key[5],
            list(row.modules),
            row.times,
            row.nbytes,
            row.seconds,
        ]
        for key, row in sums.items()
    ]
    return sorted(rows, key=lambda row: -row[8])


def _terms(found: PricedPlan) -> Iterator[tuple[str, Sequence[fx.Node], Term, int]]:
    """Every part of a step's communication: the kind of seconds it counts as, the nodes that it is
    for, and how often for each of them.
    """
    problem, microbatches, rules = found.problem, found.microbatches, found.analysis.rules
    of_vertex, of_group = _here(found, problem.vertex_of), _here(found, problem.tensor_of)
    yield from _synchronisation(found, of_vertex)
    for i, v in enumerate(problem.vertices):
        choice = found.choice(v.node)
        if not isinstance(choice, ParameterStrategy):
            for term in found.costs.kernels.terms(v.node, rules.get(v.node), choice):
                yield "compute", of_vertex[i], replace(term, phase="kernel"), microbatches
                if v.states[found.solution.chosen[i]] == RECOMPUTED and term.phase == "forward":
                    yield "recomputation", of_vertex[i], replace(term, phase="kernel"), microbatches
    for g, tensor in enumerate(problem.tensors):
        node = problem.vertices[tensor.producer].node
        for wanted, needed in problem.wanted(tensor, found.solution.chosen).items():
            source = found.choice(node).out
            for term in _path(found, node, source, wanted):
                yield "conversions", of_group[g], term, microbatches
            if (
                needed
                and (g, wanted) in found.solution.recomputed
                and tensor.moves[tensor.sources[source], tensor.targets[wanted]]
            ):
                for term in _path(found, node, source, wanted):
                    if term.phase == "forward":
                        yield "recomputation", of_group[g], term, microbatches


def _synchronisation(
    found: PricedPlan, of_vertex: Mapping[int, Sequence[fx.Node]]
) -> Iterator[tuple[str, Sequence[fx.Node], Term, int]]:
    """What is done once a step. What goes in buckets has its share of what they take, less what the
    last backward hides.
    """
    choices = ((i, v.node, found.choice(v.node)) for i, v in enumerate(found.problem.vertices))
    terms = [
        (of_vertex[i], t)
        for i, node, c in choices
        if isinstance(c, ParameterStrategy)
        for t in found.costs.parameters.synchronisation_terms(node, c)
    ]
    alone = sum(len(nodes) * term.seconds for nodes, term in terms if has_no_bucket(found, term))
    counted, exposed = (
        sum(ends[stage][SYNC] for stage in found.busiest_stages) - alone
        for ends in (found.end_of_step_estimate, end_of_step(found))
    )
    scale = exposed / counted if counted > 0 else 1.0
    for nodes, term in terms:
        yield (
            SYNC,
            nodes,
            term if has_no_bucket(found, term) else replace(term, seconds=scale * term.seconds),
            1,
        )


def _here(found: PricedPlan, places: dict[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """By number: the nodes of the busiest rank, as often as its stages have them."""
    nodes: dict[int, list[fx.Node]] = defaultdict(list)
    for node, number in places.items():
        nodes[number] += [node] * sum(
            stage in found.busiest_stages for stage in found.stage_of[node]
        )
    return nodes


def _path(found: PricedPlan, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
    """The terms of a conversion, with what its steps cost besides as a copy of nothing."""
    if source == target or not isinstance(node.meta["val"], torch.Tensor):
        return []
    steps = len(found.costs.conversions.path(node, source, target))
    return [
        *found.costs.conversions.terms(node, source, target),
        Term("copy", -1, 0.0, steps * STEP_SECONDS, "forward"),
    ]
