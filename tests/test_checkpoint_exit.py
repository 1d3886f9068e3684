"""A process that ends waits for the save that is under way; after an error, not for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SAVES = """
import time
import torch.distributed as dist
from checkpointed import Run, compiled_under
import autopar.runtime.checkpoint.background as background
from autopar.runtime.checkpoint.files import storage

background.SECONDS_AFTER_ERROR = 1
seconds, write = {seconds}, storage.save_file
storage.save_file = lambda *args: (time.sleep(seconds), write(*args))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = Run(compiled_under("alone"))
run.steps(1)
run.model.save("step-1", **run.parts())
{last}
"""


def _ends(folder: Path, seconds: int, last: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    text = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
    text += SAVES.format(seconds=seconds, last=last)
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    return done, time.monotonic() - start


@pytest.mark.slow
def test_a_process_waits_for_its_save(tmp_path: Path) -> None:
    done, _ = _ends(tmp_path, 2, "")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.slow
def test_a_failed_process_does_not_wait_for_ever(tmp_path: Path) -> None:
    done, seconds = _ends(tmp_path, 10_000, "raise ValueError('of the user')")
    assert done.returncode == 1
    assert "of the user" in done.stderr
    assert "step-1 is not complete" in done.stderr
    assert seconds < 200
    assert [p.name for p in tmp_path.iterdir()] == ["step-1.partial"]


def test_a_process_waits_for_the_last_instructions_of_the_thread() -> None:
    text = (
        "import time\n"
        "from autopar.runtime.checkpoint.background import start_in_background\n"
        "future = start_in_background('nothing', lambda: time.sleep(1))\n"
        "future.add_done_callback(lambda _: (time.sleep(1), print('ended', flush=True)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
