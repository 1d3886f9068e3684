"""What gradients of weights hide of the sums of activations' gradients in a compiled program is not
in the predicted step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model import Cluster

A100 = Cluster.load("a100-sxm")
BLOCKS, WIDTH, ROWS = 4, 1024, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).sum()


def planned(
    backend: str | None,
    overlap: float,
    network: float,
    model: nn.Module | None = None,
    **options: Any,
) -> autopar.Plan:
    """Tensor parallelism of two ranks; ``network``: how many times as fast the links are."""
    links = tuple(
        replace(level, bandwidth=level.bandwidth * network, latency=0.0, startup=0.0)
        for level in A100.links
    )
    software = replace(A100.software, overlap=overlap, launch=0.0, overhead=0.0)
    with torch.device("meta"):
        model, x = model or Blocks(), torch.zeros(ROWS, WIDTH)
    return autopar.plan(
        model,
        x,
        2,
        cluster=replace(A100, software=software, links=links),
        parallel=dict(tensor=dict(size=2, mode="1d")),
        recompute="none",
        backend=backend,
        progress=False,
        **options,
    )


def backward_sums(plan: autopar.Plan) -> float:
    """Seconds for which a rank waits for sums of activations' gradients, in a step."""
    rows = [r for r in plan.rows["collectives"] if r[:2] == ["conversions", "all_reduce"]]
    return sum(row[-1] for row in rows if row[3] == "backward")


def hidden(plan: autopar.Plan) -> float:
    """Seconds of conversions that computation hides, those of gathered parameters among them."""
    return sum(min(row[1:]) for row in plan.rows["hidden"] if row[0] == "conversions")


def test_fast_sums_are_hidden() -> None:
    eager, compiled = (planned(backend, 1.0, 1.0) for backend in ("eager", "inductor"))
    assert backward_sums(eager) > 0.1 * eager.seconds["conversions"]
    assert backward_sums(compiled) < 2e-3 * backward_sums(eager)
    saved = backward_sums(eager) - backward_sums(compiled)
    assert eager.step_time - compiled.step_time == pytest.approx(saved, rel=1e-6)
    assert hidden(compiled) - hidden(eager) == pytest.approx(saved)
    assert "(it hides" in " ".join(compiled.report().split())


def test_slow_sums_have_the_gradients_of_two_weights_beside_them() -> None:
    """Nothing sums the gradient of the batch, before the first block."""
    eager, compiled = (planned(backend, 1.0, 1e-3) for backend in ("eager", "inductor"))
    assert eager.seconds["conversions"] > 5 * eager.seconds["compute"]
    saved = eager.step_time - compiled.step_time
    third = eager.seconds["compute"] / 3 * (BLOCKS - 1) / BLOCKS
    assert saved == pytest.approx(third, rel=0.03)  # products take most of the time


def test_half_of_what_is_hidden_is_saved() -> None:
    none, half, all_of_it = (planned("inductor", overlap, 1.0).step_time for overlap in (0, 0.5, 1))
    assert none == planned("eager", 0.0, 1.0).step_time
    assert none - half == pytest.approx((none - all_of_it) / 2, rel=2e-3)


def test_weights_without_gradients_hide_nothing() -> None:
    with torch.device("meta"):
        model = Blocks()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    eager, compiled = (planned(b, 1.0, 1.0, model) for b in ("eager", "inductor"))
    assert backward_sums(compiled) == backward_sums(eager) > 0


def test_the_software_of_a_cluster_compiles() -> None:
    """As ``backend="inductor"`` does; where the prices are those of eager kernels, a plan that
    leaves the backend open has no hidden sums.
    """
    assert hidden(planned(None, 1.0, 1.0)) == hidden(planned("eager", 1.0, 1.0))
    with torch.device("meta"):
        model, x = Blocks(), torch.zeros(ROWS, WIDTH)
    parallel = dict(tensor=dict(size=2, mode="1d"))
    plan = autopar.plan(model, x, 2, cluster="a100-sxm:inductor", parallel=parallel, progress=False)
    assert hidden(plan) > 0.1 * plan.seconds["conversions"]
