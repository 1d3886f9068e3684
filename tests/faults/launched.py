"""Runs of ``examples/train.py`` under torchrun: what they print and when, and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = ["--hidden", "32", "--layers", "2", "--batch", "8", "--sequence", "32"]
MODEL += ["--eval-every", "40"]
# A node that is gone is noticed after three intervals.
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
ERROR = re.compile(r"rank \d+: \w*Error: .*|.*failed \(exitcode.*")


class Launch:
    """One launch agent, torchrun, with its ranks. Lines of its output have times.

    ``restarts``: how often it starts the ranks again; ``more``: further options of torchrun.
    """

    def __init__(
        self, folder: Path, arguments: list[str], faults: list[Any], *more: str, ranks: int = 2
    ) -> None:
        self.folder, self.tag = folder, f"faults-{os.getpid()}-{time.monotonic_ns()}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "examples")),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart may meet old addresses
            "OMP_NUM_THREADS": "1",
            "FAULTS": json.dumps(faults),
            "FAULTS_TOLD": str(folder / "faults.jsonl"),
            "FAULTS_TAG": self.tag,
        }
        script = str(ROOT / "tests" / "faults" / "faulty_train.py")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--local-addr=127.0.0.1", "--monitor-interval=0.2", *more]
        command += [script, "--folder", str(folder / "run"), *MODEL, *arguments]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def wait(self, seconds: float = 280) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """The agent and its ranks vanish at once, as a machine does that loses its power."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait()

    def pids(self) -> list[int]:
        """The living processes of this launch: they and their children have its tag."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.tag.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def left_behind(self) -> list[int]:
        """Processes that live on some seconds after the agent."""
        end = time.monotonic() + 10
        while (found := self.pids()) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def first_error(self, since: float, until: float) -> float:
        """The time of the first error of a rank in between; of the agent, if no rank has one."""
        errors = [(at, line) for at, line in self.lines if since <= at <= until]
        errors = [(at, line) for at, line in errors if ERROR.match(line)]
        of_ranks = [at for at, line in errors if line.startswith("rank")]
        return min(of_ranks or [at for at, _ in errors], default=float("nan"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run in the order in which they ended."""
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]


def wait_for_step(folder: Path, step: int, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not any(line["step"] >= step for line in steps(folder)):
        assert time.monotonic() < end, f"step {step} did not come within {seconds} s"
        time.sleep(0.2)


def row_of(name: str, launch: Launch, at: float) -> tuple[str, int, float, float]:
    """A row of the table, for a fault at a time: its name, the steps that were lost, and the
    seconds to the error and to the next step. Where the run did not start again, nothing is lost.
    """
    lines = read_lines(launch.folder / "run" / "metrics.jsonl")
    again = next(
        (i for i, line in enumerate(lines) if line["time"] > at and "resumed" in line), None
    )
    first = next(i for i, line in enumerate(lines) if line["time"] > at) if again is None else again
    done = max((line["step"] for line in lines[:first]), default=0)
    lost = 0 if again is None else done - lines[again]["step"]
    next_step = next(line["time"] for line in lines[first:] if "loss" in line)
    return name, lost, launch.first_error(at, next_step) - at, next_step - at
