"""Tables of a pipeline's stages and ranks, and of recomputed and offloaded tensors."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost_model.plan_timeline import simulate_plan
from autopar.formatting.table import (
    MOST_ROWS,
    WIDTH,
    Cells,
    first_and_last,
    format_bytes,
    format_seconds,
    table,
)
from autopar.ir.plan_data import PlanData

_SHOWN = 12  # rows of recomputed or offloaded tensors
_COLUMNS = {  # the kinds of memory in each column
    "parameters": ("parameters", "compute copies", "gathered parameters"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "transient": ("transient", "recomputed"),
    "in, out": ("inputs", "outputs"),
}


def schedule_line(plan: PlanData) -> str:
    """The header's line about the pipeline schedule; "" for a plan without a pipeline."""
    if len(plan.stages) == 1:
        return ""
    chunks = f"{plan.chunks} stages on each" if plan.chunks > 1 else "one stage on each"
    return (
        f"schedule {plan.schedule} on {plan.pipeline} pipeline ranks, {chunks}, microbatches: "
        f"{plan.microbatches}"
    )


def stage_table(plan: PlanData) -> str:
    """A row for each stage: its rank, its modules, and the seconds of one microbatch."""
    recomputes = any(stage.seconds.get("recomputation") for stage in plan.stages)
    rows: list[Cells] = []
    for i, stage in enumerate(plan.stages):
        took = [
            stage.seconds["forward"],
            stage.seconds["backward"],
            *([stage.seconds.get("recomputation", 0.0)] if recomputes else []),
        ]
        sent = format_seconds(stage.seconds["send"]) if i + 1 < len(plan.stages) else ""
        rows.append(
            [
                str(i),
                str(i % plan.pipeline),
                stage.name or "(root)",
                *map(format_seconds, took),
                sent,
                str(stage.in_flight),
            ]
        )
    recomputing = ["recomputation"] if recomputes else []
    headers = ["stage", "rank", "modules", "forward", "backward", *recomputing, "send", "in flight"]
    legend = "times: of one microbatch; in flight: microbatches whose activations it holds at most"
    legend += "; backward: with recomputation" if recomputes else ""
    return (
        table(
            first_and_last(rows, MOST_ROWS),
            headers,
            "rrlrrr" + "r" * (len(headers) - 6),
            flexible=(2,),
        )
        + "\n"
        + legend
    )


def rank_table(plan: PlanData) -> str:
    """A row for each pipeline rank: its memory by kind, and the part of the schedule it waits."""
    line = simulate_plan(plan)
    kinds = [kind for kind in _COLUMNS if any(_of(device, kind) for device in plan.memory)]
    rows: list[Cells] = []
    for rank, device in enumerate(plan.memory):
        waits = line.bubble[rank] / line.seconds if line.seconds else 0.0
        memory = [format_bytes(_of(device, kind)) for kind in kinds]
        rows.append([str(rank), *memory, format_bytes(sum(device.values())), f"{waits:.1%}"])
    headers = ["memory of rank", *kinds, "total", "waits"]
    legend = (
        "memory: when it is most; parameters: with copies in other forms; transient: with "
        "what is recomputed;\n"
    )
    legend += "in, out: the batch, and what the model returns besides its loss;\n"
    legend += (
        "waits: for other ranks and their tensors, of the time from the first forward to "
        "the last backward"
    )
    return table(first_and_last(rows, MOST_ROWS), headers, "r" * len(headers)) + "\n" + legend


def _of(device: Mapping[str, float], kind: str) -> float:
    return sum(device.get(each, 0.0) for each in _COLUMNS[kind])


def recomputation_table(plan: PlanData) -> str:
    """A row for the recomputed tensors of each module, the most freed bytes first; "" for none."""
    what = "recomputed in the backward"
    return _table_by_module(plan, what, plan.recomputed, "recomputed", ("frees", "costs"))


def offload_table(plan: PlanData) -> str:
    """A row for the results of each module that the host keeps, the most bytes first; "" for
    none.
    """
    what = "kept by the host until the backward"
    return _table_by_module(plan, what, plan.offloaded, "offloaded", ("moves", "costs"))


def _table_by_module(
    plan: PlanData, what: str, names: Sequence[str], key: str, columns: tuple[str, str]
) -> str:
    """The table of ``plan.rows[key]``, with the columns of their bytes and seconds. A plan without
    rows, written by hand, has the ``names``.
    """
    if not names:
        return ""
    found = sorted(plan.rows.get(key, []), key=lambda row: -row[3])
    if not found:
        return textwrap.fill(f"{what}: {', '.join(names)}", WIDTH, max_lines=2, placeholder=" …")
    rows = [[_where(row[0], row[1]), *_sums([row])] for row in found[:_SHOWN]]
    if rest := found[_SHOWN:]:
        rows.append([f"{len(rest)} others", *_sums(rest)])
    rows.append(["total", *_sums(found)])
    headers = [what, "times", *columns]
    legend = f"{columns[0]}: of all microbatches in flight; costs: in a step"
    legend += "; both on one device of each stage together" if len(plan.stages) > 1 else ""
    return table(rows, headers, "lrrr", flexible=(0,)) + "\n" + legend


def _where(block: str, modules: Any) -> str:
    names = modules if isinstance(modules, str) else ", ".join(modules)
    return ": ".join(filter(None, (block, names))) or "(root)"


def _sums(rows: list[list[Any]]) -> Cells:
    times, freed, took = (sum(row[i] for row in rows) for i in (2, 3, 4))
    return [str(times), format_bytes(freed), format_seconds(took)]
