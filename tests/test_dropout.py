"""Dropout draws alike where ranks hold the same, and apart where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from equivalence import full, loss_of
from pool import Pools
from torch import nn
from trained import GRID, ROWS, build, close

ROWS_OF_DROPS, WIDTH, DROPPED = 8, 1024, 0.5
KEPT = 2.0 / (1 - DROPPED)


class Dropping(nn.Module):
    """Dropout of ones times a weight: outputs and gradient show the dropped elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.drop = nn.Dropout(DROPPED)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.drop(x * self.weight)
        return {"loss": y.sum(), "y": y}


def _drops(
    layout: str, options: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each of three steps the whole output, this rank's shard, and the weight's gradient."""
    model, x = Dropping(), torch.ones(ROWS_OF_DROPS, WIDTH)
    compiled = build(model, {"x": x}, constraints={"drop": layout}, mesh=(2, 2), **options)
    found = []
    for _ in range(3):
        compiled.weight.grad = None
        output = compiled(x=x)
        output["loss"].backward()
        found.append(
            (
                full(output["y"]).detach(),
                output["y"].to_local().detach(),
                full(compiled.weight.grad),
            )
        )
    return found


@pytest.mark.parametrize("layout", ["I I", "S0 I", "S0 S1", "S0 S0"])
def test_dropout_draws_alike_where_replicated_and_apart_where_cut(
    ranks: Pools, layout: str
) -> None:
    everywhere = ranks(4).run(_drops, layout, {})
    wholes = [whole for whole, _, _ in everywhere[0]]
    for steps in everywhere:
        for (whole, _, gradient), expected in zip(steps, wholes, strict=True):
            assert torch.equal(whole, expected)
            close(gradient, whole.sum(0) / 2.0, 1e-6)  # the backward drops the same
    for whole in wholes:
        assert set(whole.unique().tolist()) == {0.0, KEPT}
        assert float((whole == 0).float().mean()) == pytest.approx(
            DROPPED, abs=0.03
        )  # 5 standard deviations
        assert float(whole.mean()) == pytest.approx(2.0, abs=0.12)
        rows = whole != 0
        assert (
            len({tuple(row.tolist()) for row in rows}) == ROWS_OF_DROPS
        )  # no chunk repeats another
        halves = rows.view(ROWS_OF_DROPS, 2, -1)
        assert not torch.equal(halves[:, 0], halves[:, 1])
    assert not torch.equal(wholes[0], wholes[1])
    assert not torch.equal(wholes[1], wholes[2])
    locals_ = [steps[0][1] for steps in everywhere]
    assert len({tuple(x.flatten().tolist()) for x in locals_}) == {"I I": 1, "S0 I": 2}.get(
        layout, 4
    )


def test_dropout_draws_anew_for_each_microbatch(ranks: Pools) -> None:
    for steps in ranks(4).run(_drops, "S0 I", dict(micro_batch_size=2)):
        for whole, _, gradient in steps:
            assert len({tuple(row.tolist()) for row in whole != 0}) == ROWS_OF_DROPS
            close(gradient, whole.sum(0) / 2.0, 1e-6)


def _attends(options: dict[str, Any]) -> list[float]:
    model, sample = zoo.llama(dropout=0.5)
    compiled = build(model, sample, **options)
    return [loss_of(compiled(**sample)).item() for _ in range(3)]


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("options", [GRID, ROWS], ids=["grid", "rows"])
def test_attention_drops_differently_at_each_step_and_the_same_on_all_ranks(
    ranks: Pools, options: dict[str, Any]
) -> None:
    everywhere = ranks(4).run(_attends, options)
    assert len(set(everywhere[0])) == 3
    assert all(losses == everywhere[0] for losses in everywhere)
