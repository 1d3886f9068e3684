"""State of optimizers in the memory of the host: checkpoints, kinds of tensors, two programs, the
peak memory.
"""

from __future__ import annotations

import copy
from pathlib import Path

import peaks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from offloaded import (
    PLANS,
    STEPS,
    assert_same,
    batch,
    in_groups,
    programs,
    small_buckets,
    state_of,
    train,
)
from pool import Pools
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import autopar


def _goes_on(label: str, folder: str, to_host: bool, from_host: bool) -> None:
    """A checkpoint of one program goes on in the other, as without."""
    with small_buckets():
        pair = programs(label)
        saves, reference = pair[not from_host], programs(label)[1]
        # torch's checkpoints make state of all parameters, and do not find that of unused ones.
        make = lambda model: AdamW(in_groups(model, "unused"), lr=0.02)  # noqa: E731
        optimizer, straight = make(saves), make(reference)
        train(saves, optimizer)
        saves.save(f"{folder}/own", optimizer=optimizer, wait=True)
        state = get_optimizer_state_dict(saves, optimizer)
        dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/dcp")
        plain = copy.deepcopy(optimizer.state_dict())
        later = range(STEPS, 2 * STEPS)
        train(reference, straight)
        train(reference, straight, later)
        for how in ("own", "dcp", "plain"):
            model = programs(label)[not to_host]
            fresh = make(model)
            model.load(f"{folder}/own", **({"optimizer": fresh} if how == "own" else {}))
            if how == "dcp":
                state = get_optimizer_state_dict(model, fresh)
                dcp.load({"optimizer": state}, checkpoint_id=f"{folder}/dcp")
                set_optimizer_state_dict(model, fresh, state)
            if how == "plain":
                fresh.load_state_dict(copy.deepcopy(plain))
            for group, old in zip(fresh.param_groups, straight.param_groups, strict=True):
                group["initial_lr"] = old["initial_lr"]
            train(model, fresh, later)
            assert_same(model, fresh, reference, straight)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize(
    ("label", "to_host", "from_host"),
    [
        pytest.param("zero 3", True, True, marks=pytest.mark.slow),
        pytest.param("zero 3", False, True, marks=pytest.mark.exhaustive),
        pytest.param("zero 3", True, False, marks=pytest.mark.slow),
        pytest.param("pipeline", True, True, marks=pytest.mark.slow),
        pytest.param("tensor", True, True, marks=pytest.mark.slow),
    ],
)
def test_checkpoints(
    ranks: Pools, tmp_path: Path, label: str, to_host: bool, from_host: bool
) -> None:
    ranks(2).run(_goes_on, label, str(tmp_path), to_host, from_host)


def _whole() -> None:
    """Tensors of the state are DTensors as others: whole, and compared between replicas."""
    model, _ = programs("zero 3")
    optimizer = AdamW(model.parameters(), lr=0.02)
    train(model, optimizer)
    for name, t in state_of(optimizer):
        if name != "step":
            assert isinstance(t, DTensor)
            assert t.full_tensor().shape == t.shape
    model.check_replicas(optimizer)


def test_state_is_dtensors(ranks: Pools) -> None:
    ranks(2).run(_whole)


def _two_programs() -> None:
    """One optimizer of two programs, of which each has its state on the host."""
    found = []
    for number in range(2):
        pair = [programs("alone")[number] for _ in range(2)]
        optimizer = AdamW([p for model in pair for p in model.parameters()], lr=0.02)
        groups = AdamW([dict(params=list(model.parameters())) for model in pair], lr=0.02)
        for each in (optimizer, groups):
            for seed in range(STEPS):
                sum(model(batch(seed)) for model in pair).backward()
                each.step()
                each.zero_grad()
        found.append([p.detach().clone() for model in pair for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def test_an_optimizer_of_two_programs(ranks: Pools) -> None:
    ranks(1).run(_two_programs)


@pytest.mark.parametrize("way", ["alone", pytest.param("zero 1", marks=pytest.mark.slow)])
def test_the_peak_is_the_predicted_one(ranks: Pools, way: str) -> None:
    """Bytes on the device, without those that the host keeps: 2 %."""
    options, world = PLANS[way], 1 if way == "alone" else 2
    model, sample = peaks.made("chain", world)
    with small_buckets(peaks.WIDTH):
        plan = autopar.plan(model, sample, world, progress=False, **options)
    stage = options["zero"].get("stage")
    without = autopar.plan(model, sample, world, progress=False, **{**options, "zero": stage})
    assert plan.peak_memory[0] < 0.85 * without.peak_memory[0]
    for real in ranks(world).run(_measured, plan):
        assert plan.peak_memory[0] == pytest.approx(real, rel=0.02)


def _measured(plan: autopar.Plan) -> float:
    with small_buckets(peaks.WIDTH):
        return peaks.measured(plan, "chain", plan.world_size)
