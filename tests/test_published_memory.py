"""The saved activations of a Megatron layer are those of arXiv 2205.05198, to the byte.

The formulas leave out the statistics of the two layer norms on purpose: a mean and a standard
deviation of each row, 4 bytes each. With sequence parallelism each rank has its part of the rows. A
layer's share is the difference between three layers and two.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import megatron_memory
import pytest
import torch
from megatron import GPT, constraints

import autopar
from autopar.frontend.traced_model import TracedModel
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.peak_memory import peak_memory_of_plan
from autopar.plan import Plan

S, B, H, A = 512, 2, 1024, 16  # sequence, microbatch, hidden, heads
T = 8
STATISTICS = 2 * 2 * 4 * S * B
SCORES = 5 * A * S // H


@functools.cache
def _made(layers: int) -> TracedModel:
    with torch.device("meta"):
        model = GPT(H, A, layers, S, vocabulary=1024)
        tokens = torch.zeros(B, S, dtype=torch.long)
    return TracedModel(model, dict(tokens=tokens, labels=tokens.clone()), None, "fp16")


def _planned(layers: int, tensor: int, sequence_parallel: bool, recompute: str) -> Plan:
    work = _made(layers)
    # The norm behind the last layer is in no layer: its layout must not depend on their number.
    last_norm = {"norm": "S0"} if sequence_parallel else {}
    return autopar.plan(
        work.model,
        work.sample,
        tensor,
        cluster="a100-sxm",
        parallel=dict(tensor=dict(size=tensor, mode="1d")) if tensor > 1 else dict(data=1),
        precision="fp16",
        zero=0,
        recompute=recompute,
        constraints=constraints(1, tensor, sequence_parallel) | last_norm,
        memory_budget=1e15,
        progress=False,
    )


def kept(layers: int, tensor: int, sequence_parallel: bool, recompute: str) -> float:
    """The bytes that a model keeps.

    With sequence parallelism Megatron gathers the operands of products again in the backward.
    "selective" also recomputes the inner tensors of attention.
    """
    plan = _planned(layers, tensor, sequence_parallel, "full" if recompute == "full" else "none")
    if recompute == "full":
        return plan.stages[0].kept
    analysis, _ = _made(layers).analyse(1)
    again = megatron_memory.selective(analysis.graph, plan)
    again = (
        again
        if recompute == "selective"
        else tuple(name for name in again if sequence_parallel and "->" in name)
    )
    plan = dataclasses.replace(plan, recomputed=again)
    return peak_memory_of_plan(analysis, plan, "adam", OperatorTracer("cuda")).saved_bytes[0]


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "formula", "statistics"),
    [
        (1, False, "none", S * B * H * (34 + SCORES), STATISTICS),
        (T, False, "none", S * B * H * (10 + (24 + SCORES) / T), STATISTICS),
        (T, True, "none", S * B * H / T * (34 + SCORES), STATISTICS / T),
        (T, True, "selective", S * B * H / T * 34, STATISTICS / T),
        (1, False, "selective", S * B * H * 34, STATISTICS),
        (T, False, "full", 2 * S * B * H, 0),
        (1, False, "full", 2 * S * B * H, 0),
    ],
)
def test_a_layer_keeps_what_the_paper_says(
    tensor: int, sequence_parallel: bool, recompute: str, formula: float, statistics: float
) -> None:
    found = [kept(layers, tensor, sequence_parallel, recompute) for layers in (2, 3)]
    assert found[1] - found[0] == formula + statistics


@pytest.mark.slow
def test_figure_1() -> None:
    """The 22B model to 2 %: the figure leaves out embedding, logits and statistics, which this
    count contains.
    """
    model = megatron_memory.FIGURE[0]
    errors = [100 * (predicted / seen - 1) for predicted, seen in megatron_memory.row(model)]
    rows = megatron_memory.SEQUENCE * model.microbatch
    vocabulary = math.ceil(megatron_memory.VOCABULARY / T)
    outside = (
        rows * (2 * model.hidden + vocabulary * 6) / megatron_memory.GIB
    )  # a last norm's input, logits in 16 and in 32 bits
    assert abs(errors[0]) <= 2
    assert abs(errors[1]) <= 100 * (0.02 + outside / model.everything)
    assert abs(errors[2]) <= 100 * (0.02 + outside / model.selective)
