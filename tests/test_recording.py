"""What recording leaves out, and that the training stays the same; memory, and times of a GPU."""

from __future__ import annotations

import copy
import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import full, loss_of
from frontier import peak_bytes
from naps import STEPS, compiled_gpt2, train
from pool import Pools

import autopar
from autopar.errors import RunError
from autopar.runtime.measure.step_recorder import EVERY, FIRST, WARM_UP, StepRecorder

pytestmark = pytest.mark.alone


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
    """The time of recording as a share of a step, on average over many steps: the number of marks
    times the cost of one, in a step that is recorded and in nine that are not.
    """
    compiled, sample = compiled_gpt2(parallel=dict(tensor=dict(size=2, mode="1d")))
    train(compiled, lambda _: sample)
    recorder = compiled.mesh.recorder
    compiled(**sample).loss.backward()
    assert recorder._open is not None
    parts = len(recorder._open.parts)
    assert parts > 8
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(20):
        for is_on, took in seconds.items():
            other = StepRecorder(torch.device("cpu"))
            other.is_on = is_on
            other.begin(True)
            start = time.process_time()
            for _ in range(100):
                other.end_compute(other.begin_compute("backward"))
            other.begin(True)
            took.append((time.process_time() - start) / 100)
    recorded, not_recorded = (statistics.median(took) for took in seconds.values())
    mean = (recorded + (EVERY - 1) * not_recorded) / EVERY
    return parts * mean / recorder.times(0, [0], None).seconds["step"]


def test_recording_takes_at_most_three_thousandths_of_a_step(ranks: Pools) -> None:
    assert max(ranks(2).run(_cost)) < 0.003


def _steps(recorder: StepRecorder, count: int, evaluate: int = 0) -> list[bool]:
    """Whether each of ``count`` steps makes marks. Every ``evaluate``-th is followed by a call that
    does not train.
    """
    marked = []
    for number in range(1, count + 1):
        recorder.begin(True)
        since = recorder.begin_compute("backward")
        recorder.end_compute(since)
        marked.append(since is not None)
        if evaluate and number % evaluate == 0:
            recorder.begin(False)
    return marked


def test_every_tenth_step_is_recorded_after_the_first() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    marked = _steps(recorder, 53)
    first = WARM_UP + FIRST
    assert [i for i, found in enumerate(marked) if found] == [*range(first), 21, 31, 41, 51]
    assert recorder.steps == FIRST + 4
    assert len(recorder._steps) == first + 4


def test_steps_before_an_evaluation_are_not_the_only_ones_that_are_due() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    _steps(recorder, 200, evaluate=EVERY)
    assert recorder.steps > FIRST + 10


def test_recording_is_switched_off() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.is_on = False
    assert not any(_steps(recorder, 30))
    recorder.is_on = True
    assert all(_steps(recorder, 5))
    assert recorder.steps == 2  # the step before was not recorded, and the last has no end


def _switched_off() -> None:
    compiled, sample = compiled_gpt2()
    compiled.recording = False
    train(compiled, lambda _: sample)
    assert copy.deepcopy(compiled).recording is compiled.recording is False
    with pytest.raises(RunError, match=r"has seen 0: .* with compiled.recording = True"):
        compiled.compare()


def test_the_switch_of_a_compiled_model_and_of_its_copy(ranks: Pools) -> None:
    ranks(1).run(_switched_off)


def test_statistics_of_a_gpus_memory_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: events and the statistics are stood in for."""
    cuda = mock.MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 2000.0
    cuda.max_memory_allocated.return_value = 77
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = StepRecorder(torch.device("cuda", 0))
    _steps(recorder, 9)
    times = recorder.times(0, [0], None)
    assert (times.nbytes, times.seconds["step"], times.stages[0]["backward"]) == (77, 2.0, 2.0)
    used = {name.partition(".")[0] for name, *_ in cuda.method_calls if "()" not in name}
    assert used == {"Event", "current_stream", "max_memory_allocated"}


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
