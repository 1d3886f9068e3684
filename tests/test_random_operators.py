"""Operators that draw numbers, on two ranks: the same numbers where ranks hold the same chunk, and
different numbers where they hold different chunks.
"""

from __future__ import annotations

import warnings

import torch
from pool import Pools
from torch import nn

import autopar


class Noisy(nn.Module):
    """Returns the noise and the time steps that it draws, as a diffusion model does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.randn(x.shape)
        steps = torch.randint(1000, (x.shape[0],))
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        like = torch.rand_like(x)
        order = torch.randperm(6)
        picked = torch.multinomial(like, 2)
        loss = (
            ((x * self.weight + noise) * mask).square().mean()
            + steps.float().mean() * 1e-3
            + like.mean()
            + picked.float().mean()
        )
        return {"loss": loss, "noise": noise, "steps": steps, "like": like, "order": order}


def _draw() -> dict[str, dict[str, torch.Tensor]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(torch.distributed.get_rank())  # the ranks' own generators must not matter
    x = torch.zeros(8, 6)
    found = {}
    for name, parallel in (
        ("data", dict(data=2)),
        ("tensor", dict(tensor=dict(size=2, mode="1d"))),
    ):
        compiled = autopar.compile(Noisy(), x, 2, parallel=parallel, progress=False)
        first, second = compiled(x), compiled(x)
        first["loss"].backward()
        found[name] = {
            key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in first.items()
        }  # type: ignore[operator]
        found[name] = {key: t.detach() for key, t in found[name].items()}
        found[name]["again"] = second["noise"].full_tensor().detach()
        found[name]["gradient"] = compiled.weight.grad.full_tensor()  # type: ignore[union-attr, operator]
    return found


def test_draws(ranks: Pools) -> None:
    mine, other = ranks(2).run(_draw, timeout=250)
    for plan in ("data", "tensor"):
        for key, value in mine[plan].items():
            assert torch.equal(value, other[plan][key]), (plan, key)
        noise = mine[plan]["noise"]
        assert not torch.equal(noise[:4], noise[4:])  # different chunks have different draws
        assert not torch.equal(mine[plan]["steps"][:4], mine[plan]["steps"][4:])
        assert not torch.equal(mine[plan]["like"][:4], mine[plan]["like"][4:])
        assert not torch.equal(noise, mine[plan]["again"])  # and so have different steps
        assert sorted(mine[plan]["order"].tolist()) == list(range(6))
