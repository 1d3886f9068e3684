"""examples/finetune_vit.py: every plan of its configuration file trains on real images as one
device does, and the picture shows every run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from pool import Pool, Pools

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

import finetune_vit
import vit_results
from finetune_vit import TEST_IMAGES
from vit_configuration import Configuration
from vit_results import ALONE, FIRST, Run

FILE = Path(finetune_vit.__file__).with_suffix(".json")
OWN = Configuration.read(FILE)
SMALL = dataclasses.replace(OWN, layers=2, epochs=4, lr=1e-3)


def one_device() -> Run:
    return finetune_vit.train(finetune_vit.network(SMALL), finetune_vit.digits(), SMALL, ALONE)


@pytest.fixture(scope="module")
def alone(ranks: Pools) -> Run:
    (run,) = ranks(1).run(one_device, timeout=120)
    return run


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # on a busy machine; eight ranks share what cores there are
@pytest.mark.parametrize("plan", OWN.plans)
def test_a_plan_learns_what_one_device_does(alone: Run, plan: str) -> None:
    """Sums run in another order on several ranks, so each step may add a rounding of the loss to
    the difference.

    Accuracies are the same where they differ by no more than three standard errors of an accuracy
    measured on so many images.
    """
    own = Pool(OWN.ranks(plan))  # a long run, in processes that ran nothing else
    try:
        runs = own.run(finetune_vit.distributed, plan, SMALL, timeout=500)
    finally:
        own.close()
    run = runs[0]
    assert all(other.losses == run.losses and other.accuracies == run.accuracies for other in runs)
    rounding = torch.finfo(torch.float32).eps * max(alone.losses)
    assert max(vit_results.differences(run, alone)[:FIRST]) <= FIRST * rounding
    right = alone.accuracies[-1]
    assert abs(run.accuracies[-1] - right) <= 3 * math.sqrt(right * (1 - right) / TEST_IMAGES)
    assert run.accuracies[-1] > 0.8


def run(folder: Path, *more: str, **changes: object) -> subprocess.CompletedProcess[str]:
    """Runs the example with its configuration file changed."""
    file = folder / "configuration.json"
    file.write_text(json.dumps(json.loads(FILE.read_text()) | changes))
    return subprocess.run(
        [sys.executable, finetune_vit.__file__, f"--config={file}", f"--out={folder}", *more],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_the_example_runs_from_given_weights(tmp_path: Path) -> None:
    """The weights, whose head is for two classes, come from a folder."""
    weights = finetune_vit.network(dataclasses.replace(OWN, layers=1))
    weights.classifier = torch.nn.Linear(192, 2)
    weights.config.num_labels = 2
    weights.save_pretrained(tmp_path / "weights")
    more = dict(start_from=str(tmp_path / "weights"), epochs=1, batch=256)
    pipeline = dict(OWN.plans["pipeline"], ranks=2, parallel=dict(pipeline=2), micro_batch_size=64)
    done = run(tmp_path, "--plans", "two stages", plans={"two stages": pipeline}, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    names = {ALONE: "alone", "two stages": "two stages"}
    runs = {name: Run.load(tmp_path / f"{file}.json") for name, file in names.items()}
    assert vit_results.summary(runs) in done.stdout
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8") == vit_results.picture(runs, 1)
    assert max(vit_results.differences(runs["two stages"], runs[ALONE])) < 1e-5
    loaded = finetune_vit.network(dataclasses.replace(OWN, start_from=str(tmp_path / "weights")))
    for name, value in loaded.vit.state_dict().items():
        assert torch.equal(value, weights.vit.state_dict()[name])
    assert loaded.classifier.out_features == finetune_vit.CLASSES


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(modes=["2d"]), "give an object with batch, epochs, layers, lr, plans, start_from"),
        (dict(epochs=0), "epochs is 0; give a whole number above 0"),
        (dict(plans={"data": {}}), "plan 'data' is {}; give its \"ranks\""),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    file = tmp_path / "configuration.json"
    file.write_text(json.dumps(json.loads(FILE.read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(said)):
        Configuration.read(file)


def test_the_picture_shows_every_run() -> None:
    runs = {
        name: Run(1, [2.0, 1.0, 0.5, 0.25 + i / 1e6], [0.5, 1.0], 0.1)
        for i, name in enumerate([ALONE, *OWN.plans])
    }
    drawn = ElementTree.fromstring(vit_results.picture(runs, 2))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert set(runs) <= set(texts)
    lines = [
        line.get("points", "").split()
        for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    # The legend and accuracies, losses and their differences.
    assert sorted(map(len, lines)) == [2] * 2 * len(runs) + [4] * (2 * len(runs) - 1)
    assert {float(end.split(",")[0]) for *_, end in lines if len(_) == 3} == {300.0}
