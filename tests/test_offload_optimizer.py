"""Training with the optimizer's state in the memory of the host is training without, to the bit."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peaks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import Pools
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import SGD, Adam, AdamW, Optimizer

import autopar
from autopar.ir import state_buckets
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.measure.live_bytes import storage_key

STEPS = 3
SIZE, BATCH = 8, 8
PINNED = dict(offload="optimizer")
PLANS: dict[str, dict[str, Any]] = {
    "alone": dict(zero=PINNED),
    "zero 0": dict(parallel=dict(data=2), zero=dict(stage=0, **PINNED)),
    "zero 1": dict(parallel=dict(data=2), zero=dict(stage=1, **PINNED)),
    "zero 3": dict(parallel=dict(data=2), zero=dict(stage=3, **PINNED)),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d")), zero=PINNED),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=2, zero=PINNED),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4, zero=PINNED),
}
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(AdamW, lr=0.02),
    "foreach": partial(AdamW, lr=0.02, foreach=True, amsgrad=True),
    "single": partial(AdamW, lr=0.02, foreach=False),
    "fused": partial(AdamW, lr=0.02, fused=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=0.1),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
            self.norm, self.unused = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x).square().sum(-1).add(x.sum(-1)).square().mean()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(seed))


@contextmanager
def small_buckets(size: int = SIZE) -> Iterator[None]:
    """A bucket holds the weight and the bias of one layer at most."""
    with mock.patch.object(state_buckets, "BUCKET_BYTES", 4 * (size * size + size)):
        yield


def programs(label: str) -> tuple[autopar.Compiled, autopar.Compiled]:
    """The same program with the optimizer's state on the host, and without."""
    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    world = 1 if label == "alone" else 2
    plan = autopar.plan(Small(), batch(0), world, progress=False, **PLANS[label])
    kept = {n: dataclasses.replace(p, offloaded=False) for n, p in plan.parameters.items()}
    assert any(p.offloaded for p in plan.parameters.values())
    plans = plan, dataclasses.replace(plan, parameters=kept)
    first, second = (autopar.compile(Small(), batch(0), world, plan=p) for p in plans)
    return first, second


def state_of(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def assert_same(one: Any, optimizer: Optimizer, other: Any, reference: Optimizer) -> None:
    """Parameters and the state of their optimizers are equal to the bit."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        assert torch.equal(local_tensor(p), local_tensor(q)), name
    found, expected = list(state_of(optimizer)), list(state_of(reference))
    assert [n for n, _ in found] == [n for n, _ in expected]
    for (name, t), (_, u) in zip(found, expected, strict=True):
        assert type(t) is type(u), name
        assert torch.equal(local_tensor(t), local_tensor(u)), name


def in_groups(model: nn.Module, but: str = "-") -> list[dict[str, Any]]:
    """Groups of matrices and of vectors, without the parameters whose names begin with ``but``."""
    chosen = [p for name, p in model.named_parameters() if not name.startswith(but)]
    return [
        dict(params=[p for p in chosen if p.ndim > 1]),
        dict(params=[p for p in chosen if p.ndim < 2], weight_decay=0.0, lr=0.01),
    ]


def train(model: Any, optimizer: Optimizer, steps: range = range(STEPS)) -> None:
    """The usual loop, with a scheduler and clipping."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for seed in steps:
        model(batch(seed)).backward()
        autopar.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


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


@pytest.mark.parametrize(
    ("label", "to_host", "from_host"),
    [
        ("zero 3", True, True),
        ("zero 3", False, True),
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
