"""Planned end to end: pipelines in every schedule, with data and tensor parallelism and
recomputation, are the model on one device.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from equivalence import Double, differences, own, shared, step, traced_once, worst
from pool import Pools
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.search.fitting import exact_plan

TOLERANCE = 1e-9
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
RECOMPUTE = ("none", "full", "auto")
LAYERS = {"gpt2": 4, "llama": 4, "t5": 2, "vit": 4, "unet": 2}
FEW = {"gpt2": 2, "llama": 2, "t5": 1, "vit": 2, "unet": 2}
PARTS = {"unet": 4}  # that it can be cut into; the others, with LAYERS, into ten and more
MICROBATCHES = {
    2: range(1, 9),
    4: (1, 2, 3, 4, 6, 8),
    8: (1, 2, 4, 8),
}  # by ranks: each batch is traced anew
ROOM = 0.3  # of what "none" takes more than "full", the part that "auto" is given


@dataclass(frozen=True)
class Case:
    """What is asked of a plan; with ``recompute="auto"`` there is too little memory to keep
    everything.
    """

    pipeline: int
    schedule: str
    chunks: int
    microbatches: int
    data: int = 1
    tensor: int = 1
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def options(self, batch: int) -> dict[str, Any]:
        parallel: dict[str, Any] = dict(
            data=self.data, pipeline=dict(size=self.pipeline, chunks=self.chunks)
        )
        if self.tensor > 1:
            parallel["tensor"] = dict(size=self.tensor, mode="1d")
        return dict(
            parallel=parallel,
            schedule=self.schedule,
            micro_batch_size=batch // (self.microbatches * self.data),
            recompute=self.recompute,
            zero=0
            if self.recompute == "auto"
            else None,  # else what saves memory may be to keep parts of parameters
            progress=False,
        )


@dataclass(frozen=True)
class Outcome:
    """Of one case: the worst error and of what, what was planned, the bytes that the fullest device
    had to do with, those that it would need to keep everything, and the seconds of a step that
    recomputes all it can."""

    worst: tuple[float, str]
    plan: autopar.Plan
    budget: float = math.inf
    keeping_all: float = 0.0
    again: float = 0.0


def check(
    name: str, batch: int, layers: int, cases: Sequence[Case], exactly: bool
) -> list[Outcome]:
    """One zoo model in each case; a rank's work. ``exactly``: small problems are solved to the end,
    which takes most of the time.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    found = []
    model, sample = getattr(zoo, name)(dtype=torch.float64, batch=batch, layers=layers)

    def planned(case: Case) -> tuple[Any, ...]:
        options, memory = case.options(batch), tuple[float, ...]()
        if case.recompute == "auto":
            memory = tight(model, sample, case, options)
            options["memory_budget"] = memory[0]
        return autopar.plan(model, sample, case.world_size, **options), *memory

    with (
        Double(),
        traced_once(),
        contextlib.nullcontext()
        if exactly
        else mock.patch.object(exact_plan, "solve_exactly", return_value=None),
    ):
        expected = step(copy.deepcopy(model), sample)
        plans = shared({repr(case): partial(planned, case) for case in cases})
        for case in cases:
            try:
                plan, *memory = plans[repr(case)]
                compiled = autopar.compile(
                    model, sample, case.world_size, plan=plan, progress=False
                )
                mine = step(compiled, sample)
            except Exception as e:
                raise AssertionError(f"{name}, {case}: {e}") from e
            found.append(
                Outcome(worst(differences(mine, own(expected, mine))), compiled.plan, *memory)
            )
    return found


def tight(
    model: torch.nn.Module, sample: Any, case: Case, options: dict[str, Any]
) -> tuple[float, float, float]:
    """Bytes that are enough if some is recomputed, and those that keeping everything takes; the
    same where recomputing saves none. Seconds of a step that recomputes all."""
    kept, again = (
        autopar.plan(model, sample, case.world_size, **options | dict(recompute=r))
        for r in ("none", "full")
    )
    most, least = max(kept.peak_memory), max(again.peak_memory)
    return least + ROOM * (most - least) if least < most else most, most, again.step_time


def run(
    ranks: Pools,
    name: str,
    batch: int,
    layers: int,
    cases: Sequence[Case],
    exactly: bool,
    timeout: float,
) -> None:
    (world_size,) = {case.world_size for case in cases}
    everywhere: list[list[Outcome]] = ranks(world_size).run(
        check, name, batch, layers, cases, exactly, timeout=timeout
    )
    for case, outcomes in zip(cases, zip(*everywhere, strict=True), strict=True):
        assert max(o.worst for o in outcomes) < (TOLERANCE, ""), (case, [o.worst for o in outcomes])
        plan, budget = outcomes[0].plan, outcomes[0].budget
        asked = (case.pipeline, case.schedule, case.chunks, case.microbatches, case.data)
        assert (
            plan.pipeline,
            plan.schedule,
            plan.chunks,
            plan.microbatches,
            plan.data_degree,
        ) == asked
        assert plan.mesh.get("tensor", 1) == case.tensor
        saves = bool(plan.recomputed)
        if budget < outcomes[0].keeping_all:  # to cut elsewhere may save memory, too, for less time
            saves = saves or plan.step_time < outcomes[0].again
        assert saves == (case.recompute == "full" or budget < outcomes[0].keeping_all), case
        assert max(plan.peak_memory) <= budget, case


# Each schedule, model, mode of recomputation and composition; the slow tests have all that goes
# together.
SOME: list[tuple[str, int, list[Case]]] = [
    ("gpt2", 16, [
        Case(2, "gpipe", 1, 1),
        Case(2, "1f1b", 1, 2, recompute="full"),
        Case(2, "interleaved-1f1b", 2, 4, recompute="auto"),
    ]),
    ("llama", 16, [
        Case(2, "zero-bubble", 1, 8, recompute="full"),
        Case(2, "zero-bubble", 2, 4, recompute="auto"),
    ]),
    ("t5", 12, [
        Case(2, "1f1b", 1, 6, recompute="auto"),
        Case(2, "interleaved-1f1b", 2, 2, recompute="full"),
    ]),
    ("vit", 20, [Case(2, "gpipe", 1, 5, recompute="auto"), Case(2, "zero-bubble", 1, 2)]),
    ("unet", 14, [Case(2, "interleaved-1f1b", 2, 2), Case(2, "1f1b", 1, 7, recompute="full")]),
    ("gpt2", 16, [
        Case(4, "zero-bubble", 1, 4, recompute="full"),
        Case(2, "1f1b", 1, 4, data=2, recompute="auto"),
    ]),
    ("llama", 16, [
        Case(2, "interleaved-1f1b", 2, 2, tensor=2, recompute="full"),
        Case(2, "gpipe", 1, 4, data=2),
    ]),
    ("t5", 12, [Case(2, "zero-bubble", 1, 3, tensor=2, recompute="auto")]),
    ("unet", 16, [Case(4, "1f1b", 1, 4), Case(2, "zero-bubble", 1, 4, data=2, recompute="full")]),
]  # fmt: skip


LONG = ("t5 on 2", "t5 on 4", "vit on 2", "llama on 2", "gpt2 on 4")


def _param(name: str, batch: int, cases: list[Case]) -> Any:
    label = f"{name} on {cases[0].world_size}"
    return pytest.param(name, batch, cases, id=label, marks=[pytest.mark.slow] * (label in LONG))


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize(("name", "batch", "cases"), [_param(*some) for some in SOME])
def test_some_plans_equal_one_device(
    ranks: Pools, name: str, batch: int, cases: list[Case]
) -> None:
    run(ranks, name, batch, FEW[name], cases, exactly=name in ("vit", "unet"), timeout=120)


def product(name: str, world_size: int) -> dict[int, list[Case]]:
    """All cases of a model on so many ranks, by batch: all that go together, on 4 ranks each with
    two of RECOMPUTE in turn and on 8 with one; MICROBATCHES in turn, as the schedule takes them."""
    found: dict[int, list[Case]] = {}
    turn = itertools.count()
    grids = [
        (p, d, t) for p in (2, 4, 8) for d in (1, 2) for t in (1, 2) if p * d * t == world_size
    ]
    for number, ((pipeline, data, tensor), (schedule, chunks), recompute) in enumerate(
        itertools.product(grids, RUNS, RECOMPUTE)
    ):
        its_turn = number // len(RECOMPUTE) % len(RECOMPUTE) == number % len(RECOMPUTE)
        if pipeline * chunks > PARTS.get(name, 10) or its_turn is {4: True, 8: False}.get(
            world_size
        ):
            continue
        counts = [m for m in MICROBATCHES[world_size] if fits(schedule, pipeline, m)]
        microbatches = counts[next(turn) % len(counts)]
        batch = 16 if 16 % (2 * microbatches) == 0 else 4 * microbatches
        found.setdefault(batch, []).append(
            Case(pipeline, schedule, chunks, microbatches, data, tensor, recompute)
        )
    return found


def fits(schedule: str, pipeline: int, microbatches: int) -> bool:
    if schedule == "gpipe":
        return True
    return microbatches >= pipeline and (
        schedule == "1f1b" or microbatches % (microbatches // pipeline) == 0
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_all_plans_equal_one_device(ranks: Pools, name: str, world_size: int) -> None:
    for batch, cases in product(name, world_size).items():
        run(ranks, name, batch, LAYERS[name], cases, exactly=False, timeout=600)
