"""The kernels and collectives of a plan add up to the plan's seconds, and the ranks' shares of a
kernel add up to the whole kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from megatron import batch as tokens
from megatron import configuration, gpt, searched

from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.search.result.chosen_program import chosen_program
from autopar.search.result.cost_items import BACKWARD, FORWARD, RECOMPUTATION, STEP, cost_items

A100 = Cluster.load("a100-sxm")


def added_up(found: Any) -> dict[str, np.ndarray]:
    """Seconds by phase and stage."""
    phases = {
        phase: np.zeros(found.configuration.stages)
        for phase in (FORWARD, BACKWARD, RECOMPUTATION, STEP)
    }
    for item in cost_items(found):
        taken = item.term.seconds if item.term else float(found.costs.compute.seconds(*item.work))
        phases[item.phase] += np.array(item.count) * taken
    return phases


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return TracedModel(gpt(64, 4, 4, 32, 256), tokens(16, 32), None, "fp16")


@pytest.mark.sampled(fast=9, slow=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 1), pytest.param(2, 2, 1, marks=pytest.mark.slow), (1, 4, 1)],
)
def test_items_add_up_to_the_seconds_of_a_plan(
    traced: TracedModel, tensor: int, pipeline: int, data: int, recompute: str
) -> None:
    asked = configuration(tensor, pipeline, data, 2) | dict(recompute=recompute)
    with searched(traced, 16, A100, **asked) as found:
        phases, cost_breakdown = added_up(found), found.solution.cost_breakdown
    assert phases[FORWARD] + phases[BACKWARD] + phases[RECOMPUTATION] == pytest.approx(
        cost_breakdown.forward + cost_breakdown.backward, rel=1e-4
    )
    if recompute == "full":
        assert phases[RECOMPUTATION] == pytest.approx(cost_breakdown.recomputation, rel=1e-4)
        assert phases[RECOMPUTATION].sum() > 0
    synchronised = sum(
        end_of_step_estimate["gradient synchronisation"]
        for end_of_step_estimate in found.end_of_step_estimate
    )
    assert phases[STEP].sum() == pytest.approx(synchronised)


def test_gathers_in_buckets_add_up_too(traced: TracedModel) -> None:
    """Also those that the backward makes again."""
    asked = configuration(1, 1, 2, 2) | dict(recompute="full", zero=3)
    with searched(traced, 16, A100, **asked) as found:
        phases, cost_breakdown = added_up(found), found.solution.cost_breakdown
        assert chosen_program(found).zero_buckets
    assert phases[FORWARD] + phases[BACKWARD] + phases[RECOMPUTATION] == pytest.approx(
        cost_breakdown.forward + cost_breakdown.backward, rel=1e-4
    )
    assert phases[RECOMPUTATION] == pytest.approx(cost_breakdown.recomputation, rel=1e-4)


def test_kernels_that_communicate_add_up_too() -> None:
    """Batch norm over two ranks consists of many kernels."""
    model, sample = zoo.cnn(batch=8, layers=2)
    with searched(
        TracedModel(model, sample, None),
        8,
        A100,
        world_size=2,
        parallel=dict(data=2),
        recompute="none",
        zero=0,
    ) as found:
        phases, cost_breakdown = added_up(found), found.solution.cost_breakdown
        norms = [n for n in found.analysis.graph.nodes if "batch_norm" in str(n.target)]
        assert any(any(found.choice(n).kernels) for n in norms)
    assert phases[FORWARD] + phases[BACKWARD] == pytest.approx(
        cost_breakdown.forward + cost_breakdown.backward, rel=1e-4
    )


def test_tensor_parallel_ranks_share_the_products() -> None:
    """On 4 ranks each matrix product of Megatron's layer has a quarter of the FLOPs. Every rank
    computes norms, dropouts and residuals.
    """
    model, sample = gpt(64, 4, 2, 32, 256), tokens(4, 32)
    work: dict[int, dict[tuple[str, str, str], float]] = {}
    for tensor in (1, 4):
        with searched(
            TracedModel(model, sample, None, "fp16"), 4, A100, **configuration(tensor, 1, 1, 4)
        ) as found:
            kernels = [
                i
                for i in cost_items(found)
                if i.term is None and i.node.meta.get("module", "").startswith("layers.")
            ]
            work[tensor] = {}
            for item in kernels:
                key = item.node.name, item.phase, item.operator
                work[tensor][key] = work[tensor].get(key, 0.0) + (item.flops or item.nbytes)
    products = [key for key in work[1] if key[2] in ("addmm", "mm", "bmm")]
    assert len(products) > 10
    for key in products:
        if key in work[4]:
            assert work[1][key] == pytest.approx(4 * work[4][key]), key
    for key in (k for k in work[1] if "layer_norm" in k[2]):
        assert work[1][key] == work[4][key], key


def test_pieces_of_a_tensor_are_joined_once() -> None:
    """The backward of GPT-2's fused query, key and value concatenates three gradients. Three
    separate slices would fill a tensor of zeros each.
    """
    model, sample = zoo.gpt2()
    with searched(
        TracedModel(model, sample, None), 8, A100, world_size=1, recompute="none"
    ) as found:
        joins = [
            i
            for i in cost_items(found)
            if i.node.target is torch.ops.aten.slice.Tensor
            and i.phase == BACKWARD
            and i.operator == "cat"
        ]
        layers = sum(name.endswith("c_attn.weight") for name in found.analysis.captured.state)
    assert sum(i.count[0] for i in joins) == layers
