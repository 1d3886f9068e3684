"""Scalars in a model's output are those of the whole batch, and no number of a DTensor is a rank's
share of it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import autopar

OPTIONS: list[dict[str, Any]] = [
    dict(parallel=dict(data=2)),
    dict(parallel=dict(data=2), zero=3),
    dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    dict(parallel=dict(data=2), micro_batch_size=2),
    dict(parallel=dict(pipeline=2), micro_batch_size=2),
]


class Measuring(nn.Module):
    """Returns what a script would log beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        y = self.last(hidden)
        return {
            "loss": y.square().mean(),
            "penalty": hidden.abs().mean(),
            "total": hidden.sum(),
            "positive": (y > 0).sum(),
            "accuracy": (y.argmax(-1) == 0).float().mean(),
            "constant": torch.tensor(3.0),
            "y": y,
        }


def _made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Measuring(), torch.randn(8, 8)


def _scalars(options: dict[str, Any]) -> None:
    model, x = _made()
    compiled = autopar.compile(model, x, 2, progress=False, **options)
    expected, found = model(x), compiled(x)
    for name, value in expected.items():
        if value.ndim == 0:
            assert not isinstance(found[name], DTensor), name
            assert found[name].item() == pytest.approx(value.item(), rel=1e-5), name
    torch.testing.assert_close(found["y"].full_tensor(), expected["y"])
    found["loss"].backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scalars_are_those_of_the_whole_batch(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_scalars, options)


def _sum_of_losses() -> None:
    for options in OPTIONS[:3]:
        model, x = _made()
        plain = copy.deepcopy(model)
        compiled = autopar.compile(model, x, 2, progress=False, **options)
        for program in (plain, compiled):
            found = program(x)
            (found["loss"] + 0.1 * found["penalty"]).backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def test_a_scalar_is_added_to_the_loss(ranks: Pools) -> None:
    ranks(2).run(_sum_of_losses)


def _no_share() -> None:
    model, x = _made()
    compiled = autopar.compile(model, x, 2, progress=False, parallel=dict(data=2))
    y = compiled(x)["y"]
    expected = model(x)["y"].sum().item()
    for read in (torch.Tensor.item, float, bool):
        with pytest.raises(
            autopar.RunError, match=r"Partial\(sum\).*only this rank's share: call f"
        ):
            read(y.detach().sum())
    assert y.sum().full_tensor().item() == pytest.approx(expected, rel=1e-5)
    assert next(compiled.parameters())[0, 0].item() == model.first.weight[0, 0].item()
    own = init_device_mesh("cpu", (2,))  # torch's rule holds for a mesh of the script
    share = DTensor.from_local(torch.tensor(1.0 + dist.get_rank()), own, [Partial()])
    assert share.item() == 1.0 + dist.get_rank()


def test_a_share_of_a_sum_is_no_number(ranks: Pools) -> None:
    ranks(2).run(_no_share)
