"""Freezing and unfreezing parameters between steps, as on a module: gradients equal eager's in
float64, and are the same on replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import staged
import torch
import torch.distributed as dist
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

TOLERANCE = 1e-9
WORDS, WIDTH, LENGTH = 16, 8, 4
ONE_STAGE: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2), zero=0),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "zero": dict(parallel=dict(data=2), zero=2),
    "zero3": dict(parallel=dict(data=2), zero=3),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=2),
}
# Which parameters are frozen, by a part of their names ("" is all): at compile, and then in each
# step.
HISTORIES: dict[str, list[tuple[str, ...]]] = {
    "gradual": [("wte", "wpe", "h.0"), ("wte", "wpe"), (), ("h.0",), ("wte", "wpe", "h.0")],
    "none": [(), ("h.0.0", "ln_f"), ()],
    "backbone": [("wte", "wpe", "h."), ("wte", "wpe", "h.0"), ("wte", "wpe", "h.")],
    "all": [("",), ("h.0", "ln"), ("",), ()],
}


def _freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))


class Small(nn.Module):
    """Embeddings, blocks with a residual, a norm, a head: what people freeze one after the
    other.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe
        for block in self.h:
            x = x + block(x)
        return nn.functional.cross_entropy(
            self.lm_head(self.ln_f(x)).flatten(0, 1), tokens.flatten()
        )


SAMPLE = {"tokens": torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(0))}


def _alike(compiled: nn.Module, model: nn.Module, what: str) -> int:
    """The number of gradients that this rank has, all of them eager's."""
    mine, count = dict(compiled.named_parameters()), 0
    for name, p in model.named_parameters():
        if name not in mine:
            continue
        assert (mine[name].grad is None) == (p.grad is None), f"{what}: {name}"
        if p.grad is not None:
            count += 1
            atol = TOLERANCE * float(p.grad.abs().max())
            local = mine[name].grad
            torch.testing.assert_close(
                full(local),
                p.grad,
                rtol=TOLERANCE,
                atol=atol,
                msg=lambda m, n=name: f"{what}: {n}: {m}",
            )
            if isinstance(local, DTensor) and all(
                placed.is_replicate() for placed in local.placements
            ):
                torch.testing.assert_close(
                    local.to_local(),
                    p.grad,
                    rtol=TOLERANCE,
                    atol=atol,
                    msg=lambda m, n=name: f"{what}: {n}: {m}",
                )
    return count


def _follow(
    compiled: nn.Module, model: nn.Module, history: Sequence[tuple[str, ...]], what: str
) -> None:
    found = 0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (compiled, model)]
    for i, frozen in enumerate(history):
        for m, optimizer in zip((compiled, model), optimizers, strict=True):
            optimizer.zero_grad()
            _freeze(m, frozen)
        expected = model(**SAMPLE)
        loss = compiled(**SAMPLE)
        torch.testing.assert_close(
            loss.detach(),
            expected.detach(),
            rtol=TOLERANCE,
            atol=0,
            msg=lambda m, i=i: f"{what}, step {i}: {m}",
        )
        if expected.requires_grad:
            expected.backward()
            loss.backward()
        found += _alike(compiled, model, f"{what}, step {i}, {frozen} frozen")
        for optimizer in optimizers:
            optimizer.step()
    counted = torch.tensor(found)
    dist.all_reduce(counted)
    assert counted, what


def _one_stage(cases: dict[str, dict[str, Any]], histories: Sequence[str]) -> None:
    for name, options in cases.items():
        for which, history in ((which, HISTORIES[which]) for which in histories):
            _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
            model = Small()
            _freeze(model, history[0])
            compiled = autopar.compile(
                copy.deepcopy(model), SAMPLE, dist.get_world_size(), progress=False, **options
            )
            _follow(compiled, model, history, f"{name}, {which}")


def test_freezing_and_unfreezing_is_that_of_a_module(ranks: Pools) -> None:
    ranks(2).run(
        _one_stage, {name: ONE_STAGE[name] for name in ("data", "tensor", "zero")}, ["gradual"]
    )


@pytest.mark.exhaustive
def test_freezing_under_more_plans(ranks: Pools) -> None:
    ranks(2).run(
        _one_stage,
        {name: ONE_STAGE[name] for name in ("data", "tensor", "zero3", "microbatches")},
        list(HISTORIES),
        timeout=180,
    )
    ranks(4).run(
        _one_stage,
        {"grid": dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")))},
        list(HISTORIES),
        timeout=180,
    )


def _stages(cases: Sequence[staged.Case], histories: Sequence[str]) -> None:
    for case in cases:
        for which, history in ((which, HISTORIES[which]) for which in histories):
            _clear_sharding_prop_cache()
            model = Small()
            _freeze(model, history[0])
            plan = staged.staged_plan(
                model, SAMPLE, 2, case.pipeline, case.schedule, chunks=case.chunks, **case.options
            )
            compiled = autopar.compile(copy.deepcopy(model), SAMPLE, 2, plan=plan)
            _follow(compiled, model, history, f"{case}, {which}")


ONE = staged.Case(2, "1f1b", options=dict(micro_batch_size=2))
SPLIT = staged.Case(2, "zero-bubble", 2, options=dict(micro_batch_size=2))


def test_freezing_and_unfreezing_in_a_pipeline(ranks: Pools) -> None:
    """The first stage has nothing to train at first."""
    ranks(2).run(_stages, [ONE], ["backbone"])


@pytest.mark.slow
def test_stages_with_nothing_to_train(ranks: Pools) -> None:
    """Also in the split backward of zero-bubble schedules."""
    ranks(2).run(_stages, [ONE, SPLIT], list(HISTORIES), timeout=240)
