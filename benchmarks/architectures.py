"""Small models of transformers' architectures, trained one step under four plans on two ranks,
beside the plain model: the largest error of a gradient, or why a model is refused.

An error is that of a parameter's gradient, relative to the largest number in it; numbers below a
millionth of the largest gradient of the model count as that millionth, because gradients that are
zero but for rounding have no digits. Models with BatchNorm run in one microbatch, because it takes
its statistics of a microbatch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from architecture_configs import ARCHITECTURES
from architecture_samples import BATCH, Sample
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

sys.path.insert(0, os.fspath(Path(__file__).parent.parent / "tests"))  # the pool is of the tests

from equivalence import Double, full  # type: ignore[import-not-found]
from pool import Pool, RankError  # type: ignore[import-not-found]

import autopar

PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2)),
    "zero=3": dict(parallel=dict(data=2), zero=3, micro_batch_size=2),
    "1d": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
}
ALLOWED = 1e-5  # some models cast to float32 in ways that Double does not know
NO_DIGITS = 1e-6  # of the largest gradient of a model
SECONDS = 300


def made(name: str) -> tuple[nn.Module, Sample]:
    """A model in float64 without dropout, and a batch; the same on all ranks."""
    torch.manual_seed(0)
    model_class, architecture = getattr(transformers, name), ARCHITECTURES[name]
    model = model_class(model_class.config_class(**architecture.config)).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    sample = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in architecture.sample().items()
    }
    return model, sample


class Outcome(NamedTuple):
    """Of one model under one plan. ``detail``: the largest error, or the message."""

    kind: str  # "right", "wrong", "refused" or "failed"
    detail: str


def trained(name: str, options: dict[str, Any]) -> Outcome:
    """What one step of a model comes to on this rank; casts to float32 mostly stay in float64."""
    with Double():
        return _trained(name, options)


def _trained(name: str, options: dict[str, Any]) -> Outcome:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model, sample = made(name)
    loss = model(**sample).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()  # each parameter's grad is None then
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        whole = BATCH // options["parallel"].get("data", 1)
        options = options | dict(micro_batch_size=whole)
    try:
        ranks = dist.get_world_size()
        compiled = autopar.compile(model, sample, ranks, cluster="cpu", progress=False, **options)
    except autopar.AutoparError as e:
        return Outcome("refused", f"{type(e).__name__}: {e}")
    found = compiled(**sample).loss
    found.backward()
    smallest = NO_DIGITS * max(float(g.abs().max()) for g in expected.values() if g is not None)
    errors = [(found - loss).abs() / loss.abs()]
    for parameter_name, parameter in compiled.named_parameters():
        zero = torch.zeros_like(full(parameter))
        own, plain = parameter.grad, expected[parameter_name]
        own, plain = zero if own is None else full(own), zero if plain is None else plain
        errors.append((own - plain).abs().max() / plain.abs().max().clamp(min=smallest))
    error = float(torch.stack([e.detach().double() for e in errors]).max())
    return Outcome("right" if error <= ALLOWED else "wrong", f"{error:.0e}")


def outcome(pool: Pool, name: str, plan: str) -> Outcome:
    """The worst of all ranks."""
    try:
        found = pool.run(trained, name, PLANS[plan], timeout=SECONDS)
    except RankError as e:
        return Outcome("failed", str(e))
    order = ("right", "refused", "wrong")
    return max(found, key=lambda each: (order.index(each.kind), each.detail))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--names", nargs="+", default=sorted(ARCHITECTURES), metavar="CLASS")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--json", type=Path, help="file to write the outcomes to as well")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Outcome]] = {}
    for name in tqdm(arguments.names, "architectures", disable=not sys.stderr.isatty()):
        pool = Pool(2)  # processes that compiled many classes hold much memory
        rows[name] = {plan: outcome(pool, name, plan) for plan in arguments.plans}
        pool.close()
        for plan, found in rows[name].items():
            if found.kind != "right":
                tqdm.write(f"{name}, {plan}: {found.kind}: {found.detail}")
    shown = [
        [name, *(f.detail if f.kind in ("right", "wrong") else f.kind for f in row.values())]
        for name, row in rows.items()
    ]
    print(tabulate(shown, ["model class", *arguments.plans]))
    counts = Counter((plan, f.kind) for row in rows.values() for plan, f in row.items())
    kinds = sorted({kind for _, kind in counts})
    table = [[plan, *(counts[plan, kind] for kind in kinds)] for plan in arguments.plans]
    print(tabulate(table, ["plan", *kinds]))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(not {"wrong", "failed"}.isdisjoint(kinds))


if __name__ == "__main__":
    sys.exit(main())
