"""Rehearsals of the ranks of plans for four devices, beside the same ranks in a real run over gloo.

For each plan the seconds that a rank computes in a step, as medians over ranks and rounds, and the
ratios of rehearsed to real; and the ratio of the peak memory, of the rank that differs most.
Seconds are those of a thread on its core. Four real ranks share the cores and caches of the
machine, which a rehearsal alone does not: in one column a rank is rehearsed alone, in the other all
four at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parent.parent / "tests"))  # the plans are a test's

from pool import Pool  # type: ignore[import-not-found]
from rehearsed import (  # type: ignore[import-not-found]
    PLANS,
    RANKS,
    planned,
    real_compute,
    real_peak,
    rehearsed,
)
from tabulate import tabulate
from tqdm import tqdm

SIZE = "large"
_COLUMNS = ("plan", "real", "alone", "ratio", "four at a time", "ratio", "memory, ratio")


def measured(name: str, rounds: int, pool: Pool, workers: ProcessPoolExecutor) -> dict[str, Any]:
    """One plan: real steps and rehearsals in turns."""
    plan = planned(name, SIZE)
    bytes_ = pool.run(real_peak, plan, SIZE)
    real, alone, together = [], [], []
    for _ in range(rounds):
        real.append(pool.run(real_compute, plan, SIZE))
        found = list(
            workers.map(rehearsed, [plan] * RANKS, range(RANKS), [SIZE] * RANKS, chunksize=1)
        )
        together.append([each.compute for each in found])
        alone.append([workers.submit(rehearsed, plan, r, SIZE).result().compute for r in (0, 3)])
    at_ends = [[each[0], each[3]] for each in real]
    ratios = [each.peak_memory / size for each, size in zip(found, bytes_, strict=True)]
    return dict(
        plan=name,
        real=_median(real),
        alone=_median(alone),
        alone_ratio=_ratio(alone, at_ends),
        together=_median(together),
        together_ratio=_ratio(together, real),
        memory=max(ratios, key=lambda ratio: abs(ratio - 1)),
    )


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(seconds for each in rounds for seconds in each)


def _ratio(ours: Sequence[Sequence[float]], real: Sequence[Sequence[float]]) -> float:
    pairs = zip(ours, real, strict=True)
    return statistics.median(a / b for each in pairs for a, b in zip(*each, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=", ".join(PLANS))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    pool, rows = Pool(RANKS), []
    with ProcessPoolExecutor(RANKS, mp_context=context) as workers:
        for name in tqdm(given.plans, "plans", leave=False):
            rows.append(measured(name, given.rounds, pool, workers))
            print(rows[-1], file=sys.stderr, flush=True)
    pool.close()
    cells = [[v if isinstance(v, str) else f"{v:.4f}" for v in row.values()] for row in rows]
    print(tabulate(cells, _COLUMNS, disable_numparse=True))
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
