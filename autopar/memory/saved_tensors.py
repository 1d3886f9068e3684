"""What autograd keeps of each call between its forward and its backward. Of a whole plan on one
rank: :mod:`autopar.memory.saved_activations`.
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
    """What the backward of one call reads.

    Attributes:
        operands: the numbers (in the order of ``graph.operands``) of those whose value it reads.
        output: whether it reads what the call returned.
        nbytes: of tensors that are neither: statistics, masks, logsumexp.
        alias: the operand whose memory the result shares (a view), None if it has its own.
        internal: ``nbytes``, tensor by tensor, with the factors of the call's rule along which it
            is split with the operands.
        forward, backward: the kernels that it launches.
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
    autograd: OperatorTracer | None = None,
    representative: Mapping[fx.Node, fx.Node] | None = None,
    rules: Mapping[fx.Node, Rule | None] | None = None,
) -> dict[fx.Node, SavedTensors]:
    """What autograd keeps of each call of a canonical graph, for the whole (global) operators.

    Args:
        nodes: in the order of the graph.
        differentiable: those that need a gradient.
        device_type: where the program will run, ``"cpu"`` or ``"cuda"``.
        autograd: what was asked before, for the same device type.
        representative: for an operand that is not among ``nodes`` one that is, and equal to it.
        rules: of calls; without them nothing is taken to be split.
    """
    equal = representative or {}
    autograd = autograd or OperatorTracer(device_type)
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, SavedTensors] = {}
    for node in nodes:
        if node.op == "placeholder":
            values[node] = input_spec(node.meta["val"], node in differentiable)
        elif node.target is operator.getitem:
            values[node] = values[equal.get(node.all_input_nodes[0], node.all_input_nodes[0])][
                node.args[1]
            ]
            found[node] = SavedTensors(frozenset(), False, 0.0, 0)
        elif node.op == "call_function":
            grad = node in differentiable
            inputs = [
                with_grad(values[equal.get(n, n)], grad and n in differentiable)
                for n, _ in operands(node)
            ]
            answer = autograd.trace(node.target, *with_operands(node, inputs), node.meta["val"])  # type: ignore[arg-type]
            values[node] = answer.value
            aliases = {r.alias for r in answer.results}
            alias = aliases.pop() if len(aliases) == 1 else None
            internal = _internal(node, inputs, answer, autograd, (rules or {}).get(node))
            found[node] = SavedTensors(
                answer.operands,
                any(r.saved for r in answer.results),
                float(sum(answer.internal)),
                alias,
                internal,
                answer.forward,
                answer.backward,
            )
    return found


def _internal(
    node: fx.Node,
    inputs: list[Any],
    answer: OperatorTrace,
    autograd: OperatorTracer,
    rule: Rule | None,
) -> tuple[tuple[float, frozenset[str]], ...]:
    """Each tensor that is neither operand nor result, with the factors along which it is split:
    those that, where operands have but a part of them, make it smaller. A mask that counts for all
    heads, say, is no smaller on a rank that has some of them."""
    splits: list[set[str]] = [set() for _ in answer.internal]
    for factor, size in rule.sizes.items() if rule is not None and answer.internal else ():
        ways = next((n for n in range(2, size + 1) if size % n == 0), 1)
        part = [_part(x, dims, factor, ways) for x, dims in zip(inputs, rule.operands, strict=True)]  # type: ignore[union-attr]
        smaller = autograd.trace(node.target, *with_operands(node, part), node.meta["val"]).internal  # type: ignore[arg-type]
        if len(smaller) == len(answer.internal):  # else the call does not take a part as it is
            for found, before, after in zip(splits, answer.internal, smaller, strict=True):
                found |= {factor} if after < before else set()
    return tuple(
        (float(nbytes), frozenset(found))
        for nbytes, found in zip(answer.internal, splits, strict=True)
    )


def _part(value: Any, dims: Sequence[Collection[str]], factor: str, ways: int) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    return value._replace(
        shape=tuple(
            n // ways if factor in factors else n
            for n, factors in zip(value.shape, dims, strict=True)
        )
    )
