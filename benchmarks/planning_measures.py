"""What ``benchmarks/planning.py`` times: a plan, further plans in one process, a refusal, a compile
on one rank of many, and a fixed workload that tells how fast the machine is.
"""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from autopar import Plan

EXPORTS = 10
COMPILE_PHASES = {  # the functions that autopar.compile calls, and what they do
    "run_on_all_ranks": "trace",
    "_graph_of_plan": "check",
    "_mesh_of_plan": "mesh",
    "lower": "lower",
    "_check_types": "types",
    "Compiled": "module",
}


@dataclass
class Measured:
    """What one row took.

    Attributes:
        seconds: the figure that has a target.
        phases: seconds of each phase.
        found: the plan, or what else came out, in words.
        plan: the step's seconds, the bytes of the fullest device and the gap; empty for a row that
            is not about one plan.
        report: the plan's report.
        peak: the most bytes that the process ever held.
    """

    seconds: float
    phases: dict[str, float]
    found: str
    plan: dict[str, float] = field(default_factory=dict)
    report: str = ""
    peak: int = 0

    def __post_init__(self) -> None:
        self.peak = self.peak or peak_bytes()


def peak_bytes() -> int:
    """The most memory this process ever held; the kernel counts in KiB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def plan_once(
    model: torch.nn.Module, sample: Any, world_size: int, cluster: str, options: dict[str, Any]
) -> Measured:
    """The first plan of this process."""
    import autopar

    start = time.perf_counter()
    plan = autopar.plan(model, sample, world_size, progress=False, cluster=cluster, **options)
    return _measured(time.perf_counter() - start, plan)


def _measured(seconds: float, plan: Plan) -> Measured:
    several = f", {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    shape = f"{plan.pipeline} x " * (plan.pipeline > 1) + " x ".join(map(str, plan.mesh_sizes))
    figures = dict(step_time=plan.step_time, memory=max(plan.peak_memory), gap=plan.gap)
    return Measured(seconds, _phases(plan, seconds), shape + several, figures, plan.report())


def _phases(plan: Plan, seconds: float) -> dict[str, float]:
    """Seconds of each phase; "other" is what no phase counts."""
    phases = {phase: took for phase, took in plan.timings.items() if phase != "total"}
    return phases | dict(other=seconds - sum(phases.values()))


def further_plans(
    model: torch.nn.Module,
    sample: Any,
    world_size: int,
    cluster: str,
    options: dict[str, Any],
    changes: Sequence[dict[str, Any]],
) -> Measured:
    """Plans after the first one, with one or two options changed: the slowest of them."""
    import autopar

    common: dict[str, Any] = dict(world_size=world_size, cluster=cluster) | options
    autopar.plan(model, sample, progress=False, **common)
    took, plans = [], []
    for change in changes:
        start = time.perf_counter()
        plans.append(autopar.plan(model, sample, progress=False, **common | change))
        took.append(time.perf_counter() - start)
    return _slowest(took, plans)


def sweep(
    model: torch.nn.Module,
    sample: Any,
    world_size: int,
    cluster: str,
    options: dict[str, Any],
    changes: Sequence[dict[str, Any]],
) -> Measured:
    """The configurations of a sweep after the first one: the slowest of them."""
    import autopar

    common: dict[str, Any] = dict(world_size=world_size, cluster=cluster) | options
    asked = [common, *(common | change for change in changes)]
    plans = []
    for outcome in autopar.sweep(model, sample, asked, progress=False)[1:]:
        if isinstance(outcome, autopar.AutoparError):
            raise outcome
        plans.append(outcome)
    return _slowest([plan.timings["total"] for plan in plans], plans)


def _slowest(took: Sequence[float], plans: Sequence[Plan]) -> Measured:
    seconds, plan = max(zip(took, plans, strict=True), key=lambda one: one[0])
    found = f"the slowest of {len(took)}, their median {statistics.median(took):.2f} s"
    return Measured(seconds, _phases(plan, seconds), found)


def refuse(
    model: torch.nn.Module, sample: Any, world_size: int, cluster: str, options: dict[str, Any]
) -> Measured:
    """The error for a memory budget that no plan meets.

    Raises:
        ValueError: there was a plan.
    """
    import autopar
    from autopar.errors import BudgetError

    start = time.perf_counter()
    try:
        autopar.plan(model, sample, world_size, progress=False, cluster=cluster, **options)
    except BudgetError as e:
        least = f", the least is {e.least / 2**30:.2f} GiB" if e.least else ""
        return Measured(time.perf_counter() - start, {}, f"refused{least}")
    raise ValueError(f"a plan meets {options}: give a smaller budget")


def compile_on_one_rank(
    model: torch.nn.Module, sample: Any, world_size: int, cluster: str, options: dict[str, Any]
) -> Measured:
    """What a given plan costs rank 0 of a process group that sends nothing. ``seconds`` are those
    of lowering and checking: all phases that need the plan.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import autopar

    plan = autopar.plan(model, sample, world_size, progress=False, cluster=cluster, **options)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    phases: dict[str, float] = {}
    other = copy.deepcopy(model)  # whose trace this process does not have yet
    try:
        with _timed_phases(phases):
            start = time.perf_counter()
            autopar.compile(other, sample, world_size, plan=plan, progress=False)
            total = time.perf_counter() - start
    finally:
        dist.destroy_process_group()
    after = sum(phases[name] for name in ("check", "mesh", "lower", "types", "module"))
    return Measured(after, phases, f"pipeline {plan.pipeline}, all of compile {total:.2f} s")


@contextmanager
def _timed_phases(phases: dict[str, float]) -> Iterator[None]:
    """Times the functions that ``autopar.compile`` calls. A phase inside another one counts for the
    outer one.
    """
    from autopar import api

    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()
                if not running:
                    phases[name] = phases.get(name, 0.0) + time.perf_counter() - start

        return call

    def run_alone(*works: tuple[str, Callable[[], Any]]) -> list[Any]:
        return [timed("verify", work)() for _, work in works]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(api, "run_distributed", run_alone))
        for name, phase in COMPILE_PHASES.items():
            stack.enter_context(mock.patch.object(api, name, timed(phase, getattr(api, name))))
        yield


def workload_seconds() -> float:
    """Ten exports of a four-layer GPT-2, after one that loads torch's exporter."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4))
        tokens = torch.empty(2, 64, dtype=torch.long)
    sample = dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)
    torch.export.export(model, (), sample, strict=False)
    start = time.perf_counter()
    for _ in range(EXPORTS):
        torch.export.export(model, (), sample, strict=False)
    return time.perf_counter() - start
