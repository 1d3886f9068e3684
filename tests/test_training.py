"""The loop that users write: optimizers, schedulers, clipping, accumulation, evaluation,
checkpoints and dropout of compiled models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, loss_of
from pool import Pools
from torch import nn
from trained import GRID, PAIR, PARTS, ZERO, batch, build, close, train

import autopar


def _trains(name: str, options: dict[str, Any]) -> None:
    with Double():
        model, sample = getattr(zoo, name)(dtype=torch.float64)
        compiled = build(model, sample, **options)
        found = train(compiled, sample, [autopar.clip_grad_norm_, nn.utils.clip_grad_norm_])
        expected = train(model, sample, [nn.utils.clip_grad_norm_])
    assert any(norm > 0.05 for _, norm in expected), "nothing is clipped"
    close(torch.tensor(found), torch.tensor(expected))
    assert expected[-1][0] != expected[0][0]
    mine = dict(compiled.named_parameters())
    for n, p in model.named_parameters():
        close(mine[n], p, 1e-7, n)


@pytest.mark.parametrize("options", [GRID, ZERO, PARTS], ids=["grid", "zero", "microbatches"])
def test_training_equals_one_device(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_trains, "llama", options)


def _assigns(options: dict[str, Any]) -> None:
    """Assigns to ``parameter.data``, as averaged weights and ``vector_to_parameters`` do."""
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, **options)
        for m in (model, compiled):
            flat = nn.utils.parameters_to_vector(m.parameters())
            nn.utils.vector_to_parameters(0.5 * flat, m.parameters())
        close(loss_of(compiled(**sample)), loss_of(model(**sample)))
        for p, mine in zip(model.parameters(), compiled.parameters(), strict=True):
            p.data = mine.data = torch.full(p.shape, 0.01, dtype=p.dtype)  # a whole tensor
        for m in (model, compiled):
            m.zero_grad()
            loss_of(m(**sample)).backward()
        for p, mine in zip(model.parameters(), compiled.parameters(), strict=True):
            close(mine, p)
            close(mine.grad, p.grad)
        wide = next(p for p in compiled.parameters() if p.ndim == 2)
        with pytest.raises(autopar.RunError, match=r"of shape .* was compiled for"):
            wide.data = torch.zeros(3, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [PAIR, dict(parallel=dict(tensor=dict(size=2, mode="1d")))], ids=["zero", "rows"]
)
def test_assigned_data_is_the_parameters(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_assigns, options)


def _draws(options: dict[str, Any]) -> None:
    """Draws new parameter values: on ranks whose seeds differ, and through ``parameter.data``, as
    transformers does.
    """
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, **options)
        rank = dist.get_rank()
        for m, seed in ((model, 5), (compiled, 5 + rank)):
            torch.manual_seed(seed)
            for p in m.parameters():
                nn.init.normal_(p, 0.1, 0.02)
                p.data.uniform_(-0.1, 0.2)
                if p.ndim == 2:
                    nn.init.kaiming_uniform_(p)
                    nn.init.trunc_normal_(p, std=0.02)
        for name, p in compiled.named_parameters():
            close(p, dict(model.named_parameters())[name], name=name)
        compiled.check_replicas()
        close(loss_of(compiled(**sample)), loss_of(model(**sample)))
        wide = next(p for p in compiled.parameters() if p.ndim == 2)
        for draw in (
            torch.randn_like,
            nn.init.orthogonal_,
            lambda p: nn.functional.dropout(p, 0.5),
        ):
            with pytest.raises(autopar.RunError, match="would draw on each of its ranks apart"):
                draw(wide)
        others = dist.tensor.distribute_tensor(
            torch.zeros(8), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        )
        with pytest.warns(UserWarning, match="may not have complete support"):
            others.normal_()  # torch draws the same on one device


@pytest.mark.parametrize(
    "options", [PAIR, dict(parallel=dict(tensor=dict(size=2, mode="1d")))], ids=["zero", "rows"]
)
def test_parameters_are_drawn_as_on_one_device(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_draws, options)


def _draws_in_stages() -> None:
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, parallel=dict(data=2, pipeline=2))
    with pytest.raises(autopar.RunError, match="the ranks of a pipeline hold different parameters"):
        nn.init.normal_(next(iter(compiled.parameters())))


def test_a_pipeline_refuses_to_draw_parameters(ranks: Pools) -> None:
    ranks(4).run(_draws_in_stages)


def _norms(options: dict[str, Any]) -> None:
    with Double():
        model, sample = zoo.llama(dtype=torch.float64)
        compiled = build(model, sample, **options)
        loss_of(compiled(**sample)).backward()
        loss_of(model(**sample)).backward()
    for order in (2.0, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)
        close(autopar.clip_grad_norm_(compiled.parameters(), 1e9, order), expected)
        close(nn.utils.clip_grad_norm_(compiled.parameters(), 1e9, order), expected)


@pytest.mark.parametrize("options", [GRID, ZERO], ids=["grid", "zero"])
def test_the_norm_is_torchs(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_norms, options)


# -- accumulation and scaling ----------------------------------------------------------------------


def _accumulates(options: dict[str, Any]) -> None:
    with Double():
        model, sample = zoo.llama(dtype=torch.float64)
        model.model.embed_tokens.requires_grad_(False)  # as in fine-tuning
        compiled = build(model, sample, **options)
        for m in (model, compiled):
            for step, scale in enumerate((1.0, 0.25)):
                (loss_of(m(**batch(sample, step))) * scale).backward()
    mine = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        assert (
            (mine[name].grad is None) == (p.grad is None) == (name == "model.embed_tokens.weight")
        ), name
        if p.grad is not None:
            close(mine[name].grad, p.grad, name=name)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("options", [GRID, ZERO, PARTS], ids=["grid", "zero", "microbatches"])
def test_two_calls_add_up_and_a_scaled_loss_scales(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_accumulates, options)
