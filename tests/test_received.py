"""What is counted as received: of direct collectives by their formulas, of Megatron's tensor
parallelism what its paper says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from received import Received
from torch import nn

import autopar
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels import graph_kernels

_functional = torch.ops._c10d_functional
ROWS, WIDTH = 8, 6
NBYTES = ROWS * WIDTH * 4


def functional() -> dict[str, dict[str, int]]:
    """Functional collectives of a float32 tensor [ROWS, WIDTH]."""
    world, x = dist.group.WORLD, torch.ones(ROWS, WIDTH)
    assert world is not None
    name, n, rank = world.group_name, world.size(), world.rank()
    to = [ROWS - n + 1, *[1] * (n - 1)]  # rank 0 gets most
    equal = [ROWS // n] * n
    calls = {
        "all_reduce": lambda: _functional.all_reduce(x, "sum", name),
        "all_reduce_": lambda: _functional.all_reduce_(x, "sum", name),
        "all_gather": lambda: _functional.all_gather_into_tensor(x, n, name),
        "reduce_scatter": lambda: _functional.reduce_scatter_tensor(x, "sum", n, name),
        "all_to_all": lambda: _functional.all_to_all_single(x, equal, equal, name),
        "all_to_all to the first": lambda: _functional.all_to_all_single(
            x, [to[rank]] * n, to, name
        ),
        "broadcast": lambda: _functional.broadcast(x, 1, name),
    }
    found = {}
    for label, call in calls.items():
        with Received() as received:
            _functional.wait_tensor(call())
        found[label] = received.by_kind
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_functional_collectives(ranks: Pools, n: int) -> None:
    row = WIDTH * 4
    for rank, found in enumerate(ranks(n).run(functional)):
        mine = ROWS - n + 1 if rank == 0 else 1
        assert found == {
            "all_reduce": {"all_reduce": 2 * (n - 1) * NBYTES // n},
            "all_reduce_": {"all_reduce": 2 * (n - 1) * NBYTES // n},
            "all_gather": {"all_gather": (n - 1) * NBYTES},
            "reduce_scatter": {"reduce_scatter": (n - 1) * NBYTES // n},
            "all_to_all": {"all_to_all": (n - 1) * NBYTES // n},
            "all_to_all to the first": {"all_to_all": (n - 1) * mine * row},
            "broadcast": {"broadcast": 0 if rank == 1 else NBYTES},
        }


def plain() -> dict[str, dict[str, int]]:
    """The same by ``torch.distributed``, and messages around a ring."""
    n, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(ROWS, WIDTH)
    parts = list(torch.ones(n, ROWS // n, WIDTH).unbind(0))
    after, before = (rank + 1) % n, (rank - 1) % n
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather([torch.empty_like(x) for _ in range(n)], x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(ROWS // n, WIDTH), parts),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "broadcast": lambda: dist.broadcast(x, src=1),
        "reduce": lambda: dist.reduce(x, dst=1),
        "barrier": lambda: dist.barrier(),
    }
    ring = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, torch.empty_like(x), before)]
    calls["receive"] = lambda: [work.wait() for work in dist.batch_isend_irecv(ring)]
    found = {}
    for label, call in calls.items():
        with Received() as received:
            call()
        assert set(received.by_kind) <= {label}
        found[label] = received.total
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_plain_collectives(ranks: Pools, n: int) -> None:
    for rank, found in enumerate(ranks(n).run(plain)):
        from_others = (n - 1) * NBYTES // n
        assert found == {
            "all_reduce": 2 * from_others,
            "all_gather": (n - 1) * NBYTES,
            "reduce_scatter": from_others,
            "all_to_all": from_others,
            "broadcast": 0 if rank == 1 else NBYTES,
            "reduce": 0 if rank == 1 else NBYTES,
            "barrier": 0,
            "receive": NBYTES,
        }


def conversions() -> tuple[list[dict[str, int]], dict[str, int]]:
    """Of autopar, forward and backward; along one axis of two; and nothing on meta tensors."""
    n = dist.get_world_size()
    mesh, x = Mesh((n,), ("a",)), torch.ones(ROWS, WIDTH, requires_grad=True)
    found = []
    for src, dst in (("S0", "R"), ("P", "I"), ("I", "R")):
        with Received() as forward:
            y = redistribute(x, mesh, 0, src, dst)
        with Received() as backward:
            y.backward(torch.ones_like(y))
        found += [forward.by_kind, backward.by_kind]
    line = torch.ones(1, 1, ROWS, requires_grad=True)
    with Received() as halo:
        graph_kernels.conv_halo(
            line, torch.ones(1, 1, 4), None, (1,), (1,), ((1, 2),), mesh, ((0,),)
        ).sum().backward()
    with Received() as nothing:
        redistribute(x.detach().to("meta"), mesh, 0, "P", "I")
    assert not nothing.total
    return found, halo.by_kind


@pytest.mark.parametrize("n", [2, 4])
def test_conversions(ranks: Pools, n: int) -> None:
    shared, whole = 2 * (n - 1) * NBYTES // n, (n - 1) * NBYTES
    for rank, (found, halo) in enumerate(ranks(n).run(conversions)):
        assert found == [
            {"all_gather": whole},
            {"reduce_scatter": whole},
            {"all_reduce": shared},
            {},
            {},
            {"all_reduce": shared},
        ]
        # One element from the left and two from the right, and the gradients of two and of one.
        assert halo == {"all_to_all": 4 * ((1 + 2) * (rank > 0) + (2 + 1) * (rank < n - 1))}


def two_axes() -> int:
    mesh = Mesh((2, 2), ("a", "b"))
    with Received() as received:
        redistribute(torch.ones(ROWS, WIDTH), mesh, 1, "P", "R")
    return received.total


def test_a_group_is_not_the_world(ranks: Pools) -> None:
    assert ranks(4).run(two_axes) == [NBYTES] * 4


TOKENS, NARROW, WIDE = (8, 4), 64, 256


class Megatron(nn.Module):
    """Two layers between normalisations, which have gradients and want whole sums."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(NARROW), nn.LayerNorm(NARROW)
        self.up, self.down = (
            nn.Linear(NARROW, WIDE, bias=False),
            nn.Linear(WIDE, NARROW, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.after(self.down(nn.functional.gelu(self.up(self.before(x)))))
        return (y - x).square().mean()


def step(options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    sample = {"x": torch.randn(*TOKENS, NARROW)}
    compiled = autopar.compile(Megatron(), sample, dist.get_world_size(), progress=False, **options)
    compiled._desync = None  # whose records are no tensors of the model
    with Received() as forward:
        loss = compiled(**sample)
    with Received() as backward:
        loss.backward()
    return forward.by_kind, backward.by_kind


def test_a_layer_of_megatron(ranks: Pools) -> None:
    """An all-reduce of the row layer's output forward, and of the column layer's input's gradient
    backward (arXiv 1909.08053).
    """
    layouts = {"before": "I", "after": "I", "up.weight": "S0", "down.weight": "S1"}
    all_reduce = 2 * 3 * (8 * 4 * NARROW) * 4 // 4
    for found in ranks(4).run(
        step, dict(parallel=dict(tensor=dict(size=4, mode="1d")), constraints=layouts)
    ):
        assert found == ({"all_reduce": all_reduce}, {"all_reduce": all_reduce})
