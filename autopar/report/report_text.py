"""The report of a plan as text, at most WIDTH columns wide."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.formatting.table import (
    MOST_ROWS,
    WIDTH,
    Cells,
    format_bytes,
    format_seconds,
    table,
    truncate,
)
from autopar.ir.plan_data import PlanData
from autopar.report.pipeline_tables import (
    offload_table,
    rank_table,
    recomputation_table,
    stage_table,
)
from autopar.report.report_header import header
from autopar.report.timeline import draw_timeline

_SHOWN = 12  # collectives with a row of their own
_SHAPE_WIDTH = 24  # columns of a shape at most
_WHOLE = "(block)"  # the module of operators that lie directly in a block


def report_text(plan: PlanData) -> str:
    """The report of a plan: mesh, time, memory, blocks, collectives, and the optimality gap."""
    pipelined = (
        [stage_table(plan), draw_timeline(plan, MOST_ROWS), rank_table(plan)]
        if len(plan.stages) > 1
        else [_memory(plan)]
    )
    parts = [
        header(plan),
        _times(plan),
        *pipelined,
        recomputation_table(plan),
        offload_table(plan),
        _blocks(plan),
        _collectives(plan),
        _notes(plan),
        _planning(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _times(plan: PlanData) -> str:
    return _shares("step time", plan.seconds, format_seconds)


def _memory(plan: PlanData) -> str:
    return _shares("memory of a device", plan.nbytes, format_bytes)


def _shares(title: str, kinds: dict[str, float], unit: Any) -> str:
    total = sum(kinds.values())
    rows = [
        [kind, unit(value), f"{value / total if total else 0:.1%}"] for kind, value in kinds.items()
    ]
    return table([*rows, ["total", unit(total), ""]], [title, "", ""], "lrr")


def _blocks(plan: PlanData) -> str:
    rows: list[Cells] = []
    axes, named = _merged_axes(plan), any(row[6] for row in plan.rows.get("blocks", []))
    for (block, times), members in itertools.groupby(
        plan.rows.get("blocks", []), key=lambda row: (row[0], row[1])
    ):
        lines = [
            [
                modules,
                operator,
                truncate(shape, _SHAPE_WIDTH),
                *(words[columns[0]] for _, columns in axes),
                *([mode] if named else []),
            ]
            for modules, operator, shape, words, mode in _merged_rows(list(members))
        ]
        title = f"{block} (x{times})"
        if block and any(line[0] != _WHOLE for line in lines):
            rows.append([title, *[""] * (len(axes) + 2 + named)])
            lines = [[f"  {line[0]}", *line[1:]] for line in lines]
        elif block:
            lines = [[title, *line[1:]] for line in lines]
        rows += lines
    headers = ["module", "operator", "shape", *(name for name, _ in axes), *["mode"] * named]
    return table(rows, headers, "l" * len(headers), flexible=(0, 2)) if rows else ""


def _merged_axes(plan: PlanData) -> list[tuple[str, list[int]]]:
    """Titles and mesh axes of the columns; neighbouring axes with the same words share a column."""
    blocks = plan.rows.get("blocks", [])
    axes: list[tuple[str, list[int]]] = []
    for axis, (name, size) in enumerate(plan.mesh.items()):
        title = f"{name} ({size})"
        if axes and all(row[5][axis] == row[5][axis - 1] for row in blocks):
            axes[-1] = (f"{axes[-1][0]}, {title}", [*axes[-1][1], axis])
        else:
            axes.append((title, [axis]))
    return axes


def _merged_rows(members: Sequence[list[Any]]) -> Iterator[tuple[str, str, str, list[str], str]]:
    """Merges neighbouring rows that are planned alike: ``self_attn.q_proj, k_proj, v_proj``."""

    def same(row: list[Any]) -> tuple[str, ...]:
        return (row[2].rpartition(".")[0] if "." in row[2] else row[2], row[3], row[6], *row[5])

    for _, group in itertools.groupby(members, key=same):
        rows = list(group)
        yield (
            _listed([row[2] for row in rows]),
            rows[0][3],
            ", ".join(dict.fromkeys(row[4] for row in rows)),
            rows[0][5],
            rows[0][6],
        )


def _listed(modules: Sequence[str]) -> str:
    """``a.b``, ``a.c`` and ``d`` as ``a.b, c, d``."""
    names: list[str] = []
    parent = None
    for module in dict.fromkeys(modules):
        before, _, name = module.rpartition(".")
        names.append(name if before == parent and name else module or _WHOLE)
        parent = before
    return ", ".join(names)


def _collectives(plan: PlanData) -> str:
    found = [row for row in plan.rows.get("collectives", []) if row[7]]
    rows = [_collective(plan, row) for row in found[:_SHOWN]]
    if rest := found[_SHOWN:]:
        times, total, took = (sum(row[i] for row in rest) for i in (6, 7, 8))
        rows.append(
            [
                f"{len(rest)} others",
                "",
                "",
                str(times),
                "",
                format_bytes(total),
                format_seconds(took),
            ]
        )
    if not rows:
        return (
            "nothing is sent between ranks"
            if plan.pipeline == 1
            else "nothing is sent between ranks but from stage to stage"
        )
    headers = ["sent in a step", "axis", "tensors of", "times", "each", "bytes", "time"]
    legend = "bytes: of one rank's tensor, whole along the axis; "
    legend += "time: what computation does not hide"
    hidden: dict[str, float] = {}
    for part, *taken in plan.rows.get("hidden", ()):
        hidden[part] = hidden.get(part, 0.0) + min(taken)
    if hidden:
        parts = ", ".join(f"{format_seconds(taken)} of {part}" for part, taken in hidden.items())
        legend += f" (it hides {parts})"
    legend += "; of the pipeline rank with most to do" if plan.pipeline > 1 else ""
    return table(rows, headers, "lllrrrr", flexible=(2,)) + "\n" + textwrap.fill(legend, WIDTH)


def _collective(plan: PlanData, row: list[Any]) -> Cells:
    part, kind, axis, phase, block, modules, times, total, took = row
    if axis < 0:
        what, where = (
            "copies on each rank",
            "to join and cut parts" if part == "conversions" else part,
        )
    else:
        what, where = (
            f"{kind.replace('_', '-')} {_phase(part, phase)}",
            f"{block}: {_listed(modules)}" if any(modules) else block,
        )
    name = (*plan.mesh_names, "pipeline")[axis] if axis >= 0 else ""
    return [
        what,
        name,
        where,
        str(times),
        format_bytes(total / times) if times else "",
        format_bytes(total),
        format_seconds(took),
    ]


def _phase(part: str, phase: str) -> str:
    if part == "recomputation":
        return "again"
    if part == "gradient synchronisation":
        return "of parameters" if phase == "forward" else "of gradients"
    return "inside a kernel" if part == "compute" else phase


def _notes(plan: PlanData) -> str:
    return "\n".join(
        textwrap.fill(note, WIDTH, initial_indent="note: ", subsequent_indent="      ")
        for note in plan.notes
    )


def _planning(plan: PlanData) -> str:
    total = plan.timings.get("total", sum(plan.timings.values()))
    phases = ", ".join(
        f"{phase} {format_seconds(took)}"
        for phase, took in plan.timings.items()
        if phase != "total"
    )
    asked = (
        f"asked for: {', '.join(f'{name}={value!r}' for name, value in plan.options.items())}"
        if plan.options
        else ""
    )
    lines = [asked, f"planned in {format_seconds(total)}: {phases}" if phases else ""]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines if line)
