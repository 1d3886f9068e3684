"""examples/train_vit.py: every mode of tensor parallelism trains on real images as one device does,
and the picture shows every run.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from pool import Pool, Pools

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

import train_vit
import vit_results
from train_vit import TEST_IMAGES
from vit_results import ALONE, FIRST, MODES, Run

SMALL = argparse.Namespace(layers=2, epochs=4, batch=64, lr=1e-3)


def one_device() -> Run:
    return train_vit.train(
        train_vit.network(SMALL.layers), train_vit.digits(), SMALL, ALONE, quiet=True
    )


@pytest.fixture(scope="module")
def alone(ranks: Pools) -> Run:
    (run,) = ranks(1).run(one_device, timeout=120)
    return run


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine; eight ranks share what cores there are
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_learns_what_one_device_does(alone: Run, mode: str) -> None:
    """Sums run in another order on several ranks, so each step may add a rounding of the loss to
    the difference.

    Accuracies are the same where they differ by no more than three standard errors of an accuracy
    measured on so many images.
    """
    own = Pool(MODES[mode]["size"])  # a long run, in processes that ran nothing else
    try:
        runs = own.run(train_vit.distributed, mode, SMALL, timeout=500)
    finally:
        own.close()
    run = runs[0]
    assert all(other.losses == run.losses and other.accuracies == run.accuracies for other in runs)
    rounding = torch.finfo(torch.float32).eps * max(alone.losses)
    assert max(vit_results.differences(run, alone)[:FIRST]) <= FIRST * rounding
    right = alone.accuracies[-1]
    assert abs(run.accuracies[-1] - right) <= 3 * math.sqrt(right * (1 - right) / TEST_IMAGES)
    assert run.accuracies[-1] > 0.8


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "examples/train_vit.py"
    sizes = f"--modes 1d --layers 1 --epochs 1 --batch 256 --out {tmp_path}"
    done = subprocess.run(
        [sys.executable, str(script), *sizes.split()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = {ALONE: Run.load(tmp_path / "alone.json"), "1d": Run.load(tmp_path / "1d.json")}
    assert vit_results.summary(runs) in done.stdout
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8") == vit_results.picture(runs, 1)


def test_the_picture_shows_every_run() -> None:
    runs = {
        name: Run([2.0, 1.0, 0.5, 0.25 + i / 1e6], [0.5, 1.0], 0.1)
        for i, name in enumerate([ALONE, *MODES])
    }
    drawn = ElementTree.fromstring(vit_results.picture(runs, 2))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert set(runs) <= set(texts)
    lines = [
        line.get("points", "").split()
        for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert sorted(map(len, lines)) == [2] * (5 + 5) + [4] * (
        5 + 4
    )  # the legend and accuracies, losses and their differences
    assert {float(end.split(",")[0]) for *_, end in lines if len(_) == 3} == {300.0}
