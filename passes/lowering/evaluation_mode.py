"""The program for ``eval()``: the same, with dropout off and BatchNorm on its running statistics;
of the whole model or of parts of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import eliminate_dead_code
from autopar.passes.canonical.normal_form import normal_form
from autopar.passes.canonical.simplify import simplify
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.pipeline.recompute import operator_of

aten = torch.ops.aten

# Which argument of an operator says that it trains, and what to put there.
_SWITCHES: dict[Any, tuple[int, Any]] = {
    aten.dropout.default: (2, False),
    aten.feature_dropout.default: (2, False),
    aten.alpha_dropout.default: (2, False),
    aten.feature_alpha_dropout.default: (2, False),
    aten.rrelu.default: (3, False),
    aten.batch_norm.default: (5, False),
    aten.instance_norm.default: (5, False),
    aten.scaled_dot_product_attention.default: (4, 0.0),
    graph_kernels.dropout: (2, False),
    graph_kernels.sync_batch_norm: (5, False),
    graph_kernels.attention: (4, 0.0),
    graph_kernels.ring_attention: (4, 0.0),
}
_WITH_STATISTICS = (
    aten.batch_norm.default,
    aten.instance_norm.default,
    graph_kernels.sync_batch_norm,
)  # nothing to switch where there are none


@dataclass(frozen=True)
class EvaluationMode:
    """How a model's evaluation differs from its training.

    Attributes:
        always: the calls, as (module, operator), that ``eval()`` leaves as they are, though others
            of their kind are switched.
        updates: the buffers that a call in ``eval()`` changes, too.
        unlike: where else it differs, in words; None for a model that is understood.
    """

    always: frozenset[tuple[str, str]] = frozenset()
    updates: frozenset[str] = frozenset()
    mismatch: str | None = None


def switched(node: fx.Node) -> bool:
    """Whether a call computes in training what it does not in ``eval()``."""
    return _switch(node) is not None and not node.meta.get("always")


def _switch(node: fx.Node) -> tuple[int, Any] | None:
    """The place of the argument to change, and its value."""
    if node.op != "call_function":
        return None
    target, args, before = operator_of(node.target), node.args, 0
    if target is graph_kernels.call_random_operator:  # (operator, mesh, node_id, axes, *args)
        target, before = args[0], 4
    if target not in _SWITCHES:
        return None
    place, value = _SWITCHES[target]
    place += before
    if (
        len(args) <= place
        or args[place] == value
        or (target in _WITH_STATISTICS and args[before + 3] is None)
    ):
        return None
    return place, value


def evaluation(
    graph: fx.Graph,
    buffers: Sequence[fx.Node | None] = (),
    off: Callable[[fx.Node], bool] = lambda node: not node.meta.get("always"),
) -> fx.Graph:
    """A copy of ``graph`` that evaluates.

    Args:
        buffers: for each of the last outputs, which are new values of buffers, the placeholder of
            the old one, to return instead.
        off: of the calls that evaluate otherwise than they train, which shall.
    """
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = list(copy.graph_copy(graph, copies))  # type: ignore[arg-type]
    first = len(outputs) - len(buffers)
    for i, old in enumerate(buffers, first):
        outputs[i] = outputs[i] if old is None else copies[old]
    copy.output(tuple(outputs))
    for node in copy.nodes:
        if (switch := _switch(node)) is not None and off(node):
            node.update_arg(*switch)
    return copy


def mark_always(graph: fx.Graph, evaluating: EvaluationMode) -> None:
    """Notes on the calls of a captured graph which of them ``eval()`` leaves as they are."""
    for node in graph.nodes:
        if _switch(node) is not None and _kind(node) in evaluating.always:
            node.meta["always"] = True


def evaluating(trained: CapturedModel, evaluated: CapturedModel) -> EvaluationMode:
    """How the training graph becomes what the model computes when traced in ``eval()``."""
    all_, still = _kinds(trained.graph), _kinds(evaluated.graph)
    always = frozenset(kind for kind, count in still.items() if all_[kind] == count)
    updates = frozenset(evaluated.updates)
    made = evaluation(trained.graph, off=lambda node: _kind(node) not in always)
    mine, theirs = (
        _calls(made, trained, updates),
        _calls(evaluation(evaluated.graph, off=lambda node: False), evaluated, updates),
    )
    mismatch = None
    if [call for call, _ in mine] != [call for call, _ in theirs]:
        pairs = zip(mine, theirs, strict=False)
        node = next((a[1] for a, b in pairs if a[0] != b[0]), (mine or theirs)[-1][1])
        mismatch = (
            f"in module {node.meta.get('module') or '(root)'} at "
            f"{node.meta.get('source') or 'an unknown line'}"
        )
    return EvaluationMode(always, updates & set(trained.updates), mismatch)


def _kinds(graph: fx.Graph) -> Counter[tuple[str, str]]:
    return Counter(_kind(node) for node in graph.nodes if _switch(node) is not None)


def _kind(node: fx.Node) -> tuple[str, str]:
    return node.meta.get("module", ""), str(node.target)


def _calls(
    graph: fx.Graph, captured: CapturedModel, updates: Collection[str]
) -> list[tuple[tuple[Any, ...], fx.Node]]:
    """The calls that a user's outputs and ``updates`` need, in normal form; ``graph`` is used
    up.
    """
    output = graph.output_node()
    size = captured.out_spec.num_leaves
    values: Any = output.args[0]
    new = dict(zip(captured.updates, values[size:], strict=False))
    output.args = ((*values[:size], *(new[name] for name in sorted(updates) if name in new)),)
    simplify(graph, set())  # an operator that was switched off is none
    normal_form(graph)
    eliminate_dead_code(graph, keep=lambda n: False)
    names = {i.name: i.target for i in captured.inputs}
    calls = [n for n in graph.nodes if n.op != "placeholder"]
    number: dict[fx.Node, Any] = {
        n: names[n.name] for n in graph.nodes if n.op == "placeholder"
    } | {n: i for i, n in enumerate(calls)}
    return [
        ((n.target, map_arg((n.args, n.kwargs), lambda a: f"node {number[a]}")), n) for n in calls
    ]
