"""Planned pipelines and recomputation compute what one device computes: losses, outputs, all gradients and buffers, in float64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, differences, step, traced_once, worst
from pool import Pools
from staged import own
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

TOLERANCE = 1e-9
MODELS = ("gpt2", "llama", "t5", "unet", "vit")
RECOMPUTE = ("none", "full", "auto")
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
INSIDE: dict[str, dict[str, Any]] = {"alone": {}, "data": dict(data=2), "tensor": dict(tensor=dict(size=2, mode="1d"))}

Options = dict[str, Any]


def options(schedule: str, chunks: int, pipeline: int, inside: str, recompute: str, microbatches: int, batch: int) -> Options:
    piped = dict(pipeline=dict(size=pipeline, chunks=chunks), **INSIDE[inside])
    size = batch // microbatches // (2 if inside == "data" else 1)
    return dict(parallel=piped, schedule=schedule, recompute=recompute, micro_batch_size=size)


@functools.cache
def _whole(name: str, batch: int, world: int, text: str) -> float:
    model, sample = getattr(zoo, name)(dtype=torch.float64, batch=batch)
    return max(autopar.plan(model, sample, world, progress=False, **eval(text)).peak_memory)


def pressed(name: str, batch: int, world: int, chosen: Options) -> Options:
    """With less memory than keeping everything takes, where something is to be recomputed."""
    if chosen["recompute"] != "auto":
        return chosen
    return chosen | dict(memory_budget=0.8 * _whole(name, batch, world, repr(chosen | dict(recompute="none"))))


def check(name: str, batch: int, configurations: list[Options]) -> list[tuple[float, str, int, int]]:
    """For each configuration the worst error, of what, the microbatches and how much is recomputed; a rank's work."""
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    found = []
    model, sample = getattr(zoo, name)(dtype=torch.float64, batch=batch)
    with Double(), traced_once():
        expected = step(copy.deepcopy(model), sample)
        for chosen in configurations:
            try:
                compiled = autopar.compile(model, sample, dist.get_world_size(), progress=False, **chosen)
                mine = step(compiled, sample)
                error, what = worst(differences(mine, own(expected, mine)))
            except Exception as e:
                raise AssertionError(f"{name}, {chosen}: {e}") from e
            found.append((error, what, compiled.plan.microbatches, len(compiled.plan.recomputed)))
    return found


def _equal(ranks: Pools, world: int, name: str, batch: int, asked: list[Options]) -> None:
    configurations = [pressed(name, batch, world, chosen) for chosen in asked]
    for outcome in ranks(world).run(check, name, batch, configurations, timeout=600):
        for (error, what, _, recomputed), chosen in zip(outcome, configurations, strict=True):
            assert error < TOLERANCE, (chosen, what, error)
            if chosen["recompute"] != "auto":  # which may save memory otherwise too
                assert bool(recomputed) == (chosen["recompute"] == "full"), chosen
            elif set(chosen["parallel"]) == {"pipeline"}:
                assert recomputed, chosen


@pytest.mark.parametrize(("place", "name"), list(enumerate(MODELS)))
def test_two_ranks(ranks: Pools, place: int, name: str) -> None:
    runs = [RUNS[(place + i) % len(RUNS)] for i in range(3)]
    asked = [options(*run, 2, "alone", recompute, 4, 8) for run, recompute in zip(runs, RECOMPUTE, strict=True)]
    _equal(ranks, 2, name, 8, asked)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_four_ranks(ranks: Pools, name: str) -> None:
    _equal(ranks, 4, name, 8, [options("1f1b", 1, 2, "data", "auto", 2, 8), options("zero-bubble", 1, 2, "tensor", "full", 2, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_schedule_and_composition(ranks: Pools, name: str, recompute: str) -> None:
    _equal(ranks, 2, name, 8, [options(*run, 2, "alone", recompute, 4, 8) for run in RUNS])
    _equal(ranks, 4, name, 8, [options(*run, 2, inside, recompute, 2, 8) for run in RUNS for inside in ("data", "tensor")])


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_microbatches(ranks: Pools, microbatches: int) -> None:
    schedule = "gpipe" if microbatches == 1 else "1f1b"
    _equal(ranks, 2, "gpt2", 16, [options(schedule, 1, 2, "alone", recompute, microbatches, 16) for recompute in RECOMPUTE])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_eight_ranks(ranks: Pools, name: str) -> None:
    asked = [options("1f1b", 1, 4, inside, recompute, 4, 16) for inside, recompute in (("data", "full"), ("tensor", "auto"))]
    _equal(ranks, 8, name, 16, asked)
