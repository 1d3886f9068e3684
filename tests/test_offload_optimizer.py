"""Training with the optimizer's state in the memory of the host is training without, to the bit."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from offloaded import (
    MAKERS,
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
from torch.optim import Adam, AdamW, Optimizer

from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.measure.live_bytes import storage_key


def _trains_alike(label: str) -> None:
    one, other = programs(label)
    start = copy.deepcopy(one.state_dict())
    with small_buckets():
        for make in MAKERS.values():
            one.load_state_dict(start)
            other.load_state_dict(start)
            optimizer, reference = make(in_groups(one)), make(in_groups(other))
            train(one, optimizer)
            train(other, reference)
            assert_same(one, optimizer, other, reference)
            moved = zip(one.parameters(), start.values(), strict=True)
            assert not all(torch.equal(local_tensor(p), local_tensor(q)) for p, q in moved)


@pytest.mark.sampled(fast=3, slow=3)
@pytest.mark.parametrize(
    "label",
    [
        "alone",
        "zero 3",
        "pipeline",
        *(pytest.param(x, marks=pytest.mark.slow) for x in PLANS),
    ],
)
def test_training_is_the_same_to_the_bit(ranks: Pools, label: str) -> None:
    ranks(1 if label == "alone" else 2).run(_trains_alike, label)


def _every_optimizer(label: str) -> None:
    """Every optimizer of torch, whichever way its step runs."""
    one, other = programs(label)
    start = copy.deepcopy(one.state_dict())
    classes = [c for _, c in inspect.getmembers(torch.optim, inspect.isclass)]
    for kind in classes:
        if not issubclass(kind, Optimizer) or kind in (Optimizer, torch.optim.SparseAdam):
            continue
        if label != "alone" and kind in (torch.optim.Adafactor, torch.optim.Rprop):
            continue  # refused on several ranks
        with small_buckets(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made = []
            for model in (one, other):
                model.load_state_dict(start)
                matrices, vectors = (group["params"] for group in in_groups(model, "unused"))
                chosen = matrices if kind is torch.optim.Muon else matrices + vectors
                made.append(optimizer := kind(chosen))
                for seed in range(STEPS):

                    def closure(model: Any = model, seed: int = seed) -> torch.Tensor:
                        model.zero_grad()
                        loss = model(batch(seed))
                        loss.backward()
                        return loss

                    if kind is torch.optim.LBFGS:
                        optimizer.step(closure)
                    else:
                        closure()
                        optimizer.step()
            assert_same(one, made[0], other, made[1])


@pytest.mark.parametrize("label", ["alone", pytest.param("zero 3", marks=pytest.mark.slow)])
def test_every_optimizer(ranks: Pools, label: str) -> None:
    ranks(1 if label == "alone" else 2).run(_every_optimizer, label)


class Own(AdamW):
    """An optimizer that counts its steps in its groups, as a user's may."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        found = super().step(closure)
        for state in self.state.values():  # where the state is during the step
            state["exp_avg"].mul_(0.5)
        return found


def _own_optimizer_and_hooks() -> None:
    one, other = programs("alone")
    made = []
    for model in (one, other):
        optimizer = Own(model.parameters(), lr=0.02)
        seen = []

        def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(
            lambda optimizer, *_, seen=seen: seen.append(len(optimizer.param_groups[0]["params"]))
        )
        with small_buckets():
            train(model, optimizer)
        assert optimizer.param_groups[0]["count"] == STEPS
        # torch calls the hooks of a step that calls its parent's twice.
        assert seen == [len(list(model.parameters()))] * 2 * STEPS
        made.append(optimizer)
    assert_same(one, made[0], other, made[1])
    made = []
    for model in (one, other):  # the same hooks of an optimizer that steps in buckets
        model.zero_grad()
        optimizer = AdamW(model.parameters(), lr=0.02)
        optimizer.register_step_pre_hook(halve)
        with small_buckets():
            train(model, optimizer)
        made.append(optimizer)
    assert_same(one, made[0], other, made[1])


def test_own_optimizers_and_hooks(ranks: Pools) -> None:
    ranks(1).run(_own_optimizer_and_hooks)


def _closures() -> None:
    one, other = programs("alone")
    made, losses = [], []
    for model in (one, other):
        made.append(optimizer := Adam(model.parameters(), lr=0.02))
        for seed in range(STEPS):

            def closure(model: Any = model, seed: int = seed) -> torch.Tensor:
                assert torch.is_grad_enabled()
                model.zero_grad()
                loss = model(batch(seed))
                loss.backward()
                return loss

            with small_buckets(), torch.no_grad():
                losses.append(float(optimizer.step(closure)))
    assert losses[:STEPS] == losses[STEPS:]
    assert_same(one, made[0], other, made[1])


def test_closures(ranks: Pools) -> None:
    ranks(1).run(_closures)


def _scaled() -> None:
    """torch's loss scaler looks for overflows outside of the step, or in that of a fused
    optimizer.
    """
    one, other = programs("alone")
    start = copy.deepcopy(one.state_dict())
    for name in ("adamw", "fused"):
        made = []
        for model in (one, other):
            model.load_state_dict(start)
            made.append(optimizer := MAKERS[name](in_groups(model)))
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**124)
            with small_buckets():
                for seed in range(20):
                    scaler.scale(model(batch(seed))).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            assert scaler.get_scale() < 2.0**124
        assert_same(one, made[0], other, made[1])
        moved = zip(one.parameters(), start.values(), strict=True)
        assert not all(torch.equal(p, q) for p, q in moved)


def test_a_loss_scaler(ranks: Pools) -> None:
    ranks(1).run(_scaled)


def _moves() -> None:
    """Between steps the host has the state; a step computes with other tensors, a bucket of them at
    a time.
    """
    model, _ = programs("zero 3")
    optimizer = AdamW(model.parameters(), lr=0.02)
    with small_buckets():
        train(model, optimizer, range(1))
        kept = {storage_key(t): t for n, t in state_of(optimizer) if n != "step"}
        before = [local_tensor(t) for t in kept.values()]
        used: list[set[int | None]] = []
        update = torch._foreach_lerp_

        def watched(moments: Any, *args: Any, **kwargs: Any) -> Any:
            used.append({storage_key(t) for t in moments})
            return update(moments, *args, **kwargs)

        with mock.patch.object(torch, "_foreach_lerp_", watched):
            train(model, optimizer, range(1, 2))
    assert len(used) > 2
    assert not set(kept) & set().union(*used)
    after = {storage_key(t): t for n, t in state_of(optimizer) if n != "step"}
    assert after.keys() == kept.keys()
    assert [local_tensor(t) is u for t, u in zip(after.values(), before, strict=True)]
    steps = [t for n, t in state_of(optimizer) if n == "step"]
    assert {float(t) for t in steps} == {2.0}


def test_the_state_moves(ranks: Pools) -> None:
    ranks(2).run(_moves)


def _fails() -> None:
    """After a step that failed the state is on the host and the optimizer has its parameters."""
    model, _ = programs("alone")
    optimizer = AdamW(model.parameters(), lr=0.02, foreach=True)
    with small_buckets():
        train(model, optimizer, range(1))
        kept = [storage_key(t) for _, t in state_of(optimizer)]
        model(batch(1)).backward()
        with (
            mock.patch.object(torch, "_foreach_addcdiv_", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            optimizer.step()
        assert [storage_key(t) for _, t in state_of(optimizer)] == kept
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        assert count == len(list(model.parameters()))
        optimizer.step()


def test_a_step_that_fails(ranks: Pools) -> None:
    ranks(1).run(_fails)
