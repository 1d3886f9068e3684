"""The costs of a graph that is resized to a batch size are those of a graph that was captured at
this size.
"""

from __future__ import annotations

import numpy as np
import pytest
import small_graphs
import torch
import zoo

from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pricing.resize import resized
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options

MODELS = ["llama", "gpt2", "vit", "t5", "bert", "mixtral", "unet", "cnn", "mixer"]
ARRAYS = ("states", "available", "forward", "backward", "send", "step", "kept", "state", "result")


def captured(name: str, batch: int) -> Analysis:
    return small_graphs.analyse(*getattr(zoo, name)(batch=batch))


def problem_of(analysis: Analysis, samples: int, ranks: int, use: str = "free") -> Problem:
    search = InnerSearch(analysis, Cluster.load("cpu"), Options(ranks, recompute="auto"))
    return search.problem(Configuration(1, (Axis("axis0", ranks, use),), 1), samples)


@pytest.mark.sampled(fast=3, slow=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "samples"), [(4, 16), pytest.param(16, 4, marks=pytest.mark.slow)]
)
def test_costs_are_those_of_a_captured_batch(name: str, size: int, samples: int) -> None:
    found, expected = captured(name, size), captured(name, samples)
    assert_equal_problems(problem_of(found, samples, 2), problem_of(expected, samples, 2))


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize("use", ["free", "data"])
@pytest.mark.parametrize("name", MODELS)
def test_a_microbatch_of_one_sample_stands_for_larger_ones(name: str, use: str) -> None:
    """In a graph of one sample no dim of the batch can be cut; in the resized graph it can."""
    traced = TracedModel(*getattr(zoo, name)(batch=8), None)
    (one, _), (four, _) = traced.analyse(8), traced.analyse(2)
    assert_equal_problems(problem_of(one, 4, 2, use), problem_of(four, 4, 2, use))
    assert_equal_problems(problem_of(four, 1, 2, use), problem_of(one, 1, 2, use))


def assert_equal_problems(found: Problem, expected: Problem) -> None:
    assert len(found.vertices) == len(expected.vertices)
    for v, w in zip(found.vertices, expected.vertices, strict=True):
        assert v.node.name == w.node.name
        assert v.choices == w.choices, v.node
        for array in ARRAYS:
            np.testing.assert_allclose(
                getattr(v, array), getattr(w, array), rtol=1e-12, err_msg=f"{v.node} {array}"
            )
        assert all((a == b).all() for a, b in zip(v.needs, w.needs, strict=True))
    assert len(found.tensors) == len(expected.tensors)
    for g, h in zip(found.tensors, expected.tensors, strict=True):
        assert (g.producer, g.ports, g.sources, g.targets) == (
            h.producer,
            h.ports,
            h.sources,
            h.targets,
        )
        for array in ("seconds", "recompute_seconds", "nbytes", "moves"):
            np.testing.assert_allclose(
                getattr(g, array),
                getattr(h, array),
                rtol=1e-12,
                err_msg=f"{found.vertices[g.producer].node} {array}",
            )


def test_it_costs_more_than_at_the_size_captured() -> None:
    analysis = captured("gpt2", 4)
    small, large = (
        sum(float(v.kept.max()) for v in problem_of(analysis, samples, 2).vertices)
        for samples in (4, 64)
    )
    assert large == pytest.approx(16 * small, rel=0.05)  # except masks and positions


def test_all_is_as_before_afterwards() -> None:
    analysis = captured("llama", 4)

    def state() -> tuple[list[torch.Size], list[str], dict[str, Rule | None], int]:
        calls = [str(n.args) for n in analysis.graph.nodes]
        shapes = [
            n.meta["val"].shape
            for n in analysis.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        return (
            shapes,
            calls,
            {n.name: rule for n, rule in analysis.rules.items()},
            analysis.batch.size,
        )

    before = state()
    with resized(analysis, 32, analysis.rules):
        assert state() != before
    assert state() == before

    def fail() -> None:
        with resized(analysis, 32, analysis.rules):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert state() == before
