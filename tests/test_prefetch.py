"""Prefetch: a ZeRO bucket is gathered while the one before is in use, forward and backward, and
gradients are summed while the backward goes on.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import link_events
import peaks
import pytest
import torch
import zoo
from equivalence import loss_of
from link_events import LinkEvents, played
from pool import Pools
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan

LAYERS = 8
ZERO3 = dict(parallel=dict(data=2), zero=3)
PRODUCTS = ("mm", "addmm", "bmm")


def model(dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, dict[str, Any]]:
    return zoo.gpt2(dtype=dtype, layers=LAYERS)


Event = tuple[str, str]  # "start" or "end" of a collective, or a "product"
GATHER, SUM = "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"


class Order(TorchDispatchMode):
    """Records the order of a program: where the collectives of buckets start and end, and any
    number of matrix products between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._arriving: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        name = f.__name__.partition(".")[0]
        if name in (GATHER, SUM):
            started = name, len(self.events)
            self._arriving |= dict.fromkeys(map(torch.Tensor.data_ptr, out), started)
            self.events.append(("start", name))
        elif name == "wait_tensor":
            ended = self._arriving.pop(args[0].data_ptr(), None)
            if ended is not None and ended not in self._arriving.values():
                self.events.append(("end", ended[0]))
        elif name in PRODUCTS and self.events[-1:] != [("product", "")]:
            self.events.append(("product", ""))
        return out


def recorded(plan: Plan) -> tuple[list[Event], list[Event]]:
    """The order of a forward, and of its backward."""
    net, sample = model()
    compiled = autopar.compile(net, sample, plan.world_size, plan=plan, progress=False)
    with Order() as order:
        loss = loss_of(compiled(**sample))
        forward, order.events = order.events, []
        loss.backward()
    return forward, order.events


def under_way(events: list[Event], collective: str) -> list[int]:
    """How many collectives of a kind are under way at each group of products."""
    found, now = [], 0
    for what, kind in events:
        now += {"start": 1, "end": -1, "product": 0}[what] * (kind == collective)
        assert now in (0, 1)
        found += [now] * (what == "product")
    assert now == 0
    return found


def test_the_next_bucket_is_gathered_while_one_is_in_use(ranks: Pools) -> None:
    plan = autopar.plan(*model(), 2, **ZERO3, recompute="full", progress=False)
    assert plan.prefetch == 1
    assert "prefetch 1: each ZeRO bucket is gathered while the one before" in plan.report()
    orders = ranks(2).run(recorded, plan)
    assert orders[0] == orders[1]  # the ranks' collectives match
    forward, backward = orders[0]
    # No bucket comes behind the last block's in the forward, and the first block's in the backward.
    assert under_way(forward, GATHER)[:LAYERS] == [1] * LAYERS
    assert sum(under_way(backward, GATHER)) >= LAYERS - 1
    # The sums of a block's gradients end when the block before has its gradients.
    assert sum(under_way(backward, SUM)) >= LAYERS - 1
    at_need = ranks(2).run(recorded, dataclasses.replace(plan, prefetch=0))
    assert at_need[0] == at_need[1]
    for events, other in zip(at_need[0], orders[0], strict=True):
        for collective in (GATHER, SUM):
            assert set(under_way(events, collective)) == {0}
            assert events.count(("start", collective)) == other.count(("start", collective))


def steps_of(plans: list[Plan], folder: str) -> list[list[list[link_events.Event]]]:
    """The link's events of steps of each plan, which take turns."""
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
    warnings.filterwarnings("ignore", module="torch")  # of its own parts
    net, sample = zoo.gpt2(batch=16, layers=LAYERS)

    def step(compiled: torch.nn.Module) -> None:
        loss_of(compiled(**sample)).backward()

    programs = []
    for plan in plans:
        programs.append(autopar.compile(net, sample, plan.world_size, plan=plan, progress=False))
        step(programs[-1])  # which inductor compiles
    with LinkEvents() as link:
        turns = [[link.of(partial(step, compiled)) for compiled in programs] for _ in range(8)]
    return [*map(list, zip(*turns, strict=True))]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_slow_link_is_hidden(ranks: Pools, tmp_path: Path, backend: str) -> None:
    """The latency of the link is about what a block computes, so that a step at need waits for it
    about as long as it computes.
    """
    net, sample = zoo.gpt2(batch=16, layers=LAYERS)
    options = dict(ZERO3, recompute="full", backend=backend, progress=False)
    plan = autopar.plan(net, sample, 2, **options)
    assert plan.prefetch == 1
    plans = [dataclasses.replace(plan, prefetch=depth) for depth in (0, 1)]
    one, other = ranks(2).run(steps_of, plans, str(tmp_path), timeout=600)
    at_need, ahead = (list(zip(*steps, strict=True)) for steps in zip(one, other, strict=True))
    computes = statistics.median(played(step, 0.0, math.inf) for step in at_need)
    latency = computes / (3 * LAYERS)
    seconds = [
        statistics.median(played(step, latency, math.inf) for step in steps)
        for steps in (at_need, ahead)
    ]
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_memory_counts_the_bucket_that_is_gathered_ahead(ranks: Pools, recompute: str) -> None:
    """Where the budget has no room for it, each is gathered where it is read."""
    net, sample = peaks.made("gpt2", 4)
    options = dict(ZERO3, recompute=recompute, progress=False)
    ahead = autopar.plan(net, sample, 2, **options)
    block = max(net.transformer.h[0].parameters(), key=torch.Tensor.numel).nbytes
    plans = [ahead]
    if recompute == "full":
        budget = max(ahead.peak_memory) - 1000
        plans.append(at_need := autopar.plan(net, sample, 2, **options, memory_budget=budget))
        assert (ahead.prefetch, at_need.prefetch) == (1, 0)
        assert at_need.zero_buckets == ahead.zero_buckets
        assert max(at_need.peak_memory) <= max(ahead.peak_memory) - block
        assert "prefetch 0: each ZeRO bucket is gathered where it is" in at_need.report()
    for plan in plans:
        assert ranks(2).run(peaks.measured, plan, "gpt2", 4) == pytest.approx(
            [plan.peak_memory[0]] * 2, rel=1e-3
        )


def staged(plan: Plan) -> tuple[float, float]:
    """The error of the loss of a pipeline, and the largest of a gradient of this rank."""
    net, sample = model()
    single, _ = model()
    single.load_state_dict(net.state_dict())
    compiled = autopar.compile(net, sample, plan.world_size, plan=plan, progress=False)
    loss, expected = loss_of(compiled(**sample)), loss_of(single(**sample))
    loss.backward()
    expected.backward()
    whole = {name: p.grad for name, p in single.named_parameters()}
    errors = [
        float((p.grad.full_tensor() - whole[name]).abs().max())
        for name, p in compiled.named_parameters()
    ]
    return float(loss.detach() - expected.detach()), max(errors)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_prefetch_their_own_buckets(ranks: Pools, schedule: str) -> None:
    options = dict(parallel=dict(data=2, pipeline=2), zero=3, schedule=schedule, recompute="full")
    plan = autopar.plan(*model(), 4, **options, micro_batch_size=1, progress=False)
    assert (plan.prefetch, plan.schedule) == (1, schedule)
    for loss, gradient in ranks(4).run(staged, plan):
        assert abs(loss) < 1e-6  # GPT-2's loss is float32
        assert gradient < 1e-8


def evaluated(plan: Plan) -> float:
    net, sample = model()
    compiled = autopar.compile(net, sample, plan.world_size, plan=plan, progress=False).eval()
    with torch.no_grad():
        return float(loss_of(compiled(**sample)) - loss_of(net.eval()(**sample)))


def test_evaluation_prefetches(ranks: Pools) -> None:
    plan = autopar.plan(*model(), 2, **ZERO3, progress=False)
    assert plan.prefetch == 1
    assert all(abs(each) < 1e-6 for each in ranks(2).run(evaluated, plan))


def test_a_depth_that_no_program_has_is_refused() -> None:
    plan = autopar.plan(*model(), 2, **ZERO3, progress=False)
    with pytest.raises(PlanError, match="prefetch 2: give 0 or 1"):
        dataclasses.replace(plan, prefetch=2)
