"""The saved activations of each stage in a plan are what autograd holds in a run, to 2 %, at each
stage of a 1F1B pipeline of 4 stages.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.plan import Plan
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.step.rank_stages import RankStages

STAGES = 4
TENSOR = dict(tensor=dict(size=2, mode="1d"))


class LossOnly(torch.nn.Module):
    """Returns only the loss, because autograd does not hold the other outputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def gpt() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A GPT of eight layers, with activations that dominate the parameters."""
    torch.manual_seed(0)
    sizes = dict(
        n_embd=64,
        n_layer=8,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0))
    return LossOnly(model), dict(
        ids=torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(1))
    )


def plan(recompute: str, world: int, parallel: dict[str, Any]) -> Plan:
    """The plan; for "auto" with three quarters of the memory that a plan without recomputation
    takes.
    """
    options: dict[str, Any] = dict(
        parallel=dict(pipeline=STAGES, **parallel),
        micro_batch_size=2,
        schedule="1f1b",
        progress=False,
    )
    model, sample = gpt()
    whole = autopar.plan(model, sample, world, recompute="none", **options)
    if recompute == "none":
        return whole
    budget = 0.75 * max(whole.peak_memory) if recompute == "auto" else None
    found = autopar.plan(model, sample, world, recompute=recompute, memory_budget=budget, **options)
    assert found.recomputed
    return found


def settled(live: LiveBytes) -> int:
    """The bytes that remain: the thread of a collective may free its tensors a little after the
    collective.
    """
    least = live.alive()
    for _ in range(20):
        time.sleep(0.01)
        least = min(least, live.alive())
    return least


def measure(plan: Plan) -> None:
    model, sample = gpt()
    held: list[int] = []
    copies: list[int] = []  # of parameters, put together when a step starts
    on_its_way: list[tuple[StorageWeakRef, int]] = []
    live = LiveBytes()
    forward = RankStages._forward

    def counted(self: RankStages, index: int, number: int, received: list[torch.Tensor]) -> Any:
        self._mesh.arrivals.take_all()  # buffers of gathered parameters last until they arrive
        copies.append(settled(live) - sum(t.nbytes for t in received))
        sent, loss = forward(self, index, number, received)
        # What was sent may still be on its way; here no backward needs it, being a sum.
        on_its_way.extend(
            (StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in sent
        )
        held.append(
            settled(live)
            - sum(nbytes for storage_id, nbytes in on_its_way if not storage_id.expired())
        )
        return sent, loss

    with mock.patch.object(RankStages, "_forward", counted):
        compiled = autopar.compile(model, sample, plan.world_size, plan=plan, progress=False)
        with live:
            compiled(**sample).backward()
    stage = dist.get_rank() // (plan.world_size // STAGES)
    said = plan.stages[stage].kept * plan.stages[stage].in_flight
    # Before the first backward there are no gradients yet: just what the microbatches in flight
    # keep.
    warm = held[plan.stages[stage].in_flight - 1] - copies[0]
    assert abs(warm - said) <= 0.02 * said, (stage, warm, said)


def _marked(slow: tuple[str, ...], exhaustive: tuple[str, ...]) -> list[Any]:
    return [
        *(pytest.param(name, marks=pytest.mark.slow) for name in slow),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in exhaustive),
    ]


@pytest.mark.parametrize("recompute", _marked(("auto", "none"), ("selective", "full")))
def test_each_stage(ranks: Pools, recompute: str) -> None:
    ranks(4).run(measure, plan(recompute, 4, {}), timeout=300)


@pytest.mark.parametrize("recompute", _marked(("auto",), ("none", "full")))
def test_each_stage_with_tensors_cut(ranks: Pools, recompute: str) -> None:
    ranks(8).run(measure, plan(recompute, 8, TENSOR), timeout=300)
