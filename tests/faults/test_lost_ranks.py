"""Where one rank dies or stops, in whatever phase, every other rank raises an error within the
timeout, which names the rank and the phase.
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import die, inject, stop
from pool import CONTEXT
from test_desync import Network, batch, usual

import autopar

RANKS, LOST = 3, 1
TIMEOUT = 24.0
PIPED = dict(parallel=dict(pipeline=3), micro_batch_size=4)
DATA = dict(parallel=dict(data=3))
ADDRESS = re.compile(r"\[[0-9a-f.:]+\]:\d+|\d+\.\d+\.\d+\.\d+")

# Options, what rank 1 does in which phase, and the phase that the others tell of it.
CASES: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "dies in compile": (PIPED, die, "compile", "compile: checking the plan"),
    "dies in making groups": (PIPED, die, "making groups", "compile"),
    "dies in forward": (PIPED, die, "forward", "call 1: forward of stage 1"),
    "dies in backward of a stage": (PIPED, die, "backward", "call 1: backward of stage 1"),
    "dies in backward": (DATA, die, "backward", "backward, after call 1"),
    "dies in optimizer step": (DATA, die, "optimizer step", "optimizer step, after call 1"),
    "dies in checkpoint": (DATA, die, "checkpoint", "writes the checkpoint .*step-1"),
    "stops in compile": (DATA, stop, "compile", "compile: checking the plan"),
    "stops in making groups": (PIPED, stop, "making groups", "compile"),
    "stops in forward": (PIPED, stop, "forward", "call 1: forward of stage 1"),
    "stops in checkpoint": (DATA, stop, "checkpoint", "writes the checkpoint .*step-1"),
}
FAST = ("dies in forward",)


def train(
    case: str, rank: int, port: int, folder: str, told: Connection, device: str = "cpu"
) -> None:
    """One rank. Tells the time before the fault, and its error."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options, action, phase, _ = CASES[case]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=10 * TIMEOUT)
    join: dict[str, Any] = dict(store=store, rank=rank, world_size=RANKS, timeout=limit)
    if device == "cuda":
        own = torch.device("cuda", rank % torch.cuda.device_count())
        dist.init_process_group("nccl", device_id=own, **join)
    else:
        dist.init_process_group("gloo", **join)
    if rank == LOST:

        def tell() -> None:
            told.send(("fault", time.monotonic()))

        inject(phase, 1, lambda: action(tell))
    try:
        _run(options, Path(folder), device)
        told.send(("nobody noticed", time.monotonic()))
    except autopar.RunError as error:
        told.send((str(error), time.monotonic()))


def _run(options: dict[str, Any], folder: Path, device: str) -> None:
    sample = {name: torch.cat([x, x[:4]]).to(device) for name, x in batch(0).items()}
    options = options | dict(timeout=TIMEOUT, progress=False)
    if device == "cuda":
        options |= dict(cluster="h100-sxm", backend="eager")
    compiled = autopar.compile(Deep().to(device), sample, RANKS, **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(1, 4):
        usual(compiled, optimizer, sample)
        compiled.save(folder / f"step-{step}", optimizer=optimizer)
    compiled.finish_save()


class Deep(Network):
    """Three layers, for three stages."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.second(x).tanh(), y)


def errors_of(
    case: str, folder: Path, device: str = "cpu"
) -> tuple[float, dict[int, tuple[str, float]]]:
    """When the fault happened, and the error of each other rank with its time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, processes = {}, []
    for rank in range(RANKS):
        mine, its = CONTEXT.Pipe()
        given = case, rank, store.port, str(folder), its, device
        process = CONTEXT.Process(target=train, args=given)
        process.start()
        its.close()
        here[mine] = rank
        processes.append(process)
    begun, errors = 0.0, {}
    try:
        while len(errors) < RANKS - 1:
            ready = wait([c for c, rank in here.items() if rank not in errors], 120)
            assert ready, f"ranks wait for ever; {errors}"
            for connection in ready:
                rank = here[connection]  # type: ignore[index]
                try:
                    text, at = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    del here[connection]  # type: ignore[arg-type]
                    assert rank == LOST, (rank, errors)
                    continue
                if rank == LOST:
                    begun = at
                else:
                    errors[rank] = text, at
    finally:
        for process in processes:
            process.kill()
            process.join()
    return begun, errors


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize(
    "case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_every_rank_names_the_lost_one(case: str, tmp_path: Path) -> None:
    check_that_ranks_name_the_lost_one(case, tmp_path)


def check_that_ranks_name_the_lost_one(case: str, folder: Path, device: str = "cpu") -> None:
    begun, errors = errors_of(case, folder, device)
    phase = CASES[case][-1]
    for rank, (text, at) in errors.items():
        assert re.search(rf"rank {LOST} of {RANKS} .*{phase}", text), (rank, text)
        assert re.search(rf"rank {rank} of {RANKS} was in ", text), text
        assert not ADDRESS.search(text), text
        assert at - begun < TIMEOUT, (rank, at - begun, text)
