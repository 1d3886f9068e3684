"""Ranks update their own parts of parameters, as one device updates the whole."""

from __future__ import annotations

import copy
import inspect
from typing import Any
from unittest import mock

import peaks
import pytest
import torch
from pool import Pools
from test_optimizers import CASES, OPTIMIZERS, REFUSED, STEPS, Small, batch, moved
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.ir import state_buckets
from autopar.plan import Plan
from autopar.runtime.optimizer import local_updates


def _takes(name: str, option: str) -> bool:
    """Whether an optimizer that ranks allow has an implementation of that name."""
    refused = any(case in REFUSED.get(name, {}) for case in CASES)
    return option in inspect.signature(getattr(torch.optim, name)).parameters and not refused


def _in_buckets(case: str) -> dict[str, list[str]]:
    _clear_sharding_prop_cache()
    start, found = Small(), dict[str, list[str]]()
    compiled = autopar.compile(copy.deepcopy(start), batch(0), 2, progress=False, **CASES[case])
    for option in ("foreach", "fused"):
        for name in (n for n in OPTIMIZERS if _takes(n, option)):
            compiled.load_state_dict(start.state_dict())
            model, states = copy.deepcopy(start), []
            for each in (model, compiled):
                options = {option: True} | (dict(momentum=0.9) if name == "SGD" else {})
                optimizer = getattr(torch.optim, name)(each.parameters(), lr=1e-2, **options)
                for seed in range(STEPS):
                    optimizer.zero_grad()
                    each(batch(seed)).backward()
                    with mock.patch.object(state_buckets, "UPDATE_BYTES", 64 * 8):
                        optimizer.step()
                states.append(optimizer.state)
            label = f"{case}, {name}, {option}"
            assert moved(compiled, model, start, label) > 1e-5, label
            for parameter, state in states[1].items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        assert value.placements == parameter.placements, f"{label}: {key}"
            found.setdefault(option, []).append(name)
    return found


@pytest.mark.parametrize("case", ["zero", "1d"])
def test_parameters_in_buckets_are_updated_as_on_one_device(ranks: Pools, case: str) -> None:
    found = ranks(2).run(_in_buckets, case, timeout=120)[0]
    assert {"Adam", "AdamW", "RMSprop", "SGD"} <= set(found["foreach"])
    assert set(found["fused"]) == {"Adagrad", "Adam", "AdamW", "SGD"}


def _kinds() -> None:
    mesh = init_device_mesh("cpu", (2,))
    theirs = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(2)]
    compiled = autopar.compile(Small(), batch(0), 2, progress=False, **CASES["zero"])
    ours = [p for p in compiled.parameters() if isinstance(p, DTensor)]
    compiled(batch(0)).backward()
    gradients, counts = [p.grad for p in ours], [torch.zeros(()) for _ in ours]
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def are_local(lists: list[list[Any]]) -> bool:
        """Whether the optimizer gets this rank's parts."""
        ((found, _),) = group(lists, with_indices=True).values()
        return not any(isinstance(x, DTensor) for each in found for x in each)

    assert not are_local([ours, gradients, [], counts]), "no elementwise optimizer steps"
    local_updates._Step.is_elementwise = True
    assert are_local([ours, gradients, [], counts])
    assert not are_local([theirs, theirs])
    assert not are_local([ours, gradients, [None] * len(ours)]), "torch makes state as DTensors"
    pending = DTensor.from_local(theirs[0].to_local(), ours[0].device_mesh, [Partial()])
    assert not are_local([[pending], [pending]])
    assert not are_local([ours, [torch.zeros(p.shape) for p in ours]])
    with mock.patch.object(state_buckets, "UPDATE_BYTES", 1):
        parts = group([ours, gradients], with_indices=True).values()
    assert [indices for _, indices in parts] == [[i] for i in range(len(ours))]
    local_updates._Step.is_elementwise = False
    for ((own,), (gradient,)), (i,) in parts:
        assert own.data_ptr() == ours[i].to_local().data_ptr()
        assert gradient.data_ptr() == gradients[i].to_local().data_ptr()


class Lars(torch.optim.SGD):
    """A user's own: its rates depend on norms of whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lists = [group["params"], [p.grad for p in group["params"]]]
            for (parameters, gradients), _ in self._group_tensors_by_device_and_dtype(
                lists, with_indices=True
            ).values():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(group["lr"] * (p.norm() + 1) / (g.norm() + 1) * g)


def _own() -> None:
    _clear_sharding_prop_cache()
    start = Small()
    compiled = autopar.compile(copy.deepcopy(start), batch(0), 2, progress=False, **CASES["zero"])
    model = copy.deepcopy(start)
    for each in (model, compiled):
        optimizer = Lars(each.parameters(), lr=1e-2, foreach=True)
        for seed in range(STEPS):
            optimizer.zero_grad()
            each(batch(seed)).backward()
            optimizer.step()
    assert moved(compiled, model, start, "a user's own optimizer") > 1e-5


def test_an_optimizer_of_norms_gets_whole_parameters(ranks: Pools) -> None:
    ranks(2).run(_own)


def test_only_parts_of_programs_that_lie_alike_are_updated_as_parts(ranks: Pools) -> None:
    ranks(2).run(_kinds)


def _peak(plan: Plan, limit: int) -> float:
    with mock.patch.object(state_buckets, "UPDATE_BYTES", limit):
        return peaks.measured(plan, "wide", 16)


def test_a_step_has_the_temporaries_of_one_bucket(ranks: Pools) -> None:
    model, sample = peaks.made("wide", 16)
    sizes = [4 * p.numel() for p in model.parameters()]
    found = []
    for limit in (max(sizes), sum(sizes)):
        with mock.patch.object(state_buckets, "UPDATE_BYTES", limit):
            plan = autopar.plan(
                model, sample, 2, parallel=dict(data=2), zero=0, backend="eager", progress=False
            )
        real = ranks(2).run(_peak, plan, limit)[0]
        print(f"buckets of {limit:,}: predicted {plan.peak_memory[0]:,.0f} bytes, found {real:,}")
        assert plan.peak_memory[0] == pytest.approx(real, rel=0.01)
        found.append(real)
    assert found[1] - found[0] == pytest.approx(sum(sizes) - max(sizes), rel=0.05)
