"""The tensors that autograd saves for each call of a model, for whole (unsplit) operators.

:mod:`autopar.memory.saved_activations` does the same for a plan on one rank.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec, input_spec, with_grad, with_operands
from autopar.rules import Rule


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that the backward of one call reads.

    Attributes:
        operands: the numbers of the operands that it reads, in the order of ``ir.nodes.operands``.
        output: whether it reads a result of the call.
        nbytes: bytes of tensors that are neither, such as statistics, masks and logsumexp.
        alias: the number of the operand whose storage the result shares (a view), None for a result
            with its own storage.
        internal: ``nbytes`` tensor by tensor. A tensor comes with the factors of the call's rule
            that split it when they split the operands.
        forward, backward: the kernels that the call launches.
    """

    operands: frozenset[int]
    output: bool
    nbytes: float
    alias: int | None
    internal: tuple[tuple[float, frozenset[str]], ...] = field(default=(), compare=False)
    forward: tuple[KernelLaunch, ...] = field(default=(), compare=False)
    backward: tuple[KernelLaunch, ...] = field(default=(), compare=False)


def trace_saved_tensors(
    nodes: Iterable[fx.Node],
    differentiable: Collection[fx.Node],
    device_type: str,
    tracer: OperatorTracer | None = None,
    representative: Mapping[fx.Node, fx.Node] | None = None,
    rules: Mapping[fx.Node, Rule | None] | None = None,
) -> dict[fx.Node, SavedTensors]:
    """The saved tensors of each call of a canonical graph.

    Args:
        nodes: nodes in the order of the graph.
        differentiable: the nodes that need a gradient.
        device_type: where the program will run, ``"cpu"`` or ``"cuda"``.
        tracer: a tracer for this device type, with its earlier traces.
        representative: for a node an equal node: for an operand that is not in ``nodes``, one that
            is. A call is not traced where its representative was, with operands like its own.
        rules: the rules of calls. A call without a rule counts as unsplit.
    """
    tracer, equal = tracer or OperatorTracer(device_type), representative or {}
    values: dict[fx.Node, Any] = {}
    given: dict[fx.Node, list[Any]] = {}  # the operands of representatives
    found: dict[fx.Node, SavedTensors] = {}

    def value(node: fx.Node) -> Any:
        return values[node] if node in values else values[equal[node]]

    for node in nodes:
        if node.op == "placeholder":
            values[node] = input_spec(node.meta["val"], node in differentiable)
        elif node.target is operator.getitem:
            source = node.all_input_nodes[0]
            values[node] = value(source)[node.args[1]]
            found[node] = SavedTensors(frozenset(), False, 0.0, 0)
        elif node.op == "call_function":
            grad = node in differentiable
            inputs = [with_grad(value(n), grad and n in differentiable) for n, _ in operands(node)]
            alike = equal.get(node, node)
            if alike is not node and given.get(alike) == inputs:
                values[node], found[node] = values[alike], found[alike]
                continue
            given[node] = inputs
            trace = _trace(node, inputs, tracer)
            values[node] = trace.value
            internal = _internal(node, inputs, trace, tracer, (rules or {}).get(node))
            found[node] = _saved_tensors(trace, internal)
    return found


def _trace(node: fx.Node, inputs: list[Any], tracer: OperatorTracer) -> OperatorTrace:
    return tracer.trace(node.target, *with_operands(node, inputs), node.meta["val"])  # type: ignore[arg-type]


def _saved_tensors(
    trace: OperatorTrace, internal: tuple[tuple[float, frozenset[str]], ...]
) -> SavedTensors:
    aliases = {r.alias for r in trace.results}
    return SavedTensors(
        trace.operands,
        any(r.saved for r in trace.results),
        float(sum(trace.internal)),
        aliases.pop() if len(aliases) == 1 else None,
        internal,
        trace.forward,
        trace.backward,
    )


def _internal(
    node: fx.Node,
    inputs: list[Any],
    trace: OperatorTrace,
    tracer: OperatorTracer,
    rule: Rule | None,
) -> tuple[tuple[float, frozenset[str]], ...]:
    """The bytes of each saved tensor that is no operand and no result, with its factors.

    A factor splits such a tensor if the tensor gets smaller when the operands have only a part of
    the factor. For example, a mask for all heads stays the same on a rank that has some heads.
    """
    splits: list[set[str]] = [set() for _ in trace.internal]
    for factor, size in rule.sizes.items() if rule is not None and trace.internal else ():
        ways = next((n for n in range(2, size + 1) if size % n == 0), 1)
        part = [_part(x, dims, factor, ways) for x, dims in zip(inputs, rule.operands, strict=True)]  # type: ignore[union-attr]
        smaller = _trace(node, part, tracer).internal
        if len(smaller) == len(trace.internal):  # else the call does not take such a part
            for found, before, after in zip(splits, trace.internal, smaller, strict=True):
                found |= {factor} if after < before else set()
    return tuple(
        (float(nbytes), frozenset(found))
        for nbytes, found in zip(trace.internal, splits, strict=True)
    )


def _part(value: Any, dims: Sequence[Collection[str]], factor: str, ways: int) -> Any:
    """``value`` with dims of the factor cut in ``ways`` parts; no tensor: as it is."""
    if not isinstance(value, TensorSpec):
        return value
    return value._replace(
        shape=tuple(
            n // ways if factor in factors else n
            for n, factors in zip(value.shape, dims, strict=True)
        )
    )
