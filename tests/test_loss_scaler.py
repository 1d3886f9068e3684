"""A loss scaler keeps gradients that float16 would lose, in microbatches and pipelines too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

WAYS: dict[str, dict[str, Any]] = {
    "one microbatch": dict(parallel=dict(data=2)),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=2, zero=3),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
}
TINY = 2.0**-26  # times which a gradient is zero in float16


class Network(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(8, 16), nn.Linear(16, 8), factor

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).relu()) - y).float().square().mean() * self.factor


def batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 8, generator=draws).to(dtype) for name in ("x", "y")}


def gradients(model: Any, scaler: Any = None) -> dict[str, torch.Tensor]:
    """The gradients of one step."""
    model.zero_grad()
    loss = model(**batch())
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
        scaler.update()
    return {name: full(p.grad).clone() for name, p in model.named_parameters()}


def compiled(options: dict[str, Any], **more: Any) -> Any:
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    given = dict(precision="fp16", progress=False, verify=False)
    return autopar.compile(Network(**more), batch(), 2, **given, **options)


def check_gradients(options: dict[str, Any]) -> tuple[float, float, bool]:
    """The largest relative error of the gradients of a tiny loss in float16 against those of
    float32 on one device, with a scaler and without; and whether a scaled loss alone has the
    gradients of the loss times the scale.
    """
    exact, program = gradients(Network(TINY)), compiled(options, factor=TINY)

    def worst(found: dict[str, torch.Tensor]) -> float:
        errors = [(g - exact[n]).abs().max() / exact[n].abs().max() for n, g in found.items()]
        return float(max(errors))

    without = worst(gradients(program))
    scaled = worst(gradients(program, autopar.LossScaler(program, init_scale=2.0**22)))
    program.zero_grad()
    program(**batch()).backward()  # the scale stays inside the program
    inside = {name: full(p.grad) for name, p in program.named_parameters()}
    return scaled, without, program.plan.microbatches == 1 or worst(inside) < 0.02


@pytest.mark.parametrize("way", ["microbatches", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_small_gradients_are_kept(ranks: Pools, way: str) -> None:
    for scaled, without, stays in ranks(2).run(check_gradients, WAYS[way]):
        assert scaled < 0.02
        assert without > 0.5
        assert stays


def overflow_of_torch(options: dict[str, Any]) -> list[bool]:
    """Whether each of two steps changed the parameters under torch's own scaler; in the second one
    a gradient of one rank is infinite.
    """
    program = compiled(options)
    scaler, optimizer = (
        torch.amp.GradScaler("cpu", 1024.0),
        torch.optim.SGD(program.parameters(), 0.1),
    )
    return [step_changes(program, scaler, optimizer, step == 1) for step in range(2)]


def step_changes(program: Any, scaler: Any, optimizer: Any, overflows: bool) -> bool:
    """Whether a step changes the parameters. Where it ``overflows``, one gradient is infinite."""
    before = [full(p).clone() for p in program.parameters()]
    scaler.scale(program(**batch())).backward()
    if overflows and dist.get_rank() == 1:
        gradient = list(program.parameters())[-1].grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return not all(map(torch.equal, before, map(full, program.parameters())))


def overflow(options: dict[str, Any]) -> list[Any]:
    """The scale after each step, and whether the parameters changed in it; one rank's gradient is
    infinite in the steps 0, 1 and 4.
    """
    program = compiled(options)
    scaler = autopar.LossScaler(program, init_scale=1024.0, growth_interval=2, max_scale=1024.0)
    optimizer = torch.optim.SGD(program.parameters(), 0.1)
    found: list[Any] = []
    for step in range(5):
        changed = step_changes(program, scaler, optimizer, step in (0, 1, 4))
        found.append((scaler.get_scale(), changed))
    again = autopar.LossScaler(program)
    again.load_state_dict(scaler.state_dict())
    return [*found, again.state_dict() == scaler.state_dict(), program.loss_scale]


@pytest.mark.parametrize(
    "way", ["pipeline", pytest.param("one microbatch", marks=pytest.mark.slow)]
)
def test_no_rank_steps_where_one_overflows(ranks: Pools, way: str) -> None:
    expected = [
        (1024.0, False),  # the first overflow is forgiven
        (512.0, False),
        (512.0, True),
        (1024.0, True),  # grows after two good steps
        (1024.0, False),
    ]
    for found in ranks(2).run(overflow, WAYS[way]):
        assert found == [*expected, True, 1024.0]


@pytest.mark.slow
def test_torchs_scaler_serves_one_microbatch(ranks: Pools) -> None:
    options = {**WAYS["one microbatch"], "zero": 3, "micro_batch_size": 4}
    for found in ranks(2).run(overflow_of_torch, options):
        assert found == [True, False]


def test_wrong_scales_and_orders_are_refused() -> None:
    program = autopar.compile(Network(), batch(), 1, progress=False)
    with pytest.raises(autopar.RunError, match="give 0 < init_scale <= max_scale"):
        autopar.LossScaler(program, init_scale=2.0**40)
    scaler, optimizer = autopar.LossScaler(program), torch.optim.SGD(program.parameters(), 0.1)
    with pytest.raises(autopar.RunError, match=r"update\(\) was called before step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(autopar.RunError, match="called twice"):
        scaler.unscale_(optimizer)
