"""Writes into parts of parameters and gradients have the effect that they have on one device, also
where a part crosses the ranks' parts.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import RunError
from autopar.runtime.dtensors import view_writes

PLANS: dict[str, dict[str, Any]] = {
    "zero2": dict(parallel=dict(data=2), zero=2),
    "zero3": dict(parallel=dict(data=2), zero=3, micro_batch_size=2),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
}
GRID = {"grid": dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")), zero=2)}
WIDTH = 8


class Net(nn.Module):
    """The writes are to u (16 x 8), v (8 x 16) and b (5): up, down and the bias of head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(x)))).square().mean()


def _write_views(u: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> None:
    rows = u[:5]
    rows.mul_(2.0)
    rows[2].add_(1.0)  # a view of a view
    rows.t().sub_(0.5)
    b[:2].data.zero_()


def _write_two_views(u: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> None:
    first, second, third = u[:4], u[2:7], u.view(4, 4, 8)[1]
    u.mul_(2.0)
    first.zero_()
    second.add_(1.0)
    third.mul_(0.5)


def _write_lists(u: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_mul_([u[0], u[1], v[:, 3:], u[12:], b[1:]], 2.0)
    torch.mul(u[1], 2.0, out=u[2])


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "row": lambda u, v, b: u[3].zero_(),
    "data": lambda u, v, b: u.data[0].zero_(),
    "number": lambda u, v, b: u.__setitem__(slice(2, 11), 0.5),
    "row of a row": lambda u, v, b: u.__setitem__(0, u[9]),
    "in place": lambda u, v, b: u[1:3].__iadd__(1.0),
    "column": lambda u, v, b: (u[:, 1].mul_(2.0), v[:, -1].mul_(2.0)),
    "block": lambda u, v, b: v[1:7, 2:9].fill_(0.5),
    "vector": lambda u, v, b: (b[0].add_(1.0), b[3:].mul_(2.0)),
    "chunk": lambda u, v, b: (u.chunk(4)[1].zero_(), v.split([3, 13], 1)[1].mul_(2.0)),
    "steps": lambda u, v, b: u[::3].zero_(),
    "diagonal": lambda u, v, b: u.diagonal().fill_(1.0),
    "shape": lambda u, v, b: (u.view(4, 4, 8)[1].zero_(), v.view(-1)[3:40].mul_(2.0)),
    "views": _write_views,
    "views of one": _write_two_views,
    "lists": _write_lists,
}


def _sample(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, WIDTH, dtype=torch.float64, generator=generator)}


def _of_gradients(t: torch.Tensor) -> torch.Tensor:
    assert t.grad is not None
    return t.grad


def _alike(compiled: nn.Module, model: nn.Module, what: str) -> None:
    expected = dict(model.named_parameters())
    for name, p in compiled.named_parameters():
        for found, wanted in ((p, expected[name]), (p.grad, expected[name].grad)):
            assert found is not None
            assert wanted is not None
            torch.testing.assert_close(
                full(found.detach()),
                wanted.detach(),
                rtol=1e-12,
                atol=1e-14,
                msg=lambda m, n=name: f"{what}, {n}: {m}",
            )


def _write(m: nn.Module, write: Callable[..., Any], of: Callable[..., torch.Tensor]) -> None:
    parameters = dict(m.named_parameters())
    names = ("up.weight", "down.weight", "head.bias")
    with torch.no_grad():
        write(*(of(parameters[name]) for name in names))


def _writes(plans: dict[str, dict[str, Any]]) -> None:
    world_size = torch.distributed.get_world_size()
    for plan, options in plans.items():
        _clear_sharding_prop_cache()  # it holds process groups of earlier tests
        model = Net()
        compiled = autopar.compile(
            copy.deepcopy(model), _sample(), world_size, progress=False, **options
        )
        for number, (name, write) in enumerate(WRITES.items()):
            for m in (model, compiled):
                m.zero_grad()
                _write(m, write, lambda t: t)
                m(**_sample(number)).backward()
                _write(m, write, _of_gradients)
            _alike(compiled, model, f"{plan}, {name}")
        gc.collect()
        assert not view_writes._COPIES, plan


def _reads() -> None:
    """A gathered part has gradients, as before."""
    for plan, options in PLANS.items():
        _clear_sharding_prop_cache()
        model = Net()
        compiled = autopar.compile(copy.deepcopy(model), _sample(), 2, progress=False, **options)
        for m in (model, compiled):
            u, v = m.get_parameter("up.weight"), m.get_parameter("down.weight")
            loss = m(**_sample())
            (loss + u[3].square().sum() + (v[:, 2:9] ** 3).sum()).backward()
        _alike(compiled, model, plan)


def _fills() -> None:
    """torch would fill each rank's share of a gradient that waits for its sum."""
    _clear_sharding_prop_cache()
    model = Net()
    compiled = autopar.compile(copy.deepcopy(model), _sample(), 2, progress=False, **PLANS["zero2"])
    with compiled.no_sync():
        compiled(**_sample()).backward()
    model(**_sample()).backward()
    for fill in (lambda g: g.fill_(0.5), lambda g: g[3].fill_(0.5), lambda g: g[:2].fill_(0.5)):
        with pytest.raises(RunError, match=r"a pending sum"):
            fill(compiled.get_parameter("up.weight").grad)
    for m in (model, compiled):
        _write(m, lambda u, v, b: (u[3].fill_(0.0), v[:2].zero_(), b[1:].mul_(2.0)), _of_gradients)
        m(**_sample(1)).backward()
    _alike(compiled, model, "filled")


def test_a_pending_sum_is_not_filled(ranks: Pools) -> None:
    ranks(2).run(_fills)


def test_writes_into_views_reach_all_ranks(ranks: Pools) -> None:
    ranks(2).run(_writes, PLANS)


def test_views_that_are_read_have_gradients(ranks: Pools) -> None:
    ranks(2).run(_reads)


@pytest.mark.slow
def test_writes_into_views_on_a_grid(ranks: Pools) -> None:
    ranks(4).run(_writes, GRID)
