"""What a rank receives in a step, counted from the collectives that run, is what the formulas of
each mode say.

Of two linear layers, [M, K] -> [M, N] -> [M, K], the first of which has an input without a
gradient; and of attention over a sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from pool import Pools
from received import Received
from torch import nn

import autopar

BATCH, TOKENS, K, N = 8, 4, 32, 64
M = BATCH * TOKENS
FLOAT = 4  # bytes


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def _step(
    model: nn.Module, sample: dict[str, torch.Tensor], tensor: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int]]:
    options = dict(cluster="cpu", parallel=dict(tensor=tensor), recompute="none", progress=False)
    compiled = autopar.compile(model, sample, dist.get_world_size(), **options)  # type: ignore[arg-type]
    compiled._desync = None  # whose records are no tensors of the model
    with Received() as forward:
        found = compiled(**sample)
    with Received() as backward:
        (found if isinstance(found, torch.Tensor) else found["loss"]).backward()
    return forward.by_kind, backward.by_kind


def layers(tensor: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    return _step(Layers(), {"x": torch.randn(BATCH, TOKENS, K)}, tensor)


def transformer(tensor: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    return _step(*zoo.bert(), tensor)


@pytest.mark.parametrize("depth", [1, 2])
def test_summa(ranks: Pools, depth: int) -> None:
    """(q - 1) / q^2 (M K / d + K N) for Y, for dX and for dW, and in 2.5D an all-reduce of dW over
    depth, once a step.
    """
    q = 2
    tensor = dict(size=4, mode="2d") if depth == 1 else dict(size=8, mode="2.5d", depth=depth)
    share = FLOAT * (q - 1) / q**2
    up_x, down_x, weight = (
        share * M * K / depth,
        share * M * N / depth,
        share * K * N,
    )  # both weights are alike
    for forward, backward in ranks(q * q * depth).run(layers, tensor, timeout=120):
        assert forward.pop("all_reduce") <= 16  # the loss
        assert forward == {"broadcast": (up_x + weight) + (down_x + weight)}
        synchronised = 2 * (depth - 1) / depth * (2 * K * N) / q**2 * FLOAT
        assert backward.pop("all_reduce", 0) == synchronised
        dw_up, dw_down, dx_down = (
            up_x + weight,
            down_x + weight,
            weight + down_x,
        )  # each a broadcast and a sum
        assert sum(backward.values()) == dw_up + dw_down + dx_down
        assert backward == {
            "broadcast": up_x + down_x + weight,
            "all_to_all": weight + weight + down_x,
        }


def test_three_dimensions(ranks: Pools) -> None:
    """2 (q - 1) / q^3 (M K + K N + M N) a layer; what needs no gradient and is given whole is not
    gathered.
    """
    q = 2
    share = FLOAT * (q - 1) / q**3
    small, wide, weight = share * M * K, share * M * N, share * K * N
    for forward, backward in ranks(8).run(layers, dict(size=8, mode="3d"), timeout=120):
        assert forward.pop("all_reduce") <= 24  # the loss
        assert forward == {"all_gather": weight + (wide + weight), "reduce_scatter": wide + small}
        assert backward == {"all_gather": wide + small, "reduce_scatter": weight + (wide + weight)}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_rings_and_heads(ranks: Pools, world_size: int) -> None:
    """A ring: 2 (n - 1) B L H / n forward and 6 (n - 1) B L H / n a step; heads: four all-to-alls
    each way.
    """
    n, sequence, width, depth = world_size, zoo.SEQUENCE, 32, 2
    whole = depth * 8 * sequence * width * FLOAT
    for forward, backward in ranks(n).run(
        transformer, dict(size=n, mode="sequence", ring=n), timeout=120
    ):
        assert forward["all_to_all"] == 2 * (n - 1) * whole / n
        assert forward["all_to_all"] + backward["all_to_all"] == 6 * (n - 1) * whole / n
    for forward, backward in ranks(n).run(
        transformer, dict(size=n, mode="sequence", ring=1), timeout=120
    ):
        assert forward["all_to_all"] == backward["all_to_all"] == 4 * (n - 1) * whole / n**2
