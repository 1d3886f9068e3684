"""Random small models under random legal plans, beside the eager model on one device: how many are
right, refused, wrong or crash.

Each seed is a model and a plan for it, on one rank (with microbatches), two or four; where the
options that were drawn are refused (a model that mixes its samples has no microbatches), others are
drawn. Prints every seed that fails, with the options, and what to run to see it again; at the end
the counts, and refusals by message. With ``--out`` outcomes are kept, and seeds that are there are
not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

sys.path.insert(0, os.fspath(Path(__file__).parent.parent / "tests"))  # the generator is a test's

from pool import Pool, RankError  # type: ignore[import-not-found]
from random_plans import Job, Outcome, checked, planned  # type: ignore[import-not-found]
from random_programs import program  # type: ignore[import-not-found]

from autopar.ir.plan_data import BACKENDS

AT_ONCE = 16  # seeds that are planned together
FRESH = 10  # such rounds that processes live
SECONDS = 300


def ranks_of(seed: int) -> int:
    """Most on one rank or two, some on four."""
    return (1, 2, 1, 2, 2, 1, 2, 4)[seed % 8]


def run(seeds: Sequence[int], ranks: int, backend: str, device: str) -> Iterator[Outcome]:
    """The outcomes of seeds on as many ranks."""
    pool = Pool(ranks, "nccl" if device == "cuda" else "gloo")
    for round_ in range(0, len(seeds), AT_ONCE):
        if round_ // AT_ONCE % FRESH == 0:
            pool.close()
        for job in _plans(pool, seeds[round_ : round_ + AT_ONCE], ranks, backend, device):
            yield job.outcome or _outcome(pool, job, ranks, device)
    pool.close()


def _plans(pool: Pool, seeds: Sequence[int], ranks: int, *of: str) -> list[Job]:
    """Plans of the seeds, ``of`` a backend and a device."""
    try:
        found = pool.run(_share, list(seeds), ranks, *of, timeout=SECONDS * AT_ONCE)
        return [job for part in found for job in part]
    except RankError as e:
        if len(seeds) > 1:
            return [job for seed in seeds for job in _plans(pool, [seed], ranks, *of)]
        return [Job(seeds[0], {}, None, Outcome(seeds[0], ranks, "{}", "crashed", f"plan: {e}"))]


def _share(seeds: list[int], ranks: int, *of: str) -> list[Job]:
    import torch.distributed as dist

    return planned(seeds, ranks, dist.get_rank(), ranks, *of)


def _outcome(pool: Pool, job: Job, ranks: int, device: str) -> Outcome:
    try:
        found = pool.run(checked, job, ranks, device, timeout=SECONDS)
    except RankError as e:
        return Outcome(job.seed, ranks, repr(job.options), "crashed", f"run: {e}")
    order = ("crashed", "wrong", "refused", "right")
    return min(found, key=lambda outcome: order.index(outcome.kind))


def _message(detail: str) -> str:
    """What refusals have in common."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|\([^()]*\)", "…", detail.partition("\n")[0]))[:150]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:2000", help="A:B, from A to B - 1; or one")
    parser.add_argument("--ranks", type=int, help="only seeds that run on as many ranks")
    parser.add_argument("--backend", choices=BACKENDS, default="eager", help="of all programs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: over NCCL")
    parser.add_argument(
        "--out",
        type=Path,
        help="a file of JSON lines for the outcomes; what is there is not run again",
    )
    parser.add_argument("--show", action="store_true", help="print each model")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    done: dict[int, Outcome] = {}
    if args.out and args.out.exists():
        lines = [Outcome(**json.loads(line)) for line in args.out.read_text().splitlines()]
        done = {o.seed: o for o in lines if o.seed in seeds}
    for ranks in [args.ranks] if args.ranks else [1, 2, 4]:
        todo = [seed for seed in seeds if ranks_of(seed) == ranks and seed not in done]
        if args.show:
            for seed in todo:
                print(seed, program(seed)[0])
        hidden = not sys.stderr.isatty()
        for outcome in tqdm(
            run(todo, ranks, args.backend, args.device), f"{ranks} ranks", len(todo), disable=hidden
        ):
            done[outcome.seed] = outcome
            _note(outcome, args.out)
    report([o for seed, o in sorted(done.items()) if not args.ranks or o.ranks == args.ranks])


def _note(outcome: Outcome, log: Path | None) -> None:
    """Writes an outcome to the log, and prints a bad one."""
    if log:
        with log.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    if outcome.kind in ("wrong", "crashed"):
        print(
            f"seed {outcome.seed} on {outcome.ranks} ranks, {outcome.options}: {outcome.kind}: "
            f"{outcome.detail}",
            flush=True,
        )


def report(outcomes: Sequence[Outcome]) -> None:
    """The counts."""
    kinds = ("right", "refused", "wrong", "crashed")
    rows = [
        [ranks, *(sum(o.kind == k and o.ranks == ranks for o in outcomes) for k in kinds)]
        for ranks in (1, 2, 4)
    ]
    print(
        tabulate(
            [*rows, ["all", *(sum(o.kind == k for o in outcomes) for k in kinds)]],
            ["ranks", *kinds],
        )
    )
    for kind in kinds[1:]:
        _messages(kind, [o.detail for o in outcomes if o.kind == kind])
    _messages("refused, another drawn", [message for o in outcomes for _, message in o.refusals])


def _messages(what: str, details: Sequence[str]) -> None:
    messages = Counter(map(_message, details))
    print("\n" + tabulate([(n, what, m) for m, n in messages.most_common()], tablefmt="plain"))


if __name__ == "__main__":
    main()
