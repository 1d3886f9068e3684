"""No regret: the free plan of each case against plans of configurations that a person could pin.

The pinned configurations are drawn from all that the options can say: data x tensor x pipeline
sizes, microbatch size, schedule, chunks, recomputation, ZeRO level, mesh, mode. Regret is the free
plan's predicted step time over that of the fastest pinned plan, less one. The free plan has the
default limit of planning time; each pinned plan has ``--pinned-seconds``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regret_cases import CASES, Case
from tabulate import tabulate
from tqdm import tqdm

import autopar
from autopar.ir.schedules import SCHEDULES

ALLOWED = 0.005  # the regret that no case may exceed
MODES = ("1d", "1d", "1d", "2d", "2.5d", "3d", "sequence")
MOST_CHUNKS = 8
SWEEP = 64  # pinned configurations of one sweep, which learns anew what sweeps before it kept


class Result(NamedTuple):
    """One case: the free plan, and the fastest pinned plan of those that have one."""

    name: str
    free: autopar.Plan
    seconds: float
    pinned: int
    drawn: int
    best: float
    options: dict[str, Any]

    @property
    def regret(self) -> float:
        return self.free.step_time / self.best - 1


def divisors(number: int) -> list[int]:
    """The divisors in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def drawn_options(case: Case, batch: int, rng: random.Random) -> dict[str, Any]:
    """The options of one pinned configuration. Not every one has a plan."""
    pipeline = rng.choice(divisors(case.devices))
    stage = case.devices // pipeline
    options: dict[str, Any] = {}
    data = 1
    if rng.random() < 0.3 and stage > 1:
        options["mesh"] = drawn_mesh(stage, rng)
    else:
        data = rng.choice(divisors(stage))
        parallel: dict[str, Any] = {"data": data}
        if stage > data:
            parallel["tensor"] = {"size": stage // data, "mode": rng.choice(MODES)}
        if pipeline > 1:
            parallel["pipeline"] = drawn_pipeline(pipeline, rng)
        options["parallel"] = parallel
    if pipeline > 1:
        options["schedule"] = rng.choice(SCHEDULES)
    sizes = divisors(batch // data) if batch % data == 0 else [1]
    if pipeline > 1 or rng.random() < 0.4:
        options["micro_batch_size"] = rng.choice(sizes)
    if rng.random() < 0.25:
        options["recompute"] = rng.choice(("none", "selective", "full"))
    if rng.random() < 0.3:
        options["zero"] = rng.randrange(4)
    return options


def drawn_mesh(stage: int, rng: random.Random) -> tuple[int, ...]:
    """A mesh of one, two or three axes."""
    first = rng.choice([d for d in divisors(stage) if d > 1])
    rest = stage // first
    if rest == 1:
        return (first,)
    second = rng.choice([d for d in divisors(rest) if d > 1])
    return (first, rest) if second == rest else (first, second, rest // second)


def drawn_pipeline(size: int, rng: random.Random) -> dict[str, int]:
    """A pipeline of one chunk a rank, or of several."""
    return {"size": size, "chunks": rng.choice((1, 1, 1, *range(2, MOST_CHUNKS + 1)))}


def pinned_plans(case: Case, draws: int, seed: int, most: int) -> Iterator[dict[str, Any]]:
    """Different drawn options, at most ``most``, among ``draws`` draws."""
    rng, seen = random.Random(f"{seed}{case.name}"), set[str]()
    batch = len(next(iter(case.make()[1].values())))
    for _ in range(draws):
        options = drawn_options(case, batch, rng)
        if (key := json.dumps(options, sort_keys=True)) not in seen and len(seen) < most:
            seen.add(key)
            yield options


def measure(
    case: Case,
    draws: int,
    seed: int = 0,
    progress: bool = True,
    pinned_seconds: float | None = None,
) -> Result:
    """Plan a case freely, and ``draws`` pinned configurations of it that have a plan.

    Args:
        pinned_seconds: the limit of planning time of each pinned plan; None: the default.
    """
    model, sample = case.make()
    fixed = {"cluster": case.cluster, **case.options}
    start = time.perf_counter()
    free = autopar.plan(model, sample, case.devices, progress=False, **fixed)
    seconds = time.perf_counter() - start
    found: list[tuple[float, dict[str, Any]]] = []
    tried = 0
    bar = tqdm(total=draws, desc=case.name, disable=not progress, leave=False)
    queue = list(pinned_plans(case, 40 * draws, seed, 8 * draws))
    for at in range(0, len(queue), SWEEP):
        if len(found) >= draws:
            break
        asked = queue[at : at + SWEEP]
        plans = sweep(model, sample, case, asked, pinned_seconds)
        tried += len(plans)
        for options, plan in zip(asked, plans, strict=True):
            if plan is not None:
                found.append((plan.step_time, options))
        fastest = min((seconds for seconds, _ in found), default=math.inf)
        bar.set_postfix_str(f"{tried} tried, regret {free.step_time / fastest - 1:+.2%}")
        bar.update(sum(plan is not None for plan in plans))
    bar.close()
    best, options = min(found, key=lambda f: f[0], default=(math.inf, {}))
    return Result(case.name, free, seconds, len(found), tried, best, options)


def sweep(
    model: Any,
    sample: Any,
    case: Case,
    options: Sequence[dict[str, Any]],
    seconds: float | None,
) -> list[autopar.Plan | None]:
    """The plan of each set of options; None where there is none."""
    limit = {} if seconds is None else {"time_limit": seconds}
    asked = [dict(world_size=case.devices, **limit, **case.options, **each) for each in options]
    plans = autopar.sweep(model, sample, asked, cluster=case.cluster, progress=False)
    return [plan if isinstance(plan, autopar.Plan) else None for plan in plans]


def row(result: Result) -> list[Any]:
    """The row of a case in the table."""
    free = result.free
    mesh = " x ".join(f"{name} {size}" for name, size in free.mesh.items())
    where = f"pipeline {free.pipeline} {free.schedule}, {mesh}" if free.pipeline > 1 else mesh
    return [
        result.name,
        f"{1e3 * free.step_time:.2f} ms",
        f"{where}, {free.microbatches} microbatches",
        f"{free.gap:.2%}",
        f"{result.seconds:.1f} s",
        f"{result.pinned} of {result.drawn}",
        f"{1e3 * result.best:.2f} ms",
        f"{result.regret:+.2%}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[c.name for c in CASES])
    parser.add_argument("--draws", type=int, default=100, help="pinned plans of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pinned-seconds", type=float, default=10.0, help="limit of planning a pinned plan"
    )
    parser.add_argument("--json", type=Path, help="file to write the rows to as well")
    arguments = parser.parse_args()
    rows, worst = [], 0.0
    headers = ["case", "free", "its plan", "gap", "planned in", "pinned", "fastest", "regret"]
    for case in (c for c in CASES if c.name in arguments.cases):
        result = measure(
            case, arguments.draws, arguments.seed, pinned_seconds=arguments.pinned_seconds
        )
        rows.append(row(result))
        worst = max(worst, result.regret)
        print(f"{' | '.join(map(str, rows[-1]))} | {result.options}", flush=True)
    print(tabulate(rows, headers))
    print(f"largest regret {worst:.2%}, allowed {ALLOWED:.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps([dict(zip(headers, r, strict=True)) for r in rows]))
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
