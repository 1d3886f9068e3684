"""Random legal plans for random programs, and whether they compute what the eager model does."""

from __future__ import annotations

import copy
import math
import random
import traceback
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from equivalence import Step, differences, own, vanishing, worst
from random_programs import program
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from user_habits import Habits, trained

import autopar
from autopar.cost_model import Level
from autopar.errors import AutoparError, PlanError
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.vertex import Vertex

TOLERANCE = 1e-9
CLUSTERS = {"cpu": "cpu", "cuda": "h100-sxm"}  # by the kind of the devices
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")


@dataclass(frozen=True)
class Outcome:
    """How a seed ended: "right", "refused" (an AutoparError), "wrong" or "crashed"; what there is
    to say of it; and what was drawn before and refused, each with the reason."""

    seed: int
    ranks: int
    options: str
    kind: str
    detail: str = ""
    refusals: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Job:
    """A seed with what was planned for it: a plan, or how that ended; and what was refused
    before.
    """

    seed: int
    options: dict[str, Any]
    plan: autopar.Plan | None
    outcome: Outcome | None
    refusals: Sequence[tuple[str, str]] = ()


def options(seed: int, ranks: int, samples: int, normalises: bool) -> dict[str, Any]:
    """What is asked of the plan. Statistics of BatchNorm are those of the whole batch unless
    microbatches are asked for: they are not.
    """
    numbers = random.Random(seed)
    chosen: dict[str, Any] = {}
    data = pipeline = 1
    if ranks > 1:
        data, pipeline = _draw_grid(numbers, chosen, ranks, samples)
        if data > 1 and numbers.random() < 0.5:
            chosen["zero"] = numbers.choice((0, 1, 2, 3))
    parts = [
        m
        for m in (max(pipeline, 2), 2 * pipeline, 4, samples // 2)
        if m >= pipeline and samples % (m * data) == 0 and samples // m > 1
    ]
    if (
        parts
        and not normalises
        and (ranks == 1 or numbers.random() < (0.9 if pipeline > 1 else 0.5))
    ):
        chosen["micro_batch_size"] = samples // (data * numbers.choice(parts))
    if ranks == 2 and pipeline == 1 and numbers.random() < 0.1:
        chosen["constraints"] = {
            numbers.choice(("blocks.0.*weight", "blocks.1*", "blocks.*.w")): numbers.choice(
                ("S0", "S1", "I", "R")
            )
        }
    if numbers.random() < 0.3:
        chosen["recompute"] = numbers.choice(("none", "selective", "full"))
    return chosen


def _draw_grid(
    numbers: random.Random, chosen: dict[str, Any], ranks: int, samples: int
) -> tuple[int, int]:
    """Chooses the sizes of parallelism and the schedule. Returns the data and pipeline sizes."""
    data, tensor, pipeline = numbers.choice(
        [grid for grid in _grids(ranks) if not grid[0] or samples % grid[0] == 0]
    )
    if data == 0:
        meshes = [(ranks,), (2, ranks // 2)] if ranks > 2 else [(ranks,)]
        chosen["mesh"], data = numbers.choice(meshes), 1
    elif numbers.random() < 0.9:
        chosen["parallel"] = dict(data=data, pipeline=pipeline)
        if tensor > 1:
            mode = numbers.choice(("1d", "1d", "1d", "2d" if tensor == 4 else "sequence"))
            chosen["parallel"]["tensor"] = dict(size=tensor, mode=mode)
        if pipeline > 1 and numbers.random() < 0.6:
            chosen["schedule"] = numbers.choice(SCHEDULES)
            if chosen["schedule"] in ("interleaved-1f1b", "zero-bubble"):
                chunks = 2 if chosen["schedule"][0] == "i" else 1
                chosen["parallel"]["pipeline"] = dict(size=pipeline, chunks=chunks)
    return data, pipeline


def draws(seed: int, ranks: int, samples: int, normalises: bool) -> Iterator[dict[str, Any]]:
    """What is asked in turn, until there is a plan: a model that mixes its samples has none in
    microbatches, a small one none in stages.
    """
    chosen = options(seed, ranks, samples, normalises)
    yield chosen
    whole = {
        name: value
        for name, value in chosen.items()
        if name not in ("micro_batch_size", "schedule", "constraints")
    }
    if (parallel := whole.get("parallel")) and isinstance(parallel["pipeline"], dict):
        whole["parallel"] = parallel | {"pipeline": parallel["pipeline"]["size"]}
    free = {"mesh": (ranks,)} | (
        {"recompute": chosen["recompute"]} if "recompute" in chosen else {}
    )
    yield from (other for other in (whole, free) if other != chosen)


def _grids(ranks: int) -> list[tuple[int, int, int]]:
    """Data, tensor and pipeline sizes; data 0 is a mesh whose axes are free."""
    found = [(d, t, ranks // (d * t)) for d in (1, 2, 4) for t in (1, 2, 4) if ranks % (d * t) == 0]
    return [*found, (0, 1, 1), (0, 1, 1)]


@contextmanager
def any_costs(seed: int) -> Iterator[None]:
    """Within, each choice of each node has a price drawn at random beside its own: any legal plan
    may be the best.
    """
    true = Vertex.cost

    def cost(self: Vertex, weights: CostWeights) -> np.ndarray:
        numbers = np.random.default_rng([seed, zlib.crc32(self.node.name.encode())])
        return true(self, weights) + 1e-3 * numbers.lognormal(0.0, 2.0, len(self.choices))

    with mock.patch.object(Vertex, "cost", cost):
        yield


def free_links(device: str) -> autopar.Cluster:
    """Devices between which messages take no time."""
    cluster = autopar.Cluster.load(CLUSTERS[device])
    levels = (Level("links", None, latency=0.0, bandwidth=1e18),)
    return autopar.Cluster("free", cluster.device, cluster.software, levels)


FREE = free_links("cpu")


def planned(
    seeds: Sequence[int],
    ranks: int,
    first: int,
    every: int,
    backend: str = "eager",
    device: str = "cpu",
) -> list[Job]:
    """Plans of each ``every``-th seed."""
    return [_planned(seed, ranks, backend, device) for seed in seeds[first::every]]


def _planned(seed: int, ranks: int, backend: str, device: str) -> Job:
    model, batches = program(seed)
    normalises = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    refusals: list[tuple[str, str]] = []
    for drawn in draws(seed, ranks, len(batches[0]["x"]), normalises):
        asked = drawn if (backend, device) == ("eager", "cpu") else drawn | {"backend": backend}
        try:
            warnings.simplefilter("default")  # torch warns of what export assigns, of a GRU for one
            if seed % 3:
                with any_costs(seed):
                    cluster = free_links(device)
                    plan = autopar.plan(
                        model, batches[0], ranks, progress=False, cluster=cluster, **asked
                    )
            else:
                named = dict(cluster=CLUSTERS[device]) if device != "cpu" else {}
                plan = autopar.plan(model, batches[0], ranks, progress=False, **named, **asked)
        except PlanError as e:
            outcome = _ended(seed, ranks, asked, e, "plan", tuple(refusals))
            refusals.append((repr(asked), f"PlanError: {e}"))
        except Exception as e:
            return Job(seed, asked, None, _ended(seed, ranks, asked, e, "plan", refusals))
        else:
            return Job(seed, asked, plan, None, refusals)
    return Job(seed, asked, None, outcome)


def _ended(
    seed: int,
    ranks: int,
    asked: dict[str, Any],
    error: Exception,
    when: str,
    refusals: Sequence[tuple[str, str]],
) -> Outcome:
    kind = "refused" if isinstance(error, AutoparError) else "crashed"
    trace = "" if kind == "refused" else "\n" + "".join(traceback.format_tb(error.__traceback__))
    return Outcome(
        seed, ranks, repr(asked), kind, f"{when}: {type(error).__name__}: {error}{trace}", refusals
    )


def checked(job: Job, ranks: int, device: str = "cpu") -> Outcome:
    """Two steps of training, with one of SGD between them, beside the eager model on one device; a
    rank's work. A rank whose device is a GPU has it as the current one.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    assert job.plan is not None
    model, batches = program(job.seed)
    batches = [{name: x.to(device) for name, x in batch.items()} for batch in batches]
    model, whole = model.to(device), job.plan.microbatches == len(job.plan.stages) == 1
    habits = Habits.of(job.seed, whole=whole)
    with torch.device(device):  # for what the models make in their forward
        expected = trained(copy.deepcopy(model), batches, habits)
        warnings.simplefilter("default")
        try:
            compiled = autopar.compile(model, batches[0], ranks, plan=job.plan, progress=False)
            found = trained(compiled, batches, habits)
        except Exception as e:
            return _ended(job.seed, ranks, job.options, e, "run", job.refusals)
    pairs = [
        (mine, one)
        for mine, one in zip(found, expected, strict=True)
        if one.outputs["loss"].isfinite()
    ]  # SGD may diverge
    error, name = max(
        (_worst(mine, one) for mine, one in pairs), default=(math.inf, "no finite loss")
    )
    kind = "right" if error < TOLERANCE else "wrong"
    return Outcome(
        job.seed,
        ranks,
        repr(job.options),
        kind,
        f"{name}: {error:.2g}" if kind == "wrong" else "",
        job.refusals,
    )


def slice_of(seeds: Sequence[int], ranks: int) -> list[Outcome]:
    """The outcomes of a few seeds, planned by all ranks together; a rank's work."""
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, planned(seeds, ranks, dist.get_rank(), ranks))
    return [job.outcome or checked(job, ranks) for jobs in everywhere for job in jobs]


def _worst(found: Step, expected: Step) -> tuple[float, str]:
    missing = set(expected.outputs) ^ set(found.outputs)
    if missing:
        return float("inf"), f"outputs {missing}"
    try:
        return worst(differences(found, own(expected, found), vanishing(expected)))
    except AssertionError as e:
        return float("inf"), str(e)
