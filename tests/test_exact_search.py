"""No plan is faster than the plan of the exact search: tests try every cut, strategy and set of
saved results of small pipelines, within memory budgets.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import brute_force
import letter_graphs
import numpy as np
import pytest
import small_graphs
import torch
import torch.fx as fx
import zoo

from autopar.cost_model import Action, Cluster, actions, schedule_seconds
from autopar.ir.schedules import SCHEDULES
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.fitting.exact_search import solve_exactly
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.cost_weights import CostBreakdown
from autopar.search.inner.candidate import best_candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.solver_work import SolverWork
from autopar.search.result.assemble import assemble
from autopar.search.result.staged_graph import staged_costs, staged_graph
from autopar.search.space.choices.node_choices import NodeChoices
from autopar.search.space.configuration import Configuration, least_step_ratio
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options
from autopar.search.space.strategies import Choice

LETTERS = dict(B=64, S=8, H=64, F=256, G=128, K=16, V=512)
EXACT = 1e-7
FLIGHTS = {"1f1b": lambda p, m: [min(p - s, m) for s in range(p)], "gpipe": lambda p, m: [m] * p}


def search_of(name: str, axis: int, recompute: str, stages: int) -> InnerSearch:
    model = letter_graphs.Small(name, LETTERS, torch.float32)
    options = Options(axis * stages, recompute=recompute, parallel=dict(pipeline=stages, data=axis))
    return InnerSearch(small_graphs.analyse(model, model.sample), Cluster.load("cpu"), options)


def thin(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Leave each node its first choice, which splits nothing, and ``most`` nodes one or two
    more.
    """
    whole = NodeChoices.on_mesh

    def thinned(
        self: NodeChoices, axes: Sequence[Axis], nodes: Any = None
    ) -> dict[fx.Node, list[Choice]]:
        found, left = whole(self, axes, nodes), most
        for node, choices in found.items():
            others = choices[1:]
            keep = 2 if node.op == "placeholder" else 1
            found[node] = choices[:1] + (others[-keep:] if left > 0 else [])
            left -= bool(others)
        return found

    monkeypatch.setattr(NodeChoices, "on_mesh", thinned)


def cost_breakdowns(
    search: InnerSearch, configuration: Configuration, starts: tuple[int, ...]
) -> list[CostBreakdown]:
    """The cost breakdowns of all solutions of one cut."""
    staged = staged_graph(search, starts)
    analysis, own = staged.analysis, {n: n for n in staged.analysis.graph.nodes}
    choices = NodeChoices(analysis, own, search.options).on_mesh(configuration.axes)
    costs = staged_costs(search, configuration, staged)
    problem = build_problem(
        analysis.graph,
        own,
        choices,
        analysis.rules,
        costs,
        search.recompute,
        staged.stage_of.__getitem__,
        configuration.stages,
    )
    return [
        problem.cost_breakdown(chosen, recomputed)
        for chosen, recomputed in brute_force.assignments(problem)
    ]


def steps(
    found: list[CostBreakdown], configuration: Configuration
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a step, and bytes of the device with most memory, of each solution."""
    kinds = ("forward", "backward", "send", "step", "kept", "state")
    forward, backward, send, step, kept, state = (
        np.array([getattr(b, kind) for b in found]).T for kind in kinds
    )
    memory = (
        state
        + np.array(
            FLIGHTS[configuration.schedule](configuration.pipeline, configuration.microbatches)
        )[:, None]
        * kept
    ).max(axis=0)
    return longest(configuration, {"F": forward, "B": backward}, send / 2, step), memory


def longest(
    configuration: Configuration,
    took: dict[str, np.ndarray],
    receiving: np.ndarray,
    step: np.ndarray,
) -> np.ndarray:
    """Seconds of a step: the longest path through the orders of ranks and the transfers between
    them, by recursion. Arrays are [stage, solution].
    """
    orders = actions(configuration.schedule, configuration.pipeline, 1, configuration.microbatches)
    before = {
        action: previous
        for order in orders
        for previous, action in zip([None, *order], order, strict=False)
    }

    @functools.cache
    def end(action: Action | None) -> np.ndarray:
        if action is None:
            return np.zeros_like(step[0])
        kind, stage, microbatch = action
        neighbour = Action(kind, stage + {"F": -1, "B": 1}[kind], microbatch)
        start = end(before[action])
        if neighbour in before:  # torch receives when the action wants to run
            start = np.maximum(start, end(neighbour)) + receiving[max(stage, neighbour.stage)]
        return start + took[kind][stage]

    return np.max([end(order[-1]) + step[rank] for rank, order in enumerate(orders)], axis=0)


def cuts(search: InnerSearch, stages: int) -> list[tuple[int, ...]]:
    return [
        (0, *rest) for rest in itertools.combinations(range(1, len(search.units.nodes)), stages - 1)
    ]


# graph, ranks of a stage, stages, the number of nodes with a choice of strategies, recompute
PIPELINES = [
    ("deep", 1, 2, 0, "auto"),
    ("residual", 1, 2, 0, "auto"),
    ("two losses", 1, 2, 0, "auto"),
    ("unrolled", 1, 2, 0, "none"),
    ("deep", 1, 3, 0, "auto"),
    ("mlp", 2, 2, 3, "auto"),
    ("deep", 2, 2, 3, "none"),
    ("tied", 2, 2, 3, "none"),
    ("shared weight", 2, 2, 3, "auto"),
]


def _solved_within(
    search: InnerSearch, configuration: Configuration, budget: float, best: float
) -> tuple[str, tuple[int, ...]]:
    """The node after which the exact search cuts within a budget of bytes, and its choices; its
    seconds must be ``best``.
    """
    search.options = dataclasses.replace(search.options, memory_budget=budget)
    found = solve_exactly(search, configuration, search.analysis.batch.size, SolverWork(1e15))
    assert found is not None
    assert max(found.device_bytes()) <= budget
    assert brute_force.possible(found.problem, found.solution.chosen, found.solution.recomputed)
    assert sum(found.seconds_by_kind().values()) == pytest.approx(best, rel=EXACT)
    assert found.gap < 1e-6
    (sent, *_) = found.analysis.graph.find_nodes(op="call_function", target=send)
    return sent.args[0].name, found.solution.chosen


@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_nothing_that_fits_is_faster(
    case: tuple[str, int, int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, axis, stages, free, recompute = case
    thin(monkeypatch, free)
    search = search_of(name, axis, recompute, stages)
    axes = (Axis("data", axis, "free", is_required=False),)
    every = {
        cut: cost_breakdowns(search, Configuration(stages, axes, 2), cut)
        for cut in cuts(search, stages)
    }
    used = set()
    for schedule, microbatches in itertools.product(FLIGHTS, (2, 4)):
        if schedule == "1f1b" and microbatches < stages:
            continue
        configuration = Configuration(stages, axes, microbatches, schedule=schedule)
        priced = {cut: steps(found, configuration) for cut, found in every.items()}
        seconds, memory = (np.concatenate(each) for each in zip(*priced.values(), strict=True))
        assert len(seconds) >= 80
        least, most = memory.min(), memory[seconds <= seconds.min() * (1 + EXACT)].min()
        between = least + (most - least) * np.array([0.3, 0.7])
        for budget in (least * (1 + 1e-6), *between, most * (1 + 1e-6)):
            best = seconds[memory <= budget].min()
            used.add(_solved_within(search, configuration, float(budget), best))
        search.options = dataclasses.replace(
            search.options, memory_budget=float(least) * (1 - 1e-3)
        )
        assert (
            solve_exactly(search, configuration, search.analysis.batch.size, SolverWork(1e15))
            is None
        )
    assert len(used) > 1 or recompute == "none"  # cuts, strategies or saved results differ


def test_a_known_plan_is_returned_unless_a_better_one_is_found() -> None:
    """The exact search starts from the best candidate of a pipeline. It finds no slower plan, and
    recomputes nothing where memory is ample.
    """
    model, sample = zoo.mlp(batch=16, layers=4)
    analysis = small_graphs.analyse(model, sample)
    cluster = Cluster.load("cpu")
    options = Options(2, parallel=dict(pipeline=2), micro_batch_size=16)
    search = InnerSearch(analysis, cluster, options)
    configuration = Configuration(2, (Axis("data", 1, "data"),), 4)
    first = assemble(search, best_candidate(search, configuration, 16))
    known = sum(first.seconds_by_kind().values())
    found = solve_exactly(search, configuration, 16, SolverWork(1e15), first)
    assert found is not None
    assert sum(found.seconds_by_kind().values()) <= known
    assert not any(found.solution.cost_breakdown.recomputation)
    again = solve_exactly(search, configuration, 16, SolverWork(1e15), found)
    assert again is found
    assert again.gap < 1e-6
    out_of_time = solve_exactly(search, configuration, 16, SolverWork(0.0), first)
    assert out_of_time is first


def test_a_cut_of_the_user_is_kept() -> None:
    search = search_of("deep", 1, "auto", 2)
    configuration = Configuration(2, (Axis("data", 1, "data"),), 2)
    for cut in cuts(search, 2):
        found = solve_exactly(
            search, configuration, search.analysis.batch.size, SolverWork(1e15), starts=cut
        )
        assert found is not None
        first = next(
            n
            for n in found.analysis.graph.nodes
            if n.op == "call_function" and n.meta["stage"] == 1 and n.target is not send
        )
        assert first.name == search.units.nodes[cut[1]][0].name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_pipeline_is_faster_than_the_least_step_ratio(schedule: str) -> None:
    draw = np.random.default_rng(0)
    for p, m in itertools.product((2, 3, 4), (2, 4, 8)):
        microbatches = m * p
        uneven = (1 - 1 / microbatches) ** np.arange(p)[:, None] * draw.uniform(0, 1, 500)
        random = draw.uniform(0, 1, (p, 500)) ** draw.integers(1, 6, 500)
        for work in (uneven, random):
            share = draw.uniform(0, 1, 500)
            seconds = schedule_seconds(
                schedule, p, 1, microbatches, work * share, work * (1 - share)
            )
            assert (
                seconds
                >= least_step_ratio(Configuration(p, (), microbatches, 1, schedule))
                * work.sum(axis=0)
                * (1 - 1e-9)
            ).all()
