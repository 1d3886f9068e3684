"""Mixture-of-experts models on two ranks: routing (top-k, sorting, grouped products) trains as on
one device.
"""

from __future__ import annotations

import warnings
from typing import Any

import equivalence
import pytest
import torch
import transformers
from pool import Pools
from torch import nn

import autopar

SMALL = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=32, max_position_embeddings=32, output_router_logits=True,
    use_cache=False,
)  # fmt: skip
MIXTRAL = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SMALL)
QWEN = transformers.Qwen3MoeConfig(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    head_dim=8,
    decoder_sparse_step=1,
    **SMALL,
)
CLASSES = {
    "mixtral": (transformers.MixtralForCausalLM, MIXTRAL),
    "qwen3": (transformers.Qwen3MoeForCausalLM, QWEN),
}
PLANS: list[dict[str, Any]] = [dict(data=2), dict(tensor=dict(size=2, mode="1d"))]


def _model(name: str, experts: str | None) -> torch.nn.Module:
    kind, config = CLASSES[name]
    torch.manual_seed(0)
    config = type(config)(
        **{**config.to_dict(), **({"experts_implementation": experts} if experts else {})}
    )
    return kind(config).to(
        torch.float64 if experts else torch.float32
    )  # the default's grouped products know no float64


def _compare(name: str, experts: str | None) -> list[tuple[str, float, float]]:
    """Of each plan: how far the loss and the worst gradient are from the eager model's."""
    warnings.simplefilter("ignore")  # transformers'
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    eager = _model(name, experts)
    expected = eager(**batch).loss
    expected.backward()
    found = []
    for parallel in PLANS:
        compiled = autopar.compile(
            _model(name, experts), batch, 2, parallel=parallel, progress=False
        )
        loss = compiled(**batch).loss
        loss.backward()
        pairs = zip(compiled.named_parameters(), eager.parameters(), strict=True)
        worst = max(
            float((p.grad.full_tensor() - q.grad).abs().max())
            for (_, p), q in pairs
            if q.grad is not None
        )  # type: ignore
        found.append((str(parallel), abs(float(loss) - float(expected)), worst))
    return found


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("mixtral", "batched_mm"),
        pytest.param("mixtral", None, marks=pytest.mark.slow),
        pytest.param("qwen3", None, marks=pytest.mark.slow),
    ],
)
def test_experts_train_as_on_one_device(ranks: Pools, name: str, experts: str | None) -> None:
    tolerance = 1e-6 if experts else 1e-5  # the router computes in float32, whatever the model does
    for plan, loss, gradient in ranks(2).run(_compare, name, experts, timeout=250)[0]:
        assert loss < tolerance, plan
        assert gradient < tolerance, plan


class EveryExpert(nn.Module):
    """All experts see all tokens, as in Llama-4: the tokens are repeated for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, 4)
        self.into = nn.Parameter(torch.randn(4, 8, 12))
        self.out = nn.Parameter(torch.randn(4, 12, 8))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 8)
        kept = self.router(tokens).sigmoid().t().reshape(-1, 1)
        repeated = tokens.repeat(4, 1) * kept
        made = (repeated.view(4, -1, 8) @ self.into).relu() @ self.out
        return (made.sum(0).view(x.shape) - x).square().mean()


EVERY = {
    "data": dict(parallel=dict(data=2)),
    "1d": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=1),
}


def _every() -> dict[str, float]:
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return equivalence.worst_of_plans(EveryExpert(), {"x": x}, 2, EVERY)


def test_tokens_that_are_repeated_for_each_expert(ranks: Pools) -> None:
    for errors in ranks(2).run(_every):
        assert max(errors.values()) < 1e-12, errors
