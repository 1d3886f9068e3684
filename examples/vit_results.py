"""What a run of ``finetune_vit.py`` measured, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

from curves import Chart, svg
from tabulate import tabulate

ALONE = "one device"
FIRST = 20  # steps in which rounding has not been amplified much by training


@dataclasses.dataclass(frozen=True)
class Run:
    """Of one training: the number of ranks, the loss of each step, the test accuracy after each
    epoch, and the median seconds of a step.
    """

    ranks: int
    losses: list[float]
    accuracies: list[float]
    seconds: float

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(path: Path) -> Run:
        return Run(**json.loads(path.read_text()))


def differences(run: Run, alone: Run) -> list[float]:
    return [abs(a - b) for a, b in zip(run.losses, alone.losses, strict=True)]


def summary(runs: dict[str, Run]) -> str:
    """Each plan beside one device."""
    rows = []
    for name, run in runs.items():
        apart = differences(run, runs[ALONE])
        compared = ("", "") if name == ALONE else (f"{max(apart[:FIRST]):.1e}", f"{max(apart):.1e}")
        rows.append(
            (
                name,
                run.ranks,
                f"{run.accuracies[-1]:.3f}",
                *compared,
                f"{run.seconds:.3f}",
            )
        )
    heads = (
        "plan",
        "ranks",
        "test accuracy",
        f"loss difference, {FIRST} steps",
        "at any step",
        "seconds a step",
    )
    return tabulate(rows, heads, "simple", disable_numparse=True, colalign=("left", *["right"] * 5))


def picture(runs: dict[str, Run], epochs: int) -> str:
    """Accuracy and loss of all runs, and how far each plan's loss has been from one device's."""
    accuracies = {name: run.accuracies for name, run in runs.items()}
    losses = {name: run.losses for name, run in runs.items()}
    apart = {
        name: list(itertools.accumulate(differences(run, runs[ALONE]), max))
        for name, run in runs.items()
        if name != ALONE
    }
    charts = [
        Chart("test accuracy", "epoch", epochs, accuracies),
        Chart("training loss", "epoch", epochs, losses),
    ]
    return svg(
        [
            *charts,
            Chart(
                "largest difference from one device's loss so far",
                "epoch",
                epochs,
                apart,
                logarithmic=True,
            ),
        ]
    )
