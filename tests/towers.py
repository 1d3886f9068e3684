"""A small program whose recomputed calls a test may choose and count."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import small_graphs
import torch
from by_hand import calls, one_device, part_of
from torch import fx, nn

from autopar.passes.lowering.lower import lower
from autopar.runtime.communication.arrivals import Arrivals
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.pipeline import recompute, recomputed_call


class Tower(nn.Module):
    """Products, statistics, views, a tensor with many readers, dropout and batch norm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.norm, self.batch, self.drop = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            y = torch.tanh(layer(self.norm(h)))
            h = h + self.drop(y * y.exp()).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return (self.batch(h) * h).square().mean()


@dataclasses.dataclass
class Program:
    """A lowered program that needs no process group, and its leaves."""

    module: fx.GraphModule
    state: list[torch.Tensor]
    random_streams: RandomStreams

    def __call__(self, x: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        self.random_streams.microbatch = microbatch
        mesh: Any = SimpleNamespace(
            random_streams=self.random_streams,
            arrivals=Arrivals(),
            index=lambda axes: 0,
            count=lambda axes: 1,
        )
        return recompute.run(self.module, mesh, [*self.state, x])[0]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self.state if t.requires_grad]

    def gradients(self) -> list[torch.Tensor]:
        found = [t.grad for t in self.leaves]
        for t in self.leaves:
            t.grad = None
        return found  # type: ignore[return-value]


def tower(recomputed: Any = (), layers: int = 2) -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tower(layers).double()
    analysis = small_graphs.analyse(model, X)
    names = calls(analysis)
    plan = one_device(
        analysis, recomputed=recomputed(names) if callable(recomputed) else recomputed
    )
    lowered = lower(analysis, plan)
    return Program(
        lowered.train, [analysis.captured.state[name] for name in lowered.state], RandomStreams(0)
    )


X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SOME = [
    tuple,
    lambda names: part_of(names, 0.5, 0),
    lambda names: part_of(names, 0.5, 1),
    lambda names: part_of(names, 0.8, 2),
]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of the calls that are recomputed within this context."""
    made: list[int] = []
    make = recomputed_call.RecomputedCall.make

    def noted(call: Any) -> None:
        made.append(call.number)
        make(call)

    with mock.patch.object(recomputed_call.RecomputedCall, "make", noted):
        yield made
