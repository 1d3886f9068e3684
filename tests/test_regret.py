"""No regret: a slice of ``benchmarks/regret.py``."""

from __future__ import annotations

import pytest
from regret import ALLOWED, measure
from regret_cases import CASES


@pytest.mark.parametrize(
    ("name", "draws"), [("cnn-5-cpu", 12), ("gpt-4l-7-cpu", 8), ("llama-4l-3-a100", 12)]
)
def test_no_pinned_plan_is_faster_than_the_free_plan(name: str, draws: int) -> None:
    case = next(c for c in CASES if c.name == name)
    result = measure(case, draws, progress=False)
    assert result.pinned >= draws
    assert result.regret <= ALLOWED, (result.regret, result.options)
    assert result.free.step_time * (1 - result.free.gap) <= result.best * (1 + 1e-9)
