"""Small models of transformers train as the plain model does: some of those of
``benchmarks/architectures.py``.
"""

from __future__ import annotations

import pytest
from architectures import PLANS, trained
from pool import Pools

FEW = ("GptOssForCausalLM", "SegformerForSemanticSegmentation", "WhisperForConditionalGeneration")


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_one_step_is_that_of_the_plain_model(ranks: Pools, name: str) -> None:
    for plan, options in PLANS.items():
        for outcome in ranks(2).run(trained, name, options):
            assert outcome.kind == "right", (plan, outcome)
