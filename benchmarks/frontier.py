"""What memory costs: a GPT on one CPU core under budgets from the least that any plan needs to what
keeping everything takes.

For each budget a plan is made and run. All programs live in one process and take turns, a step each
in an order drawn anew, so that a drift of the machine hits all; a row has the median of its steps.
The peak is what torch's allocator held at its worst in a whole training step, with every temporary,
and must not exceed the budget. The last two rows, which are not of the sweep, have half of the
memory, and recompute whole blocks.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from step_models import build, inputs
from tabulate import tabulate
from tqdm import tqdm

import autopar
from autopar.errors import BudgetError
from autopar.plan import Plan

CORRELATED = 0.95


@dataclass
class Row:
    """A plan, the budget it was made for, and what its runs took."""

    name: str
    budget: float
    plan: Plan
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0


class Frontier:
    """Plans of one model and batch on one device, all of the batch at once."""

    def __init__(
        self, model: torch.nn.Module, sample: dict[str, Any], batch: int, cluster: str = "cpu"
    ) -> None:
        self.model, self.sample, self._batch, self._cluster = model, sample, batch, cluster

    def plan(self, **options: Any) -> Plan:
        """A plan under ``options``."""
        return autopar.plan(
            self.model,
            self.sample,
            1,
            cluster=self._cluster,
            micro_batch_size=self._batch,
            progress=False,
            **options,
        )

    def least(self) -> float:
        """The bytes of the plan that needs fewest."""
        try:
            self.plan(memory_budget=1)
        except BudgetError as e:
            return e.least
        raise AssertionError("a plan of one byte")

    def rows(self, points: int) -> list[Row]:
        """Plans for budgets from the least to what keeping everything takes; then that of half of
        it, and of recomputing whole blocks.
        """
        keeps = self.plan(recompute="none").peak_memory[0]
        budgets = [float(b) for b in np.linspace(self.least(), keeps, points)]
        budgets.append(keeps / 2)
        *swept, half = [
            Row(f"{b / keeps:.0%}", b, self.plan(memory_budget=b))
            for b in tqdm(budgets, "planning", leave=False)
        ]
        blocks = self.plan(recompute="full")
        return [
            *swept,
            replace(half, name="half"),
            Row("whole blocks", blocks.peak_memory[0], blocks),
        ]

    def step_of(self, plan: Plan) -> tuple[Callable[[], None], int]:
        """A training step of a program, run once; and the bytes that it leaves: parameters and the
        optimizer's.
        """
        program = autopar.compile(copy.deepcopy(self.model), self.sample, 1, plan=plan)
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-4)

        def step() -> None:
            program(**self.sample).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        kept = [
            t
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
        return step, sum(t.nbytes for t in [*program.parameters(), *kept])


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that the allocator held while ``step`` ran, beyond those it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (e.start_ns(), i, e.nbytes())
        for i, e in enumerate(results.events())
        if e.name() == "[memory]"
    )
    return max(0, int(np.cumsum([nbytes for _, _, nbytes in changes]).max()))


def measure(frontier: Frontier, rows: Sequence[Row], rounds: int) -> None:
    """Fills in peaks and seconds."""
    steps = []
    for row in tqdm(rows, "compiling", leave=False):
        step, lasting = frontier.step_of(row.plan)
        row.peak = lasting + peak_bytes(step)
        steps.append(step)
    order, draw = list(range(len(rows))), random.Random(0)
    for _ in tqdm(
        range(rounds), "steps of all", leave=False, mininterval=0.2 if sys.stderr.isatty() else 10
    ):
        draw.shuffle(order)
        for i in order:
            start = time.perf_counter()
            steps[i]()
            rows[i].seconds.append(time.perf_counter() - start)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of places, where equals share theirs."""

    def places(values: Sequence[float]) -> list[float]:
        ordered = np.sort(values)
        return [float(np.flatnonzero(ordered == v).mean()) for v in values]

    return float(np.corrcoef(places(a), places(b))[0, 1])


def table(rows: Sequence[Row]) -> str:
    headers = (
        "budget",
        "MiB",
        "planned MiB",
        "measured MiB",
        "fits",
        "recomputed",
        "predicted ms",
        "measured ms",
        "quartiles",
    )
    cells = []
    for row in rows:
        low, middle, high = statistics.quantiles(row.seconds, n=4)
        memory = [
            f"{nbytes / 2**20:.1f}" for nbytes in (row.budget, row.plan.peak_memory[0], row.peak)
        ]
        fits = "yes" if row.peak <= row.budget else "NO"
        seconds = (
            f"{1e3 * row.plan.step_time:.1f}",
            f"{1e3 * middle:.1f}",
            f"{1e3 * low:.1f} - {1e3 * high:.1f}",
        )
        cells.append((row.name, *memory, fits, len(row.plan.recomputed), *seconds))
    return tabulate(cells, headers=headers, disable_numparse=True)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """The four claims, each with what was found; the last two rows are those of half of the memory,
    and of whole blocks.
    """
    *swept, half, blocks = rows
    predicted, measured = (
        [r.plan.step_time for r in swept],
        [statistics.median(r.seconds) for r in swept],
    )
    falls = all(b <= a for a, b in pairwise(predicted))
    correlation = rank_correlation(predicted, measured)
    over = [r.name for r in rows if r.peak > r.budget]
    ratio = statistics.median(a / b for a, b in zip(half.seconds, blocks.seconds, strict=True))
    said = half.plan.step_time / blocks.plan.step_time
    return [
        f"predicted time falls with memory: {'yes' if falls else 'NO'}",
        f"rank correlation of predicted and measured time: {correlation:.3f} (> {CORRELATED}: "
        f"{_yes(correlation > CORRELATED)})",
        f"runs over their budget: {', '.join(over) or 'none'}",
        f"time with half of the memory over that of whole blocks: {ratio:.3f} (< 1: "
        f"{_yes(ratio < 1)}), predicted {said:.3f}",
    ]


def _yes(met: bool) -> str:
    return "yes" if met else "NO"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences in the batch")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--points", type=int, default=10, help="budgets")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each program")
    parser.add_argument(
        "--cluster", default="cpu", help="a preset, or a file that describes this machine"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells when it starts and stops
    torch.set_num_threads(1)  # the "cpu" cluster's device is one core
    tokens = torch.randint(
        0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
    )
    frontier = Frontier(build(options), inputs(tokens), options.batch, options.cluster)
    rows = frontier.rows(options.points)
    measure(frontier, rows, options.rounds)
    size = (
        f"{options.layers} layers, hidden {options.hidden}, batch {options.batch} x "
        f"{options.sequence}, float32, AdamW"
    )
    print(
        f"\n{options.model}, {size}; medians of {options.rounds} steps\n\n{table(rows)}\n\n"
        + "\n".join(verdicts(rows))
    )


if __name__ == "__main__":
    main()
