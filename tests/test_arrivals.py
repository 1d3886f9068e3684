"""ZeRO-1 and 2 gather parameters behind the forward, in the order of use."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import equivalence
import pytest
import torch
import zoo
from pool import Pools
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.communication.arrivals import Arrivals
from autopar.runtime.parameters.gather import Gather

LAYERS = 4


def test_a_tensor_is_waited_for_once_with_those_that_come_with_it() -> None:
    arrivals, seen, calls = Arrivals(), [], []
    tensors = [torch.empty(0) for _ in range(3)]

    def wait(members: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(members))
        return members

    arrivals.expect(tensors[:2], lambda: wait(tensors[:2]))
    arrivals.expect(tensors[2:], lambda: wait(tensors[2:]))
    arrivals.on_arrival = seen.append
    arrivals.take(tensors[1])
    arrivals.take(tensors[0])
    assert calls == [2]
    assert [any(t is other for other in seen) for t in tensors] == [True, True, False]
    arrivals.take_all()
    arrivals.take(tensors[2])
    assert calls == [2, 1]


class Order(TorchDispatchMode):
    """How many gathers are under way at each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[int] = []
        self._started: set[int] = set()

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        name = f.__name__.partition(".")[0]
        if name == "all_gather_into_tensor":
            self._started.add(out.data_ptr())
        elif name == "wait_tensor":
            self._started.discard(args[0].data_ptr())
        elif name in ("mm", "addmm"):
            self.under_way.append(len(self._started))
        return out


def gathered(options: dict[str, Any], folder: str) -> list[int]:
    """Checks two steps of a program, the second one with other parameters, and evaluation."""
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
    warnings.filterwarnings("ignore", module="torch")  # of its own parts
    model, sample = zoo.gpt2(layers=LAYERS)
    single = copy.deepcopy(model)
    with mock.patch.object(Gather.__init__, "__defaults__", (1 << 15,)):  # small buckets
        program = autopar.compile(
            model, sample, 2, parallel=dict(data=2), progress=False, **options
        )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (program, single)]
    for _ in range(2):
        found, expected = equivalence.step(program, sample), equivalence.step(single, sample)
        error = equivalence.worst(equivalence.differences(found, expected))
        assert error < (1e-4, ""), error
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        losses = [equivalence.loss_of(net.eval()(**sample)) for net in (program, single)]
    torch.testing.assert_close(*losses)
    program.train()
    with Order() as order:
        loss = equivalence.loss_of(program(**sample))
        forward, order.under_way = order.under_way, []
        loss.backward()
    assert set(order.under_way) <= {0}
    return forward


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        dict(zero=1),
        dict(zero=2, recompute="full"),
        dict(zero=2, micro_batch_size=1),
        pytest.param(dict(zero=2, backend="inductor"), marks=pytest.mark.slow),
        pytest.param(dict(zero=1, micro_batch_size=2, backend="inductor"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gathers_run_behind_the_forward(
    ranks: Pools, tmp_path: Path, options: dict[str, Any]
) -> None:
    for under_way in ranks(2).run(gathered, options, str(tmp_path), timeout=500):
        assert under_way[0] >= LAYERS
        assert sorted(under_way, reverse=True) == under_way
        assert under_way[-1] == 0
        assert len(set(under_way)) >= LAYERS


def test_parameters_that_a_program_does_not_read(ranks: Pools) -> None:
    assert all(ranks(2).run(unread))


class Unread(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


def unread() -> bool:
    program = autopar.compile(
        Unread(), torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), 2,
        parallel=dict(data=2), zero=1, progress=False,
    )  # fmt: skip
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        program(x).backward()
    return program.get_parameter("other.weight").grad is None
