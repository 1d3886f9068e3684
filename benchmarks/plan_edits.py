"""What becomes of plan files that were edited at random: each is refused with a PlanError (a
RunError where it is for another graph), or it trains as one device does.

    python benchmarks/plan_edits.py     # 250 edits of each of six kinds of plan, some minutes
    python benchmarks/plan_edits.py --edits 50 --kinds zero pipeline

An edit's seed is its kind and its number. Most are refused before anything runs; those that pass
run on real ranks, once for each program that is another one, and loss, outputs and gradients are
compared with the eager model's in float64 (1e-9).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import edited_plans  # type: ignore[import-not-found]
import edits  # type: ignore[import-not-found]
from pool import Pools, RankError  # type: ignore[import-not-found]
from tabulate import tabulate
from tqdm import tqdm

from autopar.frontend.traced_model import TracedModel
from autopar.plan import Plan

COLUMNS = (
    "edits",
    "PlanError",
    "RunError",
    "same program",
    "right",
    "refused late",
    "wrong",
    "crashed",
)
AT_ONCE = 12  # plans that one call of the ranks runs


def outcomes(kind: str, count: int, ranks: Pools) -> Counter[str]:
    """How many of ``count`` edits ended how."""
    model, sample = edited_plans.make(edited_plans.KINDS[kind][0])
    plan, traced = edited_plans.plan(kind), TracedModel(model, sample, None)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        text = (Path(folder) / "plan.json").read_text()
    found: Counter[str] = Counter(edits=count)
    left: dict[str, tuple[list[int], Plan]] = {}
    for number in tqdm(range(count), kind, leave=False):
        try:
            result = edited_plans.refused(edits.edited(text, f"{kind} {number}"), traced)
        except Exception as e:  # what this looks for
            print(f"{kind} {number} crashed: {type(e).__name__}: {e}")
            found["crashed"] += 1
            continue
        if not isinstance(result, Plan):
            found[type(result).__name__] += 1
        elif edited_plans.program(result) == edited_plans.program(plan):
            found["same program"] += 1
        else:
            left.setdefault(edited_plans.program(result), ([], result))[0].append(number)
    for (numbers, _), outcome in zip(
        left.values(), _ran(kind, [p for _, p in left.values()], ranks), strict=True
    ):
        found[outcome.partition(":")[0]] += len(numbers)
        if not outcome.startswith(("right", "refused late")):
            print(f"{kind} {', '.join(map(str, numbers))} {outcome}")
    return found


def _ran(kind: str, plans: list[Plan], ranks: Pools) -> Iterator[str]:
    for start in range(0, len(plans), AT_ONCE):
        part = plans[start : start + AT_ONCE]
        try:
            yield from _on_ranks(kind, part, ranks)
        except RankError:  # which of them it was
            for plan in part:
                try:
                    yield from _on_ranks(kind, [plan], ranks)
                except RankError as e:
                    yield f"crashed: {e}"


def _on_ranks(kind: str, plans: list[Plan], ranks: Pools) -> list[str]:
    """The worst that a rank says of each."""
    everywhere = ranks(edited_plans.KINDS[kind][1]).run(
        edited_plans.run, kind, plans, timeout=30 + 5 * len(plans)
    )
    return [
        max(each, key=lambda said: (said != "right", said))
        for each in zip(*everywhere, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--edits", type=int, default=250, help="of each kind of plan")
    parser.add_argument(
        "--kinds", nargs="+", default=list(edited_plans.KINDS), choices=list(edited_plans.KINDS)
    )
    given = parser.parse_args()
    ranks, rows = Pools(), {}
    try:
        for kind in given.kinds:
            rows[kind] = outcomes(kind, given.edits, ranks)
    finally:
        ranks.close()
    rows["all"] = sum(rows.values(), Counter())
    print(
        tabulate(
            [[kind, *(row[column] for column in COLUMNS)] for kind, row in rows.items()],
            ["plan", *COLUMNS],
        )
    )
    if rows["all"]["wrong"] or rows["all"]["crashed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
