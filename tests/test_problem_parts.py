"""Problems of one graph share their parts. A problem made after others is that of a search that has
made none, number for number, whatever differs between the problems.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch.fx as fx
import zoo
from small_graphs import analyse

from autopar.cost_model import Cluster
from autopar.rules.analysis import Analysis
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.lower_bound import LowerBound
from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import SearchCache
from autopar.search.pricing.step_prices import ByPhase, StepPrices, Traffic
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options

AXES = Axis("data", 2, use="data"), Axis("tensor", 2)
PRICES = StepPrices(((Traffic("backward", "all_reduce", 0), 1e-9),), ByPhase(0.5, 0.5), (0.0,))
Asked = dict[str, Any]  # options, and what else a problem is made for
ASKED: dict[str, Asked] = {
    "first": {},
    "zero": dict(zero=3),
    "no recomputation": dict(recompute="none"),
    "full recomputation": dict(recompute="full"),
    "optimizer": dict(optimizer="sgd"),
    "reduction": dict(reduce_dtype="fp32"),
    "constraint": dict(constraints={"transformer.h.*.mlp.c_fc.weight": "I S1"}),
    "samples": dict(samples=4),
    "microbatches": dict(microbatches=2),
    "prices": dict(step_prices=PRICES),
    "order": dict(axes=AXES[::-1]),
    "place": dict(place=None),
    "again": {},
}


def problem(
    analysis: Analysis, cluster: Cluster, cache: SearchCache | None, asked: Asked
) -> Problem:
    of_problem = dict(samples=8, microbatches=1, step_prices=None, axes=AXES, place=0)
    given = {k: asked.get(k, v) for k, v in of_problem.items()}
    options = Options(4, **{k: v for k, v in asked.items() if k not in of_problem})
    search = InnerSearch(analysis, cluster, options, cache=cache)
    configuration = Configuration(1, given["axes"], given["microbatches"], place=given["place"])
    return search.problem(configuration, given["samples"], step_prices=given["step_prices"])


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b, equal_nan=True)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def assert_same(a: Problem, b: Problem) -> None:
    """Both problems have the same numbers."""
    assert (a.vertex_of, a.tensor_of, a.stages, a.solver) == (
        *(b.vertex_of, b.tensor_of, b.stages, b.solver),
    )
    for parts in ("vertices", "tensors"):
        ones, others = getattr(a, parts), getattr(b, parts)
        assert len(ones) == len(others)
        for one, other in zip(ones, others, strict=True):
            for field in fields(one):
                assert_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("h100-sxm", marks=pytest.mark.slow)])
def test_problems_of_other_options_after_others(kind: str) -> None:
    analysis = analyse(*zoo.gpt2(layers=2, batch=8))
    cluster = Cluster.load(kind)
    cache = SearchCache(analysis, cluster)
    shared = {name: problem(analysis, cluster, cache, asked) for name, asked in ASKED.items()}
    for name, asked in ASKED.items():
        assert_same(shared[name], problem(analysis, cluster, None, asked))
    assert shared["again"] is shared["first"]


def test_problems_on_another_cluster_after_one() -> None:
    analysis = analyse(*zoo.gpt2(layers=2, batch=8))
    first, second = Cluster.load("h100-sxm"), Cluster.load("a100-sxm")
    cache = SearchCache(analysis, first)
    before = problem(analysis, first, cache, {})
    after = problem(analysis, second, SearchCache(analysis, second, like=cache), {})
    assert_same(after, problem(analysis, second, None, {}))
    forward = ([v.forward for v in each.vertices] for each in (before, after))
    assert any((a != b).any() for a, b in zip(*forward, strict=True))


def test_what_does_not_depend_on_an_option_is_taken_over() -> None:
    analysis, cluster = analyse(*zoo.gpt2(layers=2, batch=8)), Cluster.load("h100-sxm")
    cache = SearchCache(analysis, cluster)
    first, zero = (problem(analysis, cluster, cache, asked) for asked in ({}, dict(zero=3)))

    def is_state(node: fx.Node) -> bool:
        return node in analysis.state

    for one, other in zip(first.vertices, zero.vertices, strict=True):
        assert (one is other) != is_state(one.node)


def test_the_lower_bound_of_a_choice_that_nothing_converts() -> None:
    made = problem(analyse(*zoo.gpt2(layers=1)), Cluster.load("cpu"), None, {})
    weights = CostWeights(*(np.ones(1) for _ in range(5)), price=np.zeros(1), flight=np.ones(1))
    without = replace(weights, converting=np.zeros(1))
    tensor = next(t for t in made.tensors if len(t.sources) > 1 and t.ports)
    tensor.seconds[0] = np.inf
    bounds = [LowerBound(made.vertices, made.tensors).at(each) for each in (weights, without)]
    assert 0 < bounds[1] <= bounds[0] < np.inf
    tensor.seconds[:] = np.inf
    assert LowerBound(made.vertices, made.tensors).at(without) == np.inf
