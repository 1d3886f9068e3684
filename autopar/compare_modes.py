"""compare_modes(): one model under every mode of tensor and sequence parallelism, as one table."""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from autopar.cost_model import Cluster, received_bytes
from autopar.cost_model.links import COLLECTIVE_KINDS
from autopar.errors import AutoparError, BudgetError, PlanError
from autopar.formatting.table import WIDTH, format_bytes, format_seconds, table, truncate
from autopar.frontend.planner import check_option_names, make_plan, resolve_cluster
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import LossFunction
from autopar.plan import Plan
from autopar.search.space.modes.registry import mode_names, modes_without_keywords
from autopar.search.space.options import Options

Parallel = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One mode.

    Attributes:
        parallel: the option ``parallel`` for this mode.
        plan: the plan, or None. For a mode that does not fit, the plan with the least memory.
        fits: whether the plan fits the memory of a device.
        error: the reason why there is no plan, or no plan that fits.
    """

    parallel: Parallel
    plan: Plan | None
    fits: bool
    error: AutoparError | None = None

    @property
    def received(self) -> dict[str, float]:
        """Bytes that the busiest rank receives in a step, by collective.

        Transfers between pipeline stages do not count.
        """
        found: dict[str, float] = defaultdict(float)
        for _, kind, axis, *_, times, total, _ in (
            self.plan.rows["collectives"] if self.plan is not None else ()
        ):
            if times and 0 <= axis < len(self.plan.mesh_sizes):  # type: ignore[union-attr]
                found[kind] += received_bytes(kind, total, self.plan.mesh_sizes[axis])  # type: ignore[union-attr]
        return dict(found)


@dataclass(frozen=True, repr=False)
class Modes:
    """The result of :func:`compare_modes`.

    It prints as a table, with the fastest of the modes that fit first.

    Attributes:
        entries: one for each mode.
        budget: the bytes of memory of a device.
    """

    entries: tuple[Entry, ...]
    budget: float

    def __str__(self) -> str:
        planned = sorted(
            (e for e in self.entries if e.plan is not None),
            key=lambda e: (not e.fits, e.plan.step_time),  # type: ignore[union-attr]
        )
        kinds = [kind for kind in COLLECTIVE_KINDS if any(e.received.get(kind) for e in planned)]
        rows = [[_name(e.parallel), *_figures(e, kinds)] for e in planned]
        headers = ["mode", "step", *(_SHORT[kind] for kind in kinds), "params", "activ.", "peak"]
        legend = (
            "bytes that one rank receives in a step, by collective; bytes of parameters, of "
            "activations and of all on the fullest device"
        )
        lines = [
            table(rows, headers, "l" + "r" * (len(headers) - 1), flexible=(0,)),
            *textwrap.wrap(legend, WIDTH),
        ]
        meshes = (
            f"{_name(e.parallel)}: {' x '.join(f'{name} {n}' for name, n in e.plan.mesh.items())}"  # type: ignore[union-attr]
            for e in planned
        )
        lines += textwrap.wrap(f"meshes: {'; '.join(meshes)}", WIDTH) if planned else []
        for fits, what in ((True, "fit"), (False, "do not, here with the plan that takes least")):
            if names := [_name(e.parallel) for e in planned if e.fits is fits]:
                lines += textwrap.wrap(
                    f"{what}{f' in {format_bytes(self.budget)}' * fits}: {', '.join(names)}", WIDTH
                )
        failed = [e for e in self.entries if e.plan is None]
        lines += [truncate(f"{_name(e.parallel)}: {e.error}", WIDTH) for e in failed]
        return "\n".join(lines)

    __repr__ = __str__


def compare_modes(
    model: nn.Module,
    sample_input: Any,
    world_size: int,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    progress: bool = True,
    data: int | None = None,
    pipeline: Any = 1,
    **options: Any,
) -> Modes:
    """Plan one model in every mode of tensor and sequence parallelism that the devices allow.

    The model is traced once. Each mode gets as many ranks as it can use; the other ranks are
    data-parallel. The search chooses the keywords of a mode (depth, ring). Modes that a user
    registered take part if they need no keywords. Plain data parallelism is one more entry.

    Args:
        model, sample_input, loss_fn, cluster, progress: as for :func:`autopar.plan`.
        world_size: the number of ranks.
        data: the number of data-parallel replicas in each mode; by default as many as a mode leaves
            ranks for.
        pipeline: as in ``parallel=``.
        options: the other options of :func:`autopar.plan`, without ``parallel`` and ``mesh``.

    Raises:
        CaptureError: the model could not be traced, or has no loss.
        PlanError: an unknown option. A mode without a plan raises nothing; its row says why.
    """
    if fixed := sorted({"parallel", "mesh"} & set(options)):
        raise PlanError(
            f"compare_modes decides {' and '.join(fixed)} itself: leave it out; data= and "
            "pipeline= can be given"
        )
    Options(world_size, **check_option_names(options))
    stages = _stages(pipeline)
    sizes = (stages, 1 if data is None else data)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes) or world_size % (
        stages * (data or 1)
    ):
        raise PlanError(
            f"pipeline={pipeline!r} and data={data!r} do not divide world_size {world_size}"
        )
    hardware, traced = (
        resolve_cluster(cluster, model),
        TracedModel(model, sample_input, loss_fn, options.get("precision")),
    )
    _ = traced.whole
    asked = [dict(tensor, pipeline=pipeline) for tensor in _tensors(world_size // stages, data)]
    entries = [
        _entry(traced, world_size, hardware, each, options)
        for each in tqdm(asked, "modes", disable=not progress, leave=False)
    ]
    return Modes(tuple(entries), options.get("memory_budget") or hardware.usable_memory)


def _tensors(ranks: int, data: int | None) -> list[dict[str, Any]]:
    """The values of ``parallel`` for all modes, without the pipeline."""
    sizes = (
        [ranks // data] if data is not None else [n for n in range(ranks, 1, -1) if ranks % n == 0]
    )
    found: list[dict[str, Any]] = [dict(data=ranks)] if data in (None, ranks) else []
    for name in mode_names():
        if size := next((n for n in sizes if modes_without_keywords(name, n)), None):
            found.append(dict(data=ranks // size, tensor=dict(size=size, mode=name)))
    return found


def _entry(
    traced: TracedModel,
    world_size: int,
    cluster: Cluster,
    parallel: Parallel,
    options: dict[str, Any],
) -> Entry:
    asked = {**options, "parallel": parallel}
    try:
        return Entry(parallel, make_plan(traced, world_size, cluster, False, asked), True)
    except AutoparError as e:
        error = e
    if isinstance(error, BudgetError) and error.least:
        asked["memory_budget"] = error.least * _ROUNDED
        with suppress(AutoparError):
            return Entry(
                parallel, make_plan(traced, world_size, cluster, False, asked), False, error
            )
    return Entry(parallel, None, False, error)


# the headers of collectives
_SHORT = {
    "all_reduce": "reduce",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "to all",
    "broadcast": "bcast",
    "shift": "shift",
}
_ROUNDED = 1 + 1e-6  # a budget of exactly the least memory could fail by rounding


def _stages(pipeline: Any) -> Any:
    return pipeline.get("size", 1) if isinstance(pipeline, Mapping) else pipeline


def _name(parallel: Parallel) -> str:
    """The name of a mode in the table, such as "2 x 2d(4)" or "2.5d(8), 2 stages"."""
    tensor, stages = parallel.get("tensor"), _stages(parallel["pipeline"])
    replicas = parallel.get("data", 1)
    if tensor is None:
        name = f"data({replicas})"
    else:
        name = f"{replicas} x " * (replicas > 1) + f"{tensor['mode']}({tensor['size']})"
    return name + f", {stages} stages" * (stages > 1)


def _figures(entry: Entry, kinds: list[str]) -> list[str]:
    assert entry.plan is not None
    memory, received = entry.plan.nbytes, entry.received
    return [
        format_seconds(entry.plan.step_time),
        *(format_bytes(received[kind]) if received.get(kind) else "" for kind in kinds),
        format_bytes(memory.get("parameters", 0.0)),
        format_bytes(memory.get("activations", 0.0)),
        format_bytes(max(entry.plan.peak_memory)),
    ]
