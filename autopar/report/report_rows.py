"""Adds to a plan the rows of its report, as plain data.

The rows are made while the graph is at hand, so a plan that is loaded later reports the same.

``rows["model"]``
    [name, value]: samples of the global batch, and trainable parameters.
``rows["blocks"]``
    [block, count, module, operator, shape, words, mode]: one row for each distinct operator that a
    reader looks for, in the order they run. ``block`` is the repeated part of the module path, with
    "*" for its number ("" outside blocks), and ``count`` the number of such blocks. ``words`` has
    one word for each mesh axis. ``mode`` is the mode of tensor or sequence parallelism, or "".
``rows["collectives"]``
    [part, collective, axis, phase, block, modules, times, bytes, seconds]: the collectives of a
    step, the longest first. ``part`` is the kind of :attr:`Plan.seconds` that counts the row; the
    rows of "conversions" and "gradient synchronisation" add up to these seconds. ``axis`` is the
    number of the mesh axis: -1 for local copies, one past the last axis for the pipeline. ``bytes``
    and ``seconds`` are totals of all ``times`` on one rank; of a pipeline, on the busiest rank.
``rows["hidden"]``
    [part, collectives, computation]: the step is shorter by the smaller one of these seconds, which
    collectives take besides and which computation hides: of parameters before the forward, and of
    gradients, those of all that can be hidden and those of the computation that hides. Of
    collectives in the graph, both are the seconds that are hidden.
``rows["recomputed"]``
    [block, operators, times, bytes, seconds]: the tensors that the backward computes again. They
    count for one step, on one device of each stage together. ``bytes`` are the bytes that
    recomputation frees, for all microbatches in flight. ``seconds`` add up to the stages'
    "recomputation". Tensors that are kept only for recomputation have a row of negative bytes.
``rows["offloaded"]``
    [block, operators, times, bytes, seconds]: the results that the host keeps between the forward
    and the backward, counted alike. ``seconds`` are those of the copies there and back that no
    computation hides.
"""

from __future__ import annotations

import dataclasses

from autopar.ir.nodes import numel
from autopar.ir.plan_data import PlanData
from autopar.report.block_rows import BlockRows
from autopar.report.collective_rows import collective_rows, hidden_rows
from autopar.report.module_paths import ModulePaths
from autopar.report.recomputation_rows import offload_rows, recomputation_rows
from autopar.search.result.priced_plan import PricedPlan


def add_report_rows(plan: PlanData, found: PricedPlan) -> PlanData:
    """``plan`` with the rows of its report.

    Args:
        plan: the plan.
        found: the priced plan of the search, which the plan was written from.
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
        "collectives": collective_rows(found, names, blocks),
        "hidden": hidden_rows(found),
    }
    if plan.recomputed:
        rows["recomputed"] = recomputation_rows(found, names)
    if plan.offloaded:
        rows["offloaded"] = offload_rows(found, names)
    return dataclasses.replace(plan, rows=rows, notes=tuple(dict.fromkeys(plan.notes)))
