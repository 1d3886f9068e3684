"""What a plan does, in the field's words, as rows of plain data: made while the graph is at hand,
so that a loaded plan reports the same.

``rows["model"]``
    [name, value]: samples of the global batch, trainable parameters.
``rows["blocks"]`` [block, count, module, operator, shape, words, mode]: one row for each distinct
    operator that a reader looks for, in the order they run. ``block`` is the repeated part of the
    module path, with "*" for its number ("" outside blocks), ``count`` how often it occurs,
    ``words`` one word for each mesh axis, ``mode`` the name of the tensor or sequence parallelism
    that they make, "" where it has none.
``rows["collectives"]`` [part, collective, axis, phase, block, modules, times, bytes, seconds]: what
    is sent in a step, largest first. ``part`` is the kind of :attr:`Plan.seconds` that it belongs
    to: the rows of "conversions" and of "gradient synchronisation" add up to these. ``axis`` is the
    mesh axis's number (-1 for local copies, one past the last for the pipeline), ``bytes`` and
    ``seconds`` are one rank's (of a pipeline's, the one that has most to do), of all ``times``
    together.
``rows["recomputed"]`` [block, what, times, bytes, seconds]: what is made again in the backward, and
    the bytes that this frees, of all microbatches in flight; in a step, on one device of each stage
    together. ``seconds`` add up to the stages' "recomputation" of all microbatches. What is kept
    only to make the others again has a row of negative bytes.
"""

from __future__ import annotations

import dataclasses

from autopar.ir.nodes import numel
from autopar.ir.plan_data import PlanData
from autopar.report.block_rows import BlockRows
from autopar.report.collective_rows import collectives
from autopar.report.module_paths import ModulePaths
from autopar.report.recomputation_rows import recomputed
from autopar.search.result.priced_plan import PricedPlan


def add_report_rows(plan: PlanData, found: PricedPlan) -> PlanData:
    """``plan`` with the rows that its report shows.

    Args:
        plan: what the search wrote down.
        found: the search's answer, with its prices.
    """
    analysis = found.analysis
    names = analysis.cached(ModulePaths)
    blocks = BlockRows(analysis, found, names)
    trainable = [n for n in analysis.state if n in analysis.differentiable]
    rows = {
        "model": [
            ["samples", analysis.batch.size * plan.microbatches],
            ["parameters", sum(map(numel, trainable))],
        ],
        "blocks": blocks.rows(),
        "collectives": collectives(found, names, blocks),
    }
    if plan.recomputed:
        rows["recomputed"] = recomputed(found, names)
    return dataclasses.replace(plan, rows=rows, notes=tuple(dict.fromkeys(plan.notes)))
