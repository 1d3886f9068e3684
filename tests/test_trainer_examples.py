"""The examples of trainers train under torchrun, and leave what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAVED = {
    "transformers": "model.safetensors",
    "accelerate": "epoch-1/autopar",
    "fabric": "epoch-1",
    "lightning": "last.ckpt",
}


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("trainer", SAVED)
def test_an_example_trains(trainer: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    script = ROOT / f"examples/with_{trainer}.py"
    done = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node=2", str(script), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(x) for x in re.findall(r"(\d\.\d+)", done.stdout.splitlines()[-1])]
    assert len(losses) >= 2, done.stdout
    assert losses[-1] < 4.0  # log(256) = 5.5 is chance
    assert (tmp_path / "saved" / SAVED[trainer]).exists()
