"""Rows of the collectives in a step, added up by collective, mesh axis and part of the model."""

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
from autopar.ir.zero_buckets import gathered_together
from autopar.report.block_rows import BlockRows
from autopar.report.module_paths import ModulePaths
from autopar.search.pricing.step_prices import ALL_EXPOSED
from autopar.search.result.chosen_program import chosen_program
from autopar.search.result.end_of_step import end_of_step, has_no_bucket, hidden_seconds
from autopar.search.result.priced_plan import SYNC, PricedPlan
from autopar.search.space.recompute_policy import RECOMPUTED
from autopar.search.space.strategies import ParameterStrategy

Row = list[Any]

_IN_GRAPH, _IN_BUCKETS = ("conversions", "recomputation"), ("all_gather", "reduce_scatter")


@dataclass
class _Sum:
    """The sums of one row.

    Attributes:
        numbers: the numbers of the blocks.
        modules: the modules in the blocks, in order.
        times: the number of collectives.
        nbytes, seconds: their bytes and seconds.
    """

    numbers: set[int] = field(default_factory=set)
    modules: dict[str, None] = field(default_factory=dict)
    times: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0


def collective_rows(found: PricedPlan, names: ModulePaths, blocks: BlockRows) -> list[Row]:
    """``rows["collectives"]`` of a plan: the collectives of one rank, in a pipeline the busiest."""
    sums: dict[tuple, _Sum] = defaultdict(_Sum)
    together = gathered_together(chosen_program(found))
    joined = {name for names in together for name in names[1:]}  # in the collective of another
    for part, nodes, term, times in _terms(found):
        for node in nodes:
            if term.kind == "copy":
                row = sums[part, "copy", -1, "", -1, ""]
            else:
                instance, module = names.split(node)
                group, name = -1, module or "(root)"
                if instance is not None:
                    group, name = blocks.group_of[instance], instance[0]
                row = sums[part, term.kind, term.axis, term.phase, group, name]
                if instance is not None:
                    row.numbers.add(instance[1])
                    row.modules[module] = None
            is_joined = part in _IN_GRAPH and term.kind in _IN_BUCKETS and node.name in joined
            row.times += times if term.nbytes and not is_joined else 0
            row.nbytes += times * term.nbytes
            row.seconds += times * term.seconds
    rows: list[Row] = []
    for (part, kind, axis, phase, _, name), row in sums.items():
        block = names.label(name, row.numbers) if row.numbers else name
        modules = list(row.modules)
        rows.append([part, kind, axis, phase, block, modules, row.times, row.nbytes, row.seconds])
    return sorted(rows, key=lambda row: -row[8])


def hidden_rows(found: PricedPlan) -> list[Row]:
    """``rows["hidden"]`` of a plan."""
    whole, hides = found, any(tensor.beside.any() for tensor in found.problem.tensors)
    if found.zero_exposed != ALL_EXPOSED:
        elements = dict(found.zero_buckets or ())
        whole = replace(found, costs=found.costs.in_buckets(elements, ALL_EXPOSED))
    rows: list[Row] = [[SYNC, *taken] for taken in hidden_seconds(found)]
    if hides or whole is not found:
        all_of_it = _seconds(_conversions(whole, hides=False))
        exposed = _seconds(_conversions(found))
        hidden = [all_of_it[part] - exposed[part] for part in _IN_GRAPH]
        rows = [*([part, s, s] for part, s in zip(_IN_GRAPH, hidden, strict=True)), *rows]
    return [row for row in rows if min(row[1:]) > 0]


# the kind of seconds that counts the term, the nodes, the term, and its number for each node
_Terms = Iterator[tuple[str, Sequence[fx.Node], Term, int]]


def _terms(found: PricedPlan) -> _Terms:
    """All terms of a step's communication on the busiest rank."""
    of_vertex = _nodes_here(found, found.problem.vertex_of)
    yield from _synchronisation(found, of_vertex)
    yield from _kernels(found, of_vertex)
    yield from _conversions(found)


def _kernels(found: PricedPlan, of_vertex: Mapping[int, Sequence[fx.Node]]) -> _Terms:
    """The collectives inside kernels."""
    for i, v in enumerate(found.problem.vertices):
        choice = found.choice(v.node)
        if not isinstance(choice, ParameterStrategy):
            is_recomputed = v.states[found.solution.chosen[i]] == RECOMPUTED
            rule = found.analysis.rules.get(v.node)
            for term in found.costs.of(v.node).kernels.terms(v.node, rule, choice):
                inside = replace(term, phase="kernel")
                yield "compute", of_vertex[i], inside, found.microbatches
                if is_recomputed and term.phase == "forward":
                    yield "recomputation", of_vertex[i], inside, found.microbatches


def _seconds(terms: _Terms) -> dict[str, float]:
    """The sum of the seconds of terms, by the kind of seconds that counts them."""
    seconds: dict[str, float] = defaultdict(float)
    for part, nodes, term, times in terms:
        seconds[part] += times * len(nodes) * term.seconds
    return seconds


def _conversions(found: PricedPlan, hides: bool = True) -> _Terms:
    """The collectives and copies of conversions.

    Args:
        hides: without what computation hides of gradients' sums.
    """
    problem, solution = found.problem, found.solution
    nodes = _nodes_here(found, problem.tensor_of)
    for g, tensor in enumerate(problem.tensors):
        node = problem.vertices[tensor.producer].node
        source = found.choice(node).out
        for wanted, needed in problem.wanted(tensor, solution.chosen).items():
            beside = float(tensor.beside[tensor.targets[wanted]]) if hides else 0.0
            for term in _path_terms(found, node, source, wanted, beside=beside):
                yield "conversions", nodes[g], term, found.microbatches
            is_again = (needed and (g, wanted) in solution.recomputed) or (
                (g, wanted) in found.gathered_again
            )
            if is_again and tensor.moves[tensor.sources[source], tensor.targets[wanted]]:
                for term in _path_terms(found, node, source, wanted, again=True):
                    yield "recomputation", nodes[g], term, found.microbatches


def _synchronisation(found: PricedPlan, of_vertex: Mapping[int, Sequence[fx.Node]]) -> _Terms:
    """The collectives of parameters and gradients, once a step.

    The terms in buckets add up to the seconds that the first forward and the last backward do not
    hide.
    """
    choices = ((i, v.node, found.choice(v.node)) for i, v in enumerate(found.problem.vertices))
    terms = [
        (of_vertex[i], t)
        for i, node, c in choices
        if isinstance(c, ParameterStrategy)
        for t in found.costs.of(node).parameters.synchronisation_terms(node, c)
    ]
    alone = sum(len(nodes) * term.seconds for nodes, term in terms if has_no_bucket(found, term))
    estimated, exposed = (
        sum(ends[stage][SYNC] for stage in found.busiest_stages) - alone
        for ends in (found.end_of_step_estimate, end_of_step(found))
    )
    scale = exposed / estimated if estimated > 0 else 1.0
    for nodes, term in terms:
        if not has_no_bucket(found, term):
            term = replace(term, seconds=scale * term.seconds)
        yield SYNC, nodes, term, 1


def _nodes_here(found: PricedPlan, places: dict[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """By number: the nodes on the busiest rank, repeated for each of its stages that has them."""
    nodes: dict[int, list[fx.Node]] = defaultdict(list)
    for node, number in places.items():
        nodes[number] += [node] * sum(
            stage in found.busiest_stages for stage in found.stage_of[node]
        )
    return nodes


def _path_terms(
    found: PricedPlan,
    node: fx.Node,
    source: Layout,
    target: Layout,
    again: bool = False,
    beside: float = 0.0,
) -> list[Term]:
    """The terms of a conversion, or of the same made again in the backward, and the fixed cost of
    its steps as a copy of zero bytes. ``again`` and ``beside`` as for
    :meth:`NodeConversionCosts.terms_in_graph`.
    """
    if source == target or not isinstance(node.meta["val"], torch.Tensor):
        return []
    steps = len(found.costs.of(node).conversions.path(node, source, target))
    return [
        *found.costs.of(node).conversions.terms_in_graph(node, source, target, again, beside),
        Term("copy", -1, 0.0, steps * STEP_SECONDS, "forward"),
    ]
