"""What autograd keeps between a forward and its backward: of each call, and of a whole plan on one rank."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.analysis import Analysis
from autopar.autograd import Autograd, placed, substituted, with_grad
from autopar.calls import Program
from autopar.graph import operands
from autopar.held import Held
from autopar.plan import NodePlan, Step


@dataclass(frozen=True)
class Saved:
    """What the backward of one call reads.

    Attributes:
        operands: the numbers (in the order of ``graph.operands``) of those whose value it reads.
        output: whether it reads what the call returned.
        nbytes: of tensors that are neither: statistics, masks, logsumexp.
        alias: the operand whose memory the result shares (a view), None if it has its own.
    """

    operands: frozenset[int]
    output: bool
    nbytes: float
    alias: int | None


def saved(
    nodes: Iterable[fx.Node],
    differentiable: Collection[fx.Node],
    device_type: str,
    autograd: Autograd | None = None,
    representative: Mapping[fx.Node, fx.Node] | None = None,
) -> dict[fx.Node, Saved]:
    """What autograd keeps of each call of a canonical graph, for the whole (global) operators.

    Args:
        nodes: in the order of the graph.
        differentiable: those that need a gradient.
        device_type: where the program will run, ``"cpu"`` or ``"cuda"``.
        autograd: what was asked before, for the same device type.
        representative: for an operand that is not among ``nodes`` one that is, and equal to it.
    """
    equal = representative or {}
    autograd = autograd or Autograd(device_type)
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Saved] = {}
    for node in nodes:
        if node.op == "placeholder":
            values[node] = placed(node.meta["val"], node in differentiable)
        elif node.target is operator.getitem:
            values[node] = values[equal.get(node.all_input_nodes[0], node.all_input_nodes[0])][node.args[1]]
            found[node] = Saved(frozenset(), False, 0.0, 0)
        elif node.op == "call_function":
            grad = node in differentiable
            inputs = [with_grad(values[equal.get(n, n)], grad and n in differentiable) for n, _ in operands(node)]
            answer = autograd.ask(node.target, *substituted(node, inputs), node.meta["val"])  # type: ignore[arg-type]
            values[node] = answer.value
            aliases = {r.alias for r in answer.results}
            alias = aliases.pop() if len(aliases) == 1 else None
            found[node] = Saved(answer.operands, any(r.saved for r in answer.results), float(answer.nbytes), alias)
    return found


def activation_bytes(
    analysis: Analysis,
    nodes: Mapping[str, NodePlan],
    conversions: Mapping[str, Mapping[str, tuple[Step, ...]]],
    sizes: Sequence[int],
    device_type: str,
    recomputed: Collection[str] = (),
) -> dict[int, float]:
    """Bytes that one rank's autograd holds for one microbatch between its forward and its backward, for each stage.

    Args:
        analysis: of the graph of one microbatch; one that is cut into stages says so by ``meta["stage"]``.
        nodes, conversions, recomputed: as in a plan.
        sizes: of the mesh of one stage.
        device_type: where the program will run.
    """
    return Held(Program(analysis, nodes, conversions, sizes, Autograd(device_type))).kept(recomputed)


def transient_bytes(
    analysis: Analysis,
    nodes: Mapping[str, NodePlan],
    conversions: Mapping[str, Mapping[str, tuple[Step, ...]]],
    sizes: Sequence[int],
    device_type: str,
    recomputed: Collection[str] = (),
) -> dict[int, float]:
    """Bytes that the backward of one microbatch holds at its worst beyond :func:`activation_bytes`, gradients aside, for each stage.

    The most that what is kept, less what the backward is done with, and what was computed again and is still to be read, come to.
    """
    return Held(Program(analysis, nodes, conversions, sizes, Autograd(device_type))).transient(recomputed)
