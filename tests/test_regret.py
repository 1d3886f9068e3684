"""No regret: a slice of ``benchmarks/regret.py``."""

from __future__ import annotations

import pytest
import torch
import transformers
from regret import ALLOWED, measure
from regret_cases import CASES

import autopar


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("cnn-5-cpu", 12),
        pytest.param("gpt-4l-7-cpu", 8, marks=pytest.mark.slow),
        pytest.param("llama-4l-3-a100", 12, marks=pytest.mark.slow),
    ],
)
def test_no_pinned_plan_is_faster_than_the_free_plan(name: str, draws: int) -> None:
    case = next(c for c in CASES if c.name == name)
    result = measure(case, draws, progress=False)
    assert result.pinned >= draws
    assert result.regret <= ALLOWED, (result.regret, result.options)
    assert result.free.step_time * (1 - result.free.gap) <= result.best * (1 + 1e-9)


@pytest.mark.slow
def test_the_first_order_of_axes_that_fits_is_not_taken_for_the_best() -> None:
    """With little memory the first candidate of the faster order of axes does not fit, and its plan
    of least memory does.
    """
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        tokens = torch.zeros(32, 1024, dtype=torch.long)
    parallel = dict(data=8, tensor=dict(size=2, mode="1d"))
    common = dict(world_size=16, parallel=parallel, micro_batch_size=2, recompute="none", zero=1)
    orders = (("data", "tensor"), ("tensor", "data"))
    free, *pinned = autopar.sweep(
        model,
        {"input_ids": tokens, "labels": tokens},
        [common, *(common | dict(placement=order) for order in orders)],
        cluster="a100-sxm",
        memory_budget=3.75 * 2**30,
        progress=False,
    )
    seconds = [plan.step_time for plan in pinned]
    assert max(seconds) > 1.1 * min(seconds)
    assert free.step_time <= min(seconds) * (1 + ALLOWED)
