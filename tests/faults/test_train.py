"""``examples/train.py`` under torchrun survives faults: it ends with the loss of one process, loses
no more than the steps since the last checkpoint, and leaves no process behind.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from conftest import Row
from launched import MODEL, RENDEZVOUS, Launch, free_port, read_lines, row_of, steps, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, EVERY = 60, 5
ARGUMENTS = ["--steps", str(STEPS), "--save-every", str(EVERY), "--timeout", "20"]
PIPED = ["--options", '{"parallel": {"pipeline": 2}, "micro_batch_size": 4}']
DATA = ["--options", '{"zero": 2}']
ROUNDING = 1e-4  # float32, amplified by 40 steps

# Phase, how often it begins in a start of the run before the fault, what happens to which rank; and
# the phase that the other rank tells.
FAULTS: list[tuple[str, int, str, str, str]] = [
    ("compile", 1, "dies", "1", ""),  # the agent ends ranks that do not train yet
    ("forward", 17, "dies", "1", r"call \d+: forward of stage 1"),
    ("forward", 17, "dies", "0", r"call \d+: forward of stage 0"),
    ("backward", 17, "dies", "1", r"call \d+: backward of stage 1"),
    ("optimizer step", 8, "dies", "1", "optimizer step, after call 8"),
    ("checkpoint", 2, "dies", "1", "writes the checkpoint .*step-"),
    ("optimizer step", 8, "torn", "1", "optimizer step, after call 8"),
    ("forward", 17, "stops", "1", r"call \d+: forward of stage 1"),
    ("checkpoint", 1, "full disk", "1", ""),
]


@pytest.fixture(scope="module")
def loss_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The held-out loss of an ordinary loop without autopar."""
    folder = str(tmp_path_factory.mktemp("alone"))
    options = train.arguments(["--folder", folder, *MODEL, *ARGUMENTS])
    trained, held_out = train.texts(options)
    model = train.new_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=STEPS)
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(0))
    for indices in order[: STEPS * options.batch].view(STEPS, options.batch):
        model(**_batch([trained[int(i)] for i in indices])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(**_batch([held_out[i] for i in range(len(held_out))])).item()


def _batch(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def check_end(folder: Path, expected: float) -> None:
    """The run did each step, and ends with the loss of one process."""
    assert {line["step"] for line in steps(folder)} == set(range(1, STEPS + 1))
    found = [line for line in read_lines(folder / "run" / "metrics.jsonl") if "held_out" in line]
    assert found[-1]["step"] == STEPS
    assert found[-1]["held_out"] == pytest.approx(expected, abs=ROUNDING)


def test_faults_of_a_rank(tmp_path: Path, loss_of_one_process: float, rows: list[Row]) -> None:
    faults = [fault[:4] for fault in FAULTS]
    restarts = len(faults)
    more = ("--standalone", f"--max-restarts={restarts}")
    launch = Launch(tmp_path, [*ARGUMENTS, *PIPED], faults, *more)
    try:
        assert launch.wait(800) == 0, launch.text[-50000:]
        assert launch.left_behind() == []
    finally:
        launch.kill()
    check_end(tmp_path, loss_of_one_process)
    told = read_lines(tmp_path / "faults.jsonl")
    assert [line["start"] for line in told] == list(range(len(faults)))
    for line, (*_, what, rank, named) in zip(told, FAULTS, strict=True):
        row = row_of(line["fault"], launch, line["time"])
        rows.append(row)
        assert row[1] <= (0 if what == "full disk" else 2 * EVERY), row
        if named:
            error = rf"rank {1 - int(rank)}: RunError: rank {rank} of 2 .*{named}"
            assert re.search(error, launch.text), error
    assert "goes on without a new checkpoint" in launch.text
    assert "others are not whole" in launch.text


@pytest.mark.exhaustive  # make faults runs it
def test_a_node_that_does_not_come_back(
    tmp_path: Path, loss_of_one_process: float, rows: list[Row]
) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    more = ("--rdzv-backend=c10d", endpoint, "--rdzv-id=1", "--nnodes=1:2", "--max-restarts=3")
    arguments = [*ARGUMENTS, *DATA]
    first, second = (  # the first one keeps the rendezvous
        Launch(tmp_path, arguments, [], *more, f"--rdzv-conf=is_host={n},{RENDEZVOUS}", ranks=1)
        for n in (1, 0)
    )
    try:
        wait_for_step(tmp_path, EVERY + 2)
        at = time.time()
        second.kill()
        assert first.wait() == 0, first.text[-50000:]
        assert first.left_behind() == second.left_behind() == []
    finally:
        first.kill()
        second.kill()
    check_end(tmp_path, loss_of_one_process)
    rows.append(row := row_of("a node is gone: 2 ranks, then 1", first, at))
    assert row[1] <= 2 * EVERY


@pytest.mark.exhaustive  # make faults runs it
def test_a_scheduler_ends_the_run(
    tmp_path: Path, loss_of_one_process: float, rows: list[Row]
) -> None:
    launch = Launch(tmp_path, [*ARGUMENTS, *DATA], [], "--standalone", "--max-restarts=3")
    try:
        wait_for_step(tmp_path, EVERY + 2)
        at = time.time()
        launch.process.send_signal(signal.SIGTERM)
        launch.wait()
        assert launch.left_behind() == []
        ended = time.time()
        again = Launch(tmp_path, [*ARGUMENTS, *DATA], [], "--standalone")
        assert again.wait() == 0, again.text[-5000:]
    finally:
        launch.kill()
    check_end(tmp_path, loss_of_one_process)
    name, lost, _, seconds = row_of("SIGTERM, and started again", launch, at)
    rows.append((name, lost, ended - at, seconds))
    assert lost == 0
