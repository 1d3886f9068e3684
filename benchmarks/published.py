"""Published measurements of training runs and collectives, and the plans that they are runs of.

The files are those of a folder ``validation`` with a README that says where each comes from.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One measured run of a GPT; ``seconds`` a step."""

    gpus: int
    batch: int
    microbatch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def model(self) -> tuple[int, ...]:
        """What tells models and batches apart."""
        return self.hidden, self.heads, self.layers, self.sequence, self.batch


def runs(path: Path) -> list[Run]:
    """Of a file of vTrain's."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    found = []
    for row in rows:
        gpus, batch, microbatch, hidden, heads, layers, sequence, tensor, data, pipeline = (
            int(float(x)) for x in row[-11:-1]
        )
        sizes = batch, microbatch, hidden, heads, layers, sequence
        found.append(Run(gpus, *sizes, tensor, data, pipeline, seconds=float(row[-1]) / 1e3))
    return found


def by_model(found: Iterable[Run]) -> Iterator[list[Run]]:
    """Runs of one model and batch together."""
    groups: dict[tuple[int, ...], list[Run]] = defaultdict(list)
    for run in found:
        groups[run.model].append(run)
    yield from groups.values()


def all_reduces(path: Path) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """By GPU and number of ranks: bytes and seconds."""
    curves: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["gpu"], int(row["ranks"])].append(
                (float(row["bytes"]), float(row["time_ns"]) * 1e-9)
            )
    return dict(curves)
