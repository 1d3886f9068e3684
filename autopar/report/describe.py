"""What a plan does, in the field's words, as rows of plain data: made while the graph is at hand, so that a loaded plan reports the same.

``rows["model"]``
    [name, value]: samples of the global batch, trainable parameters.
``rows["blocks"]``
    [block, count, module, operator, shape, words]: one row for each distinct operator that a reader looks for, in the order they run.
    ``block`` is the repeated part of the module path, with "*" for its number ("" outside blocks), ``count`` how often it occurs,
    ``words`` one word for each mesh axis.
``rows["collectives"]``
    [part, collective, axis, phase, block, modules, times, bytes, seconds]: what is sent in a step, largest first. ``part`` is the kind
    of :attr:`Plan.seconds` that it belongs to: the rows of "conversions" and of "gradient synchronisation" add up to these. ``axis`` is
    the mesh axis's number (-1 for local copies), ``bytes`` and ``seconds`` are one rank's, of all ``times`` together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.analysis import Analysis
from autopar.graph import numel, operands, shape
from autopar.plan import Plan
from autopar.report.names import Names
from autopar.report.sent import collectives
from autopar.report.words import Words, is_loss
from autopar.search.found import Found
from autopar.search.problem import Vertex
from autopar.search.strategies import Storage, Strategy

Row = list[Any]


def describe(plan: Plan, analysis: Analysis, found: Found) -> Plan:
    """``plan`` with the rows that its report shows.

    Args:
        plan: what the search wrote down.
        analysis: of the graph it was made for.
        found: the search's answer, with its prices.
    """
    names, words = Names(analysis, found), Words(analysis)
    trainable = [n for n in analysis.state if n in analysis.differentiable]
    rows = {
        "model": [["samples", analysis.batch.size * plan.microbatches], ["parameters", sum(map(numel, trainable))]],
        "blocks": [row for v in found.problem.vertices if (row := _block(v, found, names, words)) is not None],
        "collectives": collectives(analysis, found, names),
    }
    return dataclasses.replace(plan, rows=rows, notes=tuple(dict.fromkeys(plan.notes)))


def _block(vertex: Vertex, found: Found, names: Names, words: Words) -> Row | None:
    """The row of a node, or None for one that a reader does not look for."""
    node, choice = vertex.node, found.choice(vertex.node)
    operator = words.operator(node)
    if operator is None or not isinstance(choice, Strategy):
        return None
    weights = words.weights(node)
    largest = max(weights, key=lambda k: numel(weights[k]), default=None)
    text = [words.word(node, factor, choice.out[axis].kind) for axis, factor in enumerate(choice.factors)]
    storage = found.choice(weights[largest]) if largest is not None else None
    if isinstance(storage, Storage):
        parts = [s.is_shard and not u.is_shard for s, u in zip(storage.stored, storage.used, strict=True)]
        text = [f"{word}, ZeRO" if part else word for word, part in zip(text, parts, strict=True)]
    shown = node if largest is None and not is_loss(node) else operands(node)[largest or 0][0]
    block, module = names.split(node)
    if vertex.count == 1:
        block, module = "", ".".join(filter(None, (block, module))) or "(root)"
    return [block, vertex.count, module, operator, "x".join(map(str, shape(shown))), text]
