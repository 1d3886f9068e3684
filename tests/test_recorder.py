"""Measured times: naps of known length are found in the parts of the step that they are in, and
recording does not change the training.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import handmade
import pytest
import staged
import torch
import torch.distributed as dist
import zoo
from equivalence import full, loss_of
from frontier import peak_bytes
from pool import Pools
from staged import Case

import autopar
from autopar import Comparison, Plan
from autopar.cost_model import simulate_schedule
from autopar.errors import RunError
from autopar.runtime.communication import collectives
from autopar.runtime.measure.step_recorder import StepRecorder

pytestmark = pytest.mark.alone

SLACK = 0.1  # seconds that tiny models and a busy machine add to a nap
STEPS = 7


class Nap(torch.autograd.Function):
    """The same tensor after some seconds; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


def nap(x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    return Nap.apply(x, forward, backward)


def insert_nap(program: torch.fx.GraphModule, forward: float, backward: float) -> None:
    """Inserts a nap after the first product of a program, whose result needs a gradient."""
    names = ("linear", "addmm", "mm", "matmul")
    node = next(
        n
        for n in program.graph.nodes
        if n.op == "call_function" and any(name in str(n.target) for name in names)
    )
    with program.graph.inserting_after(node):
        later = program.graph.call_function(nap, (node, forward, backward))
    node.replace_all_uses_with(later, delete_user_cb=lambda user: user is not later)
    program.recompile()


def train(
    model: torch.nn.Module,
    batches: Callable[[int], dict[str, Any]],
    steps: int = STEPS,
    between: float = 0.0,
) -> None:
    optimizer = Slow(model.parameters(), between)
    for number in range(steps):
        loss_of(model(**batches(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(between)


class Slow(torch.optim.SGD):
    """An optimizer whose step sleeps half as long as the loop sleeps between steps."""

    def __init__(self, parameters: Any, between: float) -> None:
        super().__init__(parameters, lr=0.01)
        self.between = between

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.between / 2)
        return super().step(closure)


def about(measured: float | None, slept: float) -> None:
    assert measured is not None
    assert slept <= measured <= slept + SLACK, (slept, measured)


def seconds_of(found: Comparison) -> dict[tuple[str, str], float | None]:
    return {(row.where, row.what): row.measured for row in found.rows}


def compiled_gpt2(**options: Any) -> tuple[autopar.Compiled, dict[str, Any]]:
    model, sample = zoo.gpt2()
    return autopar.compile(model, sample, dist.get_world_size(), progress=False, **options), sample


# -- what is measured ------------------------------------------------------------------------------


def _one() -> None:
    compiled, sample = compiled_gpt2()
    insert_nap(compiled._lowered.train, 0.06, 0.12)
    train(compiled, lambda _: sample, between=0.18)
    found = compiled.compare()
    took = seconds_of(found)
    about(took["stage 0", "forward"], 0.06)
    about(took["stage 0", "backward"], 0.12)
    about(took["step", "compute"], 0.18)
    about(took["step", "optimizer"], 0.09)
    about(took["step", "other"], 0.18)
    about(took["step", "total"], 0.06 + 0.12 + 0.09 + 0.18)
    assert found.steps == STEPS - 3  # two steps warm up, and the last one has no end
    assert found.predicted["total"] == pytest.approx(compiled.plan.step_time)
    assert sum(v for k, v in found.measured.items() if k != "total") == pytest.approx(
        found.measured["total"]
    )
    assert took["rank 0", "peak memory"] is None
    assert "memory was not measured" in str(found)


def test_a_forward_a_backward_an_optimizer_and_the_rest(ranks: Pools) -> None:
    ranks(1).run(_one)


def _a_subclass_after_its_base() -> None:
    torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], lr=0.1
    )  # from now on torch calls hooks for SGD.step, called by Slow.step too
    _one()


def test_an_optimizer_that_calls_the_step_of_its_base_is_measured_whole(ranks: Pools) -> None:
    ranks(1).run(_a_subclass_after_its_base)


def _in_parts() -> None:
    compiled, sample = compiled_gpt2(micro_batch_size=4)
    assert compiled.plan.microbatches == 2
    insert_nap(compiled._lowered.train, 0.03, 0.06)
    train(compiled, lambda _: sample)
    took = seconds_of(compiled.compare())
    about(took["stage 0", "forward"], 2 * 0.03)
    about(took["stage 0", "backward"], 2 * 0.06)


def test_microbatches_add_up(ranks: Pools) -> None:
    ranks(1).run(_in_parts)


def _conversion() -> None:
    compiled = handmade.build("columns")
    # The only conversion of the forward; the backward has none.
    own = collectives._MOVEMENTS["P", "I"]

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.08)
        return own(*args)

    with mock.patch.dict(collectives._MOVEMENTS, {("P", "I"): slow}):
        train(compiled, handmade.batch)
    (took,) = compiled.mesh.recorder.times(0, [0], None).stages.values()
    about(took["forward conversions"], 0.08)
    about(took["forward"], 0.08)
    about(took["backward conversions"], 0.0)
    about(took["backward"], 0.0)


def test_a_conversion(ranks: Pools) -> None:
    ranks(2).run(_conversion)


def _synchronisation() -> dict[str, float]:
    compiled = handmade.build("data")
    insert_nap(compiled._lowered.train, 0.0, 0.1 * dist.get_rank())
    train(compiled, handmade.batch)
    times = compiled.mesh.recorder.times(0, [0], None)
    return {**times.seconds, **times.stages[0]}


def test_who_is_done_first_waits_for_the_others_gradients(ranks: Pools) -> None:
    first, second = ranks(2).run(_synchronisation)
    about(
        first["gradient synchronisation"], 0.1 - 0.01
    )  # less the time between the beginnings of the ranks' backwards
    about(first["backward"], 0.0)
    about(second["gradient synchronisation"], 0.0)
    about(second["backward"], 0.1)


def _pipelined(forward: float, backward: float, microbatches: int) -> tuple[Comparison, str, Plan]:
    model, sample = zoo.gpt2()
    case = Case(2, "1f1b", options=dict(micro_batch_size=2))
    plan = staged.staged_plan(model, sample, 2, case.pipeline, case.schedule, **case.options)
    compiled = autopar.compile(model, sample, 2, plan=plan)
    assert compiled.plan.microbatches == microbatches
    if compiled.mesh.pipeline_rank == 1:
        insert_nap(
            compiled._runner.stages.programs([stage.train for stage in compiled._lowered.stages])[
                0
            ],
            forward,
            backward,
        )
    train(compiled, lambda _: sample)
    found = compiled.compare(sample)
    return found, str(found), plan


def test_the_stages_of_a_pipeline(ranks: Pools) -> None:
    forward, backward, microbatches = 0.02, 0.04, 4
    (found, text, plan), (other, _, _) = ranks(2).run(_pipelined, forward, backward, microbatches)
    assert other == found  # the same on every rank
    took = seconds_of(found)
    about(took["stage 0", "forward"], 0.0)
    about(took["stage 0", "backward"], 0.0)
    about(took["stage 1", "forward"], microbatches * forward)
    about(took["stage 1", "backward"], microbatches * backward)
    line = simulate_schedule(
        "1f1b", 2, 1, microbatches, [0.0, forward], [0.0, backward]
    )  # the naps alone
    waits = line.ends[0][-1] - line.busy[0]
    assert waits == pytest.approx(microbatches * (forward + backward))
    about(took["rank 0", "waiting"], waits - 0.01)  # the rank does not wait while stage 0 computes
    about(took["rank 1", "waiting"], 0.0)
    about(
        found.measured["compute"], microbatches * (forward + backward)
    )  # those of the rank with the most work
    predicted = {(row.where, row.what): row.predicted for row in found.rows}
    assert predicted["stage 1", "forward"] == pytest.approx(
        microbatches * plan.stages[1].seconds["forward"]
    )
    assert [predicted[f"rank {r}", "peak memory"] for r in (0, 1)] == list(plan.peak_memory)
    assert "stage 1" in text
    assert "waiting: for other ranks" in text


# -- what does not count ---------------------------------------------------------------------------


def _others() -> None:
    compiled, sample = compiled_gpt2()
    train(compiled, lambda _: sample, 3)
    recorder = compiled.mesh.recorder
    assert recorder.steps == 0
    with torch.no_grad():
        compiled(**sample)
    compiled.eval()
    for _ in range(5):
        compiled(**sample).loss.backward()
    compiled.train()
    for _ in range(4):
        compiled(**sample)  # without a backward
    assert recorder.steps == 0
    with pytest.raises(
        RunError,
        match=r"needs 3 steps after 2 that warm up, rank 0 of 1 has seen 0: call it after 6 or "
        r"more",
    ):
        compiled.compare()
    train(
        compiled, lambda _: sample, 5
    )  # the first step after a lone forward does not count, and the last one has no end
    assert recorder.steps == 3
    assert compiled.compare().steps == 3


def test_evaluation_and_lone_forwards_do_not_count(ranks: Pools) -> None:
    ranks(1).run(_others)


def _two_few() -> None:
    compiled, sample = compiled_gpt2(parallel=dict(data=2))
    train(compiled, lambda _: sample, 4)
    if dist.get_rank() == 0:
        compiled.mesh.recorder._ended += 5
    with pytest.raises(RunError, match=r"rank 1 of 2 has seen 1: call it after 6"):
        compiled.compare()


def test_all_ranks_hear_that_one_has_seen_too_few_steps(ranks: Pools) -> None:
    ranks(2).run(_two_few)


# -- the training stays as it is -------------------------------------------------------------------


def _history(recorded: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    """Losses, gradients and parameters of a run with dropout. If ``recorded``, the run is recorded,
    and its memory is measured between a backward and an optimizer step.
    """
    model, sample = zoo.gpt2(dropout=0.1)
    torch.manual_seed(0)
    compiled = autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    history = []
    with nullcontext() if recorded else compiled.mesh.recorder.paused():
        for number in range(8):
            loss = loss_of(compiled(**sample))
            loss.backward()
            if recorded and number == 6:
                compiled.compare(sample)
            history += [
                loss.detach().clone(),
                *(full(p.grad).clone() for p in compiled.parameters() if p.grad is not None),
            ]
            optimizer.step()
            optimizer.zero_grad()
    return [
        torch.as_tensor(t)
        for t in (
            *history,
            *(full(p).detach().clone() for p in compiled.parameters()),
            *compiled.buffers(),
        )
    ]


def _alike(options: dict[str, Any]) -> None:
    without, recorded = _history(False, options), _history(True, options)
    assert len(without) == len(recorded) > 8
    assert all(torch.equal(a, b) for a, b in zip(without, recorded, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        dict(parallel=dict(data=2), zero=2, micro_batch_size=2),
        dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
        dict(parallel=dict(pipeline=2), micro_batch_size=4),
    ],
    ids=["zero", "tensor", "pipeline"],
)
def test_losses_gradients_and_parameters_are_the_same_to_the_bit(
    ranks: Pools, options: dict[str, Any]
) -> None:
    ranks(2).run(_alike, options)


def _cost() -> float:
    """The time of recording as a share of a step: the number of parts times the cost of one."""
    compiled, sample = compiled_gpt2(parallel=dict(tensor=dict(size=2, mode="1d")))
    train(compiled, lambda _: sample)
    recorder = compiled.mesh.recorder
    compiled(**sample).loss.backward()
    assert recorder._open is not None
    parts = len(recorder._open.parts)
    assert parts > 8
    took = []
    other = StepRecorder(torch.device("cpu"))
    for _ in range(20):
        other.begin(True)
        start = time.perf_counter()
        for _ in range(100):
            other.end_compute(other.begin_compute("backward"))
        other.begin(True)
        took.append((time.perf_counter() - start) / 100)
    return parts * statistics.median(took) / recorder.times(0, [0], None).seconds["step"]


def test_recording_takes_less_than_a_hundredth_of_a_step(ranks: Pools) -> None:
    assert max(ranks(2).run(_cost)) < 0.01


def _memory() -> None:
    compiled, sample = compiled_gpt2()
    optimizer = torch.optim.AdamW(compiled.parameters())

    def step() -> None:
        loss_of(compiled(**sample)).backward()

    for _ in range(STEPS):
        step()
        optimizer.step()
        optimizer.zero_grad()
    kept = [
        *compiled.parameters(),
        *compiled.buffers(),
        *(t for s in optimizer.state.values() for t in s.values()),
    ]
    allocated = peak_bytes(step)
    for p in compiled.parameters():
        p.grad = None
    (row,) = (row for row in compiled.compare(sample).rows if row.what == "peak memory")
    expected = sum(t.nbytes for t in (*kept, *sample.values())) + allocated
    assert row.measured == pytest.approx(
        expected, rel=0.001
    )  # all bytes that torch's allocator hands out, according to torch's profiler
    assert row.predicted == pytest.approx(expected, rel=0.01)


def test_memory_of_a_step_on_a_cpu(ranks: Pools) -> None:
    ranks(1).run(_memory)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_times_and_memory_of_a_gpu() -> None:
    """A kernel of known length, and memory of known size."""
    recorder, device = StepRecorder(torch.device("cuda", 0)), torch.device("cuda", 0)
    cycles = 100_000_000

    def nap() -> None:
        torch.cuda._sleep(cycles)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    nap()
    start.record(), nap(), end.record()
    torch.cuda.synchronize()
    slept = start.elapsed_time(end) / 1e3
    for _ in range(STEPS):
        recorder.begin(True)
        since = recorder.begin_compute("forward")
        nap()
        recorder.end_compute(since)
        since = recorder.begin_compute("backward")
        held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        recorder.end_compute(since)
        del held
    times = recorder.times(0, [0], None)
    assert times.stages[0]["forward"] == pytest.approx(slept, rel=0.1)
    assert times.nbytes is not None
    assert times.nbytes >= 64 << 20
