"""torch's own table of operators, each split in every way that its rule offers, compared with
torch.

    python benchmarks/operators.py                     # all; a later run continues operators.jsonl
    python benchmarks/operators.py --only topk sort    # some operators, anew
    python benchmarks/operators.py --ranks 0.1         # a tenth on two gloo ranks, through compile

Each float64 sample input of an operator becomes a module that multiplies every floating operand by
a weight, calls the operator, and adds up its results with fixed weights. It is captured; the
captured graph must compute what the module does, and every node of it, cut along an axis of two as
each of its strategies says, must make up the node's values and gradients (``emulate.py``). Needs
the package expecttest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from emulate import close
from operator_cases import (
    CRASH,
    NOT_EXPORTABLE,
    REFUSED,
    SPLIT,
    TOLERANCE,
    UNSPLIT,
    WRONG,
    Case,
    cases,
    draws_numbers,
    eager_step,
    first_line,
)
from operator_checks import check
from tabulate import tabulate

import autopar
from autopar.capture.capture_graph import capture
from autopar.errors import AutoparError
from autopar.passes.canonical.canonicalise import canonicalise

SAMPLES = 4  # of each operator, unless --samples says otherwise
WORST_LAST = (NOT_EXPORTABLE, UNSPLIT, SPLIT, REFUSED, CRASH, WRONG)


def on_ranks(name: str, number: int, samples: int, parallel: dict[str, Any]) -> tuple[str, str]:
    """Compiles and runs a case in this rank, and compares with eager."""
    warnings.simplefilter("ignore")
    case = next(c for _, found in cases([name], samples) for c in found if c.number == number)
    expected, grads = eager_step(case.model(), case.tensors)
    try:
        draws = draws_numbers(canonicalise(capture(case.model(), case.tensors)).graph)
        compiled = autopar.compile(case.model(), case.tensors, 2, parallel=parallel, progress=False)
    except AutoparError as e:
        return REFUSED, first_line(e)
    loss = compiled(*case.tensors)
    loss.backward()
    if draws:  # a program's draws are its own
        return SPLIT, "it draws: only run"
    for key, p in compiled.named_parameters():
        if grads[key] is not None:
            found = p.grad.full_tensor() if p.grad is not None else torch.zeros_like(grads[key])  # type: ignore[union-attr, arg-type, attr-defined]
            close(found, grads[key], f"gradient of {key}", TOLERANCE)  # type: ignore[arg-type]
    close(loss.detach(), expected, "loss", TOLERANCE)
    return SPLIT, ""


def judged(run: Any) -> tuple[str, str]:
    """``run()``, with what went wrong in it."""
    try:
        result: tuple[str, str] = run()
        return result
    except AssertionError as e:
        return WRONG, " ".join(str(e).split())[:300]
    except Exception as e:
        return CRASH, first_line(e)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of operators; these are run anew"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator, at most")
    parser.add_argument("--limit", type=int, default=None, help="operators, at most")
    parser.add_argument("--log", type=Path, default=Path("operators.jsonl"))
    parser.add_argument(
        "--ranks",
        type=float,
        default=0.0,
        help="the part of the cases to run on two ranks through compile, too",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = {} if arguments.only or not arguments.log.exists() else _read(arguments.log)
    if arguments.ranks:
        _run_ranks(arguments, done)
    else:
        _run_emulated(arguments, done)
    report(list(done.values()))


def _read(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (r["name"], r["number"], r["where"]): r for r in rows if r["status"] not in (WRONG, CRASH)
    }  # these are run again


def _note(
    arguments: argparse.Namespace,
    done: dict[Any, Any],
    case: Case,
    where: str,
    status: str,
    reason: str,
) -> None:
    row = {
        "name": case.name,
        "number": case.number,
        "where": where,
        "status": status,
        "reason": reason,
    }
    done[case.name, case.number, where] = row
    with arguments.log.open("a") as log:
        log.write(json.dumps(row) + "\n")
    if status in (WRONG, CRASH):
        print(f"{case.name} [{case.number}] {where}: {status}: {reason}", flush=True)


def _run_emulated(arguments: argparse.Namespace, done: dict[Any, Any]) -> None:
    checked: set[str] = set()
    for count, (_, found) in enumerate(cases(arguments.only, arguments.samples)):
        if arguments.limit is not None and count >= arguments.limit:
            break
        for case in found:
            if (case.name, case.number, "emulated") not in done:
                _note(arguments, done, case, "emulated", *judged(lambda: check(case, checked)))  # noqa: B023 - called at once


def _run_ranks(arguments: argparse.Namespace, done: dict[Any, Any]) -> None:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from pool import Pool  # type: ignore[import-not-found]

    pool = Pool(2)
    numbers = random.Random(0)
    for name, found in cases(arguments.only, arguments.samples):
        for case in found:
            picked = numbers.random() < arguments.ranks
            status = done.get((name, case.number, "emulated"), {}).get("status")
            if not picked or status in (NOT_EXPORTABLE, REFUSED):
                continue
            for where, parallel in (
                ("data", dict(data=2)),
                ("tensor", dict(tensor=dict(size=2, mode="1d"))),
            ):
                if (name, case.number, where) in done:
                    continue
                try:
                    outcome = pool.run(
                        _judged_on_ranks,
                        name,
                        case.number,
                        arguments.samples,
                        parallel,
                        timeout=120,
                    )[0]
                except Exception as e:
                    outcome = CRASH, str(e).strip().splitlines()[-1][:300]
                _note(arguments, done, case, where, *outcome)
    pool.close()


def _judged_on_ranks(*args: Any) -> tuple[str, str]:
    sys.path.append(str(Path(__file__).parent))
    from operators import on_ranks  # a name that it has in every process

    return judged(lambda: on_ranks(*args))


def report(rows: list[dict[str, Any]]) -> None:
    """The table, operator by operator: the worst of its samples counts."""
    for where in dict.fromkeys(r["where"] for r in rows):
        worst: dict[str, dict[str, Any]] = {}
        for row in (r for r in rows if r["where"] == where):
            before = worst.get(row["name"])
            if before is None or WORST_LAST.index(row["status"]) > WORST_LAST.index(
                before["status"]
            ):
                worst[row["name"]] = row
        counts = Counter(r["status"] for r in worst.values())
        samples = Counter(r["status"] for r in rows if r["where"] == where)
        exported = sum(n for status, n in counts.items() if status != NOT_EXPORTABLE)
        ran = counts[SPLIT] + counts[UNSPLIT]
        for status in (WRONG, CRASH, REFUSED, UNSPLIT, NOT_EXPORTABLE):
            names = [[name, r["reason"]] for name, r in worst.items() if r["status"] == status]
            table = tabulate(names, headers=["operator", "reason"], maxcolwidths=[40, 110])
            print(f"\n{where}: {status}\n{table}")
        lines = [[status, counts[status], samples[status]] for status in reversed(WORST_LAST)]
        print(f"\n{tabulate(lines, headers=[where, 'operators', 'samples'])}")
        print(
            f"of {exported} operators that export {ran} run: {100 * ran / max(exported, 1):.1f} %"
        )


if __name__ == "__main__":
    main()
