"""Microbatches: an axis in time, along which the loss is a pending sum.

The graph was captured on one microbatch. What it says of the whole batch must still come out: a mean over samples is divided by the
number of microbatches, and the number of targets that a loss divides by is counted over all of them before the first one runs.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.capture import Captured, Input
from autopar.errors import PlanError
from autopar.graph import describe, new_node, operands
from autopar.layout import I, P, R, S, Type
from autopar.rules import Rule
from autopar.runtime import kernels

aten = torch.ops.aten


def accumulate(analysis: Analysis, microbatches: int) -> tuple[Captured, fx.Graph | None]:
    """The captured graph of one microbatch, changed so that losses and gradients add up to those of the whole batch.

    Returns it and, where a loss counts its targets, a graph from the same inputs to those counts, to be summed over microbatches and
    given to each as further inputs.

    Raises:
        PlanError: an operator mixes samples in a way that does not add up.
    """
    captured = analysis.captured
    counts = [n for n in captured.graph.nodes if n.target is kernels.target_count]
    prologue = _prologue(captured, counts) if counts else None
    types = _types(analysis, set(counts), microbatches)
    if types[analysis.loss] is not P:
        _scale(captured.graph, analysis.loss, microbatches)
    inputs = list(captured.inputs)
    last = [n for n in captured.graph.nodes if n.op == "placeholder"][-1]
    for i, count in enumerate(counts):
        with captured.graph.inserting_after(last):
            last = captured.graph.placeholder(f"target_count_{i}")
        last.meta = dict(count.meta)
        count.replace_all_uses_with(last)
        captured.graph.erase_node(count)
        inputs.append(Input(last.name, "count", f"target_count_{i}"))
    return dataclasses.replace(captured, inputs=tuple(inputs)), prologue


def _prologue(captured: Captured, counts: list[fx.Node]) -> fx.Graph:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = set(counts)
    for node in reversed(captured.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in captured.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[c] for c in counts))
    return graph


def _types(analysis: Analysis, counts: set[fx.Node], microbatches: int) -> dict[fx.Node, Type]:
    """Each tensor's type along time: R (the same for each microbatch), S (its own part), P (a pending sum)."""
    heads = set(analysis.inputs)
    types: dict[fx.Node, Type] = {}
    for node in list(analysis.graph.nodes):
        if node.op == "placeholder":
            dim = analysis.batch.dim(node) if node in heads else None
            types[node] = R if dim is None else S(dim)
        elif node.op == "call_function":
            tensors = [n for n, _ in operands(node)]
            types[node] = R if node in counts else _type(analysis, node, tensors, types, microbatches)
    return types


def _type(analysis: Analysis, node: fx.Node, tensors: list[fx.Node], types: dict[fx.Node, Type], microbatches: int) -> Type:
    rule = analysis.rules.get(node)
    found = [types[t] for t in tensors]
    if all(t is R for t in found):
        return R
    if rule is None:
        raise PlanError(
            f"micro_batch_size: {describe(node)} has no rule, so nothing tells that it keeps samples apart; register_rule gives it one"
        )
    option = _match(rule, found)
    if option is None and P in found:
        # What is the same for each microbatch joins a pending sum with a share of itself.
        for k, t in enumerate(tensors):
            if found[k] is R:
                trial = [P if i == k else f for i, f in enumerate(found)]
                if _match(rule, trial) is P:
                    with analysis.graph.inserting_before(node):
                        share = new_node(analysis.graph, aten.mul.Tensor, (t, 1.0 / microbatches), like=t)
                    node.replace_input_with(t, share)
                    types[share] = P
                    return P
    if option is None:
        raise PlanError(
            f"micro_batch_size: {describe(node)} mixes samples, so losses of microbatches do not add up; leave micro_batch_size out"
        )
    if option is P and node.target is aten.mean.dim:
        types[_scale(analysis.graph, node, microbatches)] = P
    return option


def _match(rule: Rule, found: list[Type]) -> Type | None:
    """The output's type. What is the same for each microbatch is also its own part of the batch: the model made it for a microbatch."""
    for option in rule.options():
        if option.out is not I and all(f is i or (f is R and i is not P) for f, i in zip(found, option.ins, strict=True)):
            return option.out
    return None


def _scale(graph: fx.Graph, node: fx.Node, microbatches: int) -> fx.Node:
    with graph.inserting_after(node):
        scaled = new_node(graph, aten.mul.Tensor, (node, 1.0 / microbatches), like=node)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return scaled
