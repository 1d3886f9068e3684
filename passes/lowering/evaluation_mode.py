"""The program for ``eval()``: dropout is off and BatchNorm takes its running statistics, in the
whole model or in some of its modules.
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
from autopar.passes.canonical.normal_form import write_normal_form
from autopar.passes.canonical.simplify import simplify
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.pipeline.recompute import operator_of

aten = torch.ops.aten

# Which argument of an operator tells it that the model trains, and the argument's value in
# evaluation.
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
# Without running statistics these operators compute the same in evaluation.
_WITH_STATISTICS = (
    aten.batch_norm.default,
    aten.instance_norm.default,
    graph_kernels.sync_batch_norm,
)


@dataclass(frozen=True)
class EvaluationMode:
    """How a model's evaluation differs from its training.

    Attributes:
        unswitched: the calls, as (module, operator), that ``eval()`` leaves as they are although
            ``_SWITCHES`` knows their operators.
        updates: the buffers that the model changes in evaluation, too.
        mismatch: the place of another difference, in words; None if the switches and ``updates``
            explain all differences.
    """

    unswitched: frozenset[tuple[str, str]] = frozenset()
    updates: frozenset[str] = frozenset()
    mismatch: str | None = None


def is_switched(node: fx.Node) -> bool:
    """Whether ``eval()`` changes what a call computes."""
    return _switch(node) is not None and not node.meta.get("unswitched")


def _switch(node: fx.Node) -> tuple[int, Any] | None:
    """The place of the argument to change, and the argument's value in evaluation."""
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


def evaluation_graph(
    graph: fx.Graph,
    buffers: Sequence[fx.Node | None] = (),
    off: Callable[[fx.Node], bool] = is_switched,
) -> fx.Graph:
    """A copy of ``graph`` that evaluates.

    Args:
        buffers: for each of the last outputs, which are new values of buffers, the placeholder of
            the buffer if evaluation returns the old value, else None.
        off: which of the calls that have a switch to switch.
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


def mark_unswitched(graph: fx.Graph, mode: EvaluationMode) -> None:
    """Set ``meta["unswitched"]`` on the calls of a captured graph that ``eval()`` leaves as they
    are.
    """
    for node in graph.nodes:
        if _switch(node) is not None and _kind(node) in mode.unswitched:
            node.meta["unswitched"] = True


def find_evaluation_mode(trained: CapturedModel, evaluated: CapturedModel) -> EvaluationMode:
    """What turns the training graph into the graph that was traced in ``eval()``."""
    before, after = _kinds(trained.graph), _kinds(evaluated.graph)
    unswitched = frozenset(kind for kind, count in after.items() if before[kind] == count)
    updates = frozenset(evaluated.updates)
    switched = evaluation_graph(trained.graph, off=lambda node: _kind(node) not in unswitched)
    traced = evaluation_graph(evaluated.graph, off=lambda node: False)
    ours, theirs = _calls(switched, trained, updates), _calls(traced, evaluated, updates)
    mismatch = None
    if [call for call, _ in ours] != [call for call, _ in theirs]:
        pairs = zip(ours, theirs, strict=False)
        node = next((a[1] for a, b in pairs if a[0] != b[0]), (ours or theirs)[-1][1])
        mismatch = (
            f"in module {node.meta.get('module') or '(root)'} at "
            f"{node.meta.get('source') or 'an unknown line'}"
        )
    return EvaluationMode(unswitched, updates & set(trained.updates), mismatch)


def _kinds(graph: fx.Graph) -> Counter[tuple[str, str]]:
    return Counter(_kind(node) for node in graph.nodes if _switch(node) is not None)


def _kind(node: fx.Node) -> tuple[str, str]:
    return node.meta.get("module", ""), str(node.target)


def _calls(
    graph: fx.Graph, captured: CapturedModel, updates: Collection[str]
) -> list[tuple[tuple[Any, ...], fx.Node]]:
    """The calls that compute the user's outputs and ``updates``, in a form that can be compared;
    changes ``graph``.
    """
    output = graph.output_node()
    size = captured.out_spec.num_leaves
    values: Any = output.args[0]
    new = dict(zip(captured.updates, values[size:], strict=False))
    output.args = ((*values[:size], *(new[name] for name in sorted(updates) if name in new)),)
    simplify(graph, set())  # drops operators that are the identity once they are switched
    write_normal_form(graph)
    eliminate_dead_code(graph, keep=lambda n: False)
    names = {i.name: i.target for i in captured.inputs}
    calls = [n for n in graph.nodes if n.op != "placeholder"]
    number: dict[fx.Node, Any] = {
        n: names[n.name] for n in graph.nodes if n.op == "placeholder"
    } | {n: i for i, n in enumerate(calls)}
    return [
        ((n.target, map_arg((n.args, n.kwargs), lambda a: f"node {number[a]}")), n) for n in calls
    ]
