"""Whether the search minimises the step time that the report has.

For each case of ``regret.py``, the free plan and plans of drawn configurations: the objective of
the ILP that chose the plan, with the overhead of a step, against the reported step time. They
differ where no round of prices of gradient synchronisation ends at the plan that it began with.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron import searched
from regret import drawn_options
from regret_cases import CASES, Case
from tabulate import tabulate
from tqdm import tqdm

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel, batch_size
from autopar.search.result.end_of_step import reported_seconds

ALLOWED = 0.005  # the relative difference that no plan may exceed


class Row(NamedTuple):
    """The plans of one case.

    Attributes:
        free: the relative difference of the free plan.
        drawn: those of the drawn plans.
    """

    name: str
    free: float
    drawn: list[float]


def difference(traced: TracedModel, case: Case, options: dict[str, Any]) -> float:
    """The objective with the overhead of a step over the reported step time, less one."""
    asked = dict(world_size=case.devices, **case.options, **options)
    cluster = Cluster.load(case.cluster)
    with searched(traced, batch_size(traced.sample), cluster, **asked) as plan:
        return (plan.seconds + plan.costs.overhead) / reported_seconds(plan) - 1


def measure(case: Case, draws: int, seed: int) -> Row:
    """The differences of one case."""
    traced = TracedModel(*case.make(), None, case.options.get("precision"))
    return Row(case.name, difference(traced, case, {}), list(drawn(traced, case, draws, seed)))


def drawn(traced: TracedModel, case: Case, draws: int, seed: int) -> Iterator[float]:
    """The differences of drawn configurations that have a plan."""
    rng, batch = random.Random(f"{seed}{case.name}"), batch_size(traced.sample)
    bar, found = tqdm(total=draws, desc=case.name, leave=False), 0
    for _ in range(20 * draws):
        if found == draws:
            break
        try:
            yield difference(traced, case, drawn_options(case, batch, rng))
        except PlanError:
            continue
        found += 1
        bar.update()
    bar.close()


def table(rows: list[Row]) -> str:
    cells = [
        (
            row.name,
            f"{row.free:+.2%}",
            len(row.drawn),
            f"{min(row.drawn, default=0.0):+.2%}",
            f"{max(row.drawn, default=0.0):+.2%}",
            sum(abs(each) > ALLOWED for each in row.drawn),
        )
        for row in rows
    ]
    headers = ("case", "free plan", "drawn", "lowest", "highest", f"more than {ALLOWED:.1%}")
    return tabulate(cells, headers=headers, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--draws", type=int, default=10, help="drawn plans of each case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = {case.name: case for case in CASES}
    if unknown := [name for name in options.cases if name not in cases]:
        sys.exit(f"--cases: no case {', '.join(unknown)}; there are {', '.join(cases)}")
    rows = [measure(cases[name], options.draws, options.seed) for name in options.cases]
    print(table(rows))
    worst = max(abs(each) for row in rows for each in (row.free, *row.drawn))
    print(f"\nobjective over report, less one: at most {worst:.2%} away from 0")


if __name__ == "__main__":
    main()
