"""Plans of four ranks that are rehearsed, and the same ranks in real processes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import peaks
import torch
from equivalence import loss_of
from torch import nn

import autopar
from autopar.plan import Plan
from autopar.runtime.measure.rehearsal import Rehearsal, rehearsed_rows
from autopar.runtime.measure.step_recorder import WARM_UP, StepRecorder

RANKS, BATCH, STEPS = 4, 16, 8
TENSOR = dict(size=2, mode="1d")
PIPELINE = dict(micro_batch_size=2, schedule="1f1b")
PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=4), zero=0),
    "zero=3": dict(parallel=dict(data=4), zero=3),
    "offloaded": dict(parallel=dict(data=4), zero=dict(stage=1, offload="optimizer")),
    "tensor 1d": dict(parallel=dict(tensor=dict(size=4, mode="1d"))),
    "1f1b": dict(parallel=dict(pipeline=4), **PIPELINE),
    "1f1b, recomputed": dict(parallel=dict(pipeline=4), recompute="full", **PIPELINE),
    "data, recomputed": dict(parallel=dict(data=4), recompute="full"),
    "data, microbatches": dict(parallel=dict(data=4), micro_batch_size=1),
    "data x tensor": dict(parallel=dict(data=2, tensor=TENSOR)),
    "1f1b x tensor": dict(parallel=dict(pipeline=2, tensor=TENSOR), **PIPELINE),
    "interleaved": dict(
        parallel=dict(data=2, pipeline=dict(size=2, chunks=2)),
        micro_batch_size=2,
        schedule="interleaved-1f1b",
    ),
    "2d": dict(parallel=dict(tensor=dict(size=4, mode="2d"))),
    "rings": dict(parallel=dict(tensor=dict(size=4, mode="sequence", ring=4))),
}
SIZES: dict[str, dict[str, int]] = {
    "small": dict(WIDTH=64),
    "large": dict(WIDTH=256, VOCABULARY=2048, SEQUENCE=128),
}


def made(size: str = "small") -> tuple[nn.Module, dict[str, Any]]:
    """A GPT and its batch."""
    with torch.random.fork_rng(), mock.patch.multiple(peaks, **SIZES[size]):
        torch.manual_seed(0)
        model, sample = peaks.gpt2(BATCH)
    return model.train(), sample


def planned(name: str, size: str = "small") -> Plan:
    return autopar.plan(*made(size), RANKS, progress=False, **PLANS[name])


def real_peak(plan: Plan, size: str = "small") -> float:
    """On each rank: the most bytes that tensors hold in a step."""
    return peaks.peak(*made(size), RANKS, plan=plan)


class CpuSeconds:
    """A context in which steps are recorded in seconds of this thread on a core, so that other
    processes on the machine take nothing of it.
    """

    def __enter__(self) -> None:
        self._clock = mock.patch.object(StepRecorder, "_now", staticmethod(time.thread_time))
        self._clock.start()

    def __exit__(self, *_: object) -> None:
        self._clock.stop()


def rehearsed(plan: Plan, rank: int, size: str = "small") -> Rehearsal:
    torch.set_num_threads(1)
    with CpuSeconds():
        return plan.rehearse(*made(size), rank, steps=STEPS, progress=False)


def real_compute(plan: Plan, size: str = "small") -> float:
    """On each rank: the seconds that it computes in a step."""
    model, sample = made(size)
    with CpuSeconds():
        compiled = autopar.compile(model, sample, RANKS, plan=plan, progress=False, verify=False)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.0)
        for _ in range(WARM_UP + STEPS + 1):
            loss = loss_of(compiled(**sample))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        rank = compiled.mesh.pipeline_rank
        times = compiled.mesh.recorder.times(rank, range(rank, len(plan.stages), plan.pipeline), 0)
    return sum(r.measured for r in rehearsed_rows(plan, 0, times, {}) if r.what == "total")
