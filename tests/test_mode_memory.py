"""The memory that modes save: models that one device, or 1D, cannot hold."""

from __future__ import annotations

from typing import Any

import peaks
import pytest
import torch
import transformers as hf
import zoo
from pool import Pools
from torch import nn

import autopar
from autopar.errors import BudgetError

WIDTH, BATCH = 32, 2
RINGS = dict(mode="sequence", ring=4)


class Rows(nn.Module):
    """Layers that are small compared with their results, because there are very many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def attention(length: int) -> tuple[nn.Module, dict[str, Any]]:
    return zoo.causal(batch=BATCH, length=length)


def rows(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return Rows(), {
        "x": torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
    }  # the same on all ranks


def _step(which: str, size: int, options: dict[str, Any]) -> float:
    """The measured peak bytes of a step."""
    made = {"attention": attention, "rows": rows}[which](size)
    return peaks.peak(*made, torch.distributed.get_world_size(), **options)


def test_two_dimensions_hold_what_one_does_not(ranks: Pools) -> None:
    asked: dict[str, dict[str, Any]] = {
        mode: dict(
            cluster="cpu", parallel=dict(tensor=dict(size=4, mode=mode)), micro_batch_size=4096
        )
        for mode in ("1d", "2d")
    }
    least: dict[str, float] = {}
    for mode, options in asked.items():
        with pytest.raises(BudgetError) as error:
            autopar.plan(*rows(4096), 4, memory_budget=1000, progress=False, **options)
        least[mode] = error.value.least
    assert least["2d"] < 0.95 * least["1d"]
    budget = (least["1d"] + least["2d"]) / 2
    with pytest.raises(BudgetError):
        autopar.plan(*rows(4096), 4, memory_budget=budget, progress=False, **asked["1d"])
    measured = ranks(4).run(
        _step, "rows", 4096, dict(asked["2d"], memory_budget=budget), timeout=120
    )
    assert max(measured) <= 1.02 * budget


@pytest.mark.slow
def test_a_ring_holds_a_sequence_that_one_rank_does_not(ranks: Pools) -> None:
    """The memory grows with the length of the sequence divided by the ranks."""
    alone = autopar.plan(*attention(2048), 1, cluster="cpu", recompute="none", progress=False)
    budget = 0.7 * max(alone.peak_memory)
    with pytest.raises(BudgetError):
        autopar.plan(
            *attention(2048),
            1,
            cluster="cpu",
            memory_budget=budget,
            recompute="none",
            micro_batch_size=BATCH,
            progress=False,
        )
    ring: dict[str, Any] = dict(
        cluster="cpu", parallel=dict(tensor=dict(size=4, **RINGS)), recompute="none", zero=0
    )
    found = {
        length: max(ranks(4).run(_step, "attention", length, ring, timeout=120))
        for length in (1024, 2048, 4096)
    }
    whole = BATCH * 1024 * WIDTH * 4  # bytes of what every rank is given of so many tokens
    assert found[2048] < budget
    first, second = found[2048] - found[1024], found[4096] - found[2048]
    assert second == pytest.approx(2 * first, rel=0.05)  # a line
    two: dict[str, Any] = dict(
        cluster="cpu",
        parallel=dict(tensor=dict(size=2, mode="sequence", ring=2)),
        recompute="none",
        zero=0,
    )
    half = {
        length: max(ranks(2).run(_step, "attention", length, two, timeout=120))
        for length in (1024, 2048)
    }
    each = half[2048] - half[1024] - whole
    assert each == pytest.approx(
        second - 2 * whole, rel=0.1
    )  # as long a part of the sequence on each rank


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_", "width", "layers"), [(4, 3072, 26), (16, 5120, 38)], ids=["3B on 4", "12B on 16"]
)
def test_what_the_paper_says_fits_p100s(ranks_: int, width: int, layers: int) -> None:
    """3 billion parameters on 4 and 12 billion on 16 GPUs of 16 GB, at batch 16, in 2D without ZeRO
    or offload (Colossal-AI). With AdamW in float32 they fit if some activations are recomputed.
    """
    with torch.device("meta"):
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = dict(
            n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=51200, n_positions=512
        )
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, use_cache=False))  # type: ignore[arg-type]
        tokens = torch.zeros(16, 512, dtype=torch.long)
    options: dict[str, Any] = dict(cluster="p100", zero=0, micro_batch_size=16, progress=False)
    plan = autopar.plan(
        model,
        {"input_ids": tokens, "labels": tokens},
        ranks_,
        parallel=dict(tensor=dict(size=ranks_, mode="2d")),
        **options,
    )
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters on {ranks_} "
        f"ranks\n{plan.report()[:1800]}"
    )
    assert max(plan.peak_memory) <= 16e9
    assert plan.recomputed
    with pytest.raises(BudgetError):
        autopar.plan(
            model, {"input_ids": tokens, "labels": tokens}, ranks_,
            parallel=dict(tensor=dict(size=ranks_, mode="2d")), recompute="none", **options,
        )  # fmt: skip
