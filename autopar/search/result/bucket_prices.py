"""The price of a plan at the sizes of its own ZeRO buckets, and with prefetch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout, parse_layout
from autopar.ir.zero_buckets import bucket_steps, gathered_together
from autopar.search.ilp.problem import Problem, RecomputedConversions
from autopar.search.ilp.solution import Solution
from autopar.search.pricing.costs import Costs
from autopar.search.pricing.node_sizes import chunk_count
from autopar.search.pricing.step_prices import ALL_EXPOSED, ExposedParts
from autopar.search.result.chosen_program import ChosenProgram, chosen_program, with_program
from autopar.search.result.prefetched_gathers import exposed_parts
from autopar.search.result.priced_plan import PricedPlan


def at_own_buckets(priced: PricedPlan, problem_at: Callable[[Costs], Problem]) -> PricedPlan:
    """The same plan, in which each gathered parameter pays its part of its own bucket. Before, the
    bucket was taken to be as large as it may be. Where the backward gathers a parameter again, it
    does so with all of its bucket.

    Args:
        problem_at: the problem of the plan at other costs, with the same vertices and choices.
    """
    program = chosen_program(priced)
    if not _gathers_parameters(priced, program):
        return priced
    problem, solution = priced.problem, priced.solution
    more = _gathered_again(problem, solution, program)
    needed = problem.needed_conversions(more, solution.chosen)
    solution = replace(solution, recomputed=solution.recomputed | needed)
    priced = replace(priced, solution=solution, gathered_again=more - needed)
    program = chosen_program(with_program(priced, program))
    elements = _bucket_elements(priced, program)
    buckets = tuple(sorted((node.name, number) for node, number in elements.items()))
    priced = replace(priced, zero_buckets=buckets, problem_at=problem_at)
    return _priced(with_program(priced, program), ALL_EXPOSED)


def with_prefetch(priced: PricedPlan) -> PricedPlan:
    """The price of a plan of :func:`at_own_buckets` whose ZeRO buckets are gathered one ahead."""
    return _priced(priced, exposed_parts(priced))


def _priced(priced: PricedPlan, exposed: ExposedParts) -> PricedPlan:
    """The plan whose ranks wait for these parts of its buckets' collectives."""
    assert priced.problem_at is not None
    elements, solution = dict(priced.zero_buckets or ()), priced.solution
    costs = priced.costs.in_buckets(elements, exposed)
    problem = priced.problem_at(priced.costs.at(priced.step_prices).in_buckets(elements, exposed))
    breakdown = problem.cost_breakdown(solution.chosen, solution.recomputed)
    for c in problem.conversions(solution.chosen):
        if (c.number, c.layout) in priced.gathered_again:
            seconds = c.tensor.count * c.tensor.recompute_seconds[c.source, c.target]
            breakdown = replace(
                breakdown,
                recomputation=breakdown.recomputation + seconds,
                converting_again=breakdown.converting_again + seconds,
                backward=breakdown.backward + seconds,
            )
    solution = replace(solution, cost_breakdown=breakdown)
    other = replace(priced, problem=problem, costs=costs, solution=solution, zero_exposed=exposed)
    return with_program(other, chosen_program(priced))


def _gathered_again(
    problem: Problem, solution: Solution, program: ChosenProgram
) -> RecomputedConversions:
    """The conversions that the backward makes again only because they are in a bucket with others
    that it makes again.
    """
    numbers = {node.name: number for node, number in problem.tensor_of.items()}
    buckets = [{numbers[name] for name in bucket} for bucket in program.zero_buckets]
    again = {number for number, _ in solution.recomputed}
    wanted = {number for bucket in buckets if bucket & again for number in bucket}
    return frozenset(
        (c.number, c.layout)
        for c in problem.conversions(solution.chosen)
        if c.number in wanted
        and c.tensor.moves[c.source, c.target]
        and np.isfinite(c.tensor.recompute_seconds[c.source, c.target])
    ) - frozenset(solution.recomputed)


def _gathers_parameters(priced: PricedPlan, program: ChosenProgram) -> bool:
    return any(
        bucket_steps(steps) is not None
        for node in priced.analysis.state
        for steps in program.conversions.get(node.name, {}).values()
    )


def _bucket_elements(priced: PricedPlan, program: ChosenProgram) -> dict[fx.Node, float]:
    """For each parameter in a bucket the elements of the bucket that a rank gathers."""
    nodes = {node.name: node for node in priced.analysis.state}
    sizes, found = priced.configuration.sizes, dict[fx.Node, float]()

    def elements(name: str) -> float:
        (layout,) = program.conversions[name]
        gathered: Layout = parse_layout(layout)
        return math.prod(nodes[name].meta["val"].shape) / chunk_count(gathered, sizes)

    for bucket in gathered_together(program):
        total = sum(map(elements, bucket))
        found |= {nodes[name]: total for name in bucket}
    return found
