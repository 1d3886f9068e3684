"""Dims that consist of equal parts, such as a fused query, key and value, or a fused gate and up.

Where every reader of a tensor takes a dim apart into these parts, each part may be cut by itself:
then a rank gets its chunk of every part, and taking the parts apart sends nothing.
"""

from __future__ import annotations

from collections import defaultdict

import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.rules.registry import operator_name

FactorParts = dict[fx.Node, dict[str, int]]  # of a call: the number of parts, by factor
DimParts = dict[fx.Node, dict[int, int]]  # of a parameter: the number of parts, by dim


def fused_dims(analysis: Analysis) -> tuple[FactorParts, DimParts]:
    """The factors of calls and the dims of parameters that may be cut inside each of some equal
    parts: from the calls that take a tensor apart back to the product with a weight that computed
    it, and that weight.
    """
    # (tensor, dim, number of parts) -> the calls that take the dim apart, with the major factor of
    # each part
    readers: dict[tuple[fx.Node, int, int], dict[fx.Node, str]] = defaultdict(dict)
    for node, rule in analysis.rules.items():
        if rule is not None and (found := _taken_apart(analysis, node, rule)) is not None:
            dim, count, factor = found
            readers[operands(node)[0][0], dim, count][node] = factor
    calls: FactorParts = defaultdict(dict)
    parameters: DimParts = defaultdict(dict)
    for (tensor, dim, count), takers in readers.items():
        path: dict[fx.Node, str] = dict(takers)
        weights: dict[fx.Node, int] = {}
        if _comes_from_weights(analysis, tensor, dim, path, weights):
            for node, factor in path.items():
                calls[node][factor] = count
            for node, d in weights.items():
                parameters[node][d] = count
    return dict(calls), dict(parameters)


def _taken_apart(analysis: Analysis, node: fx.Node, rule: Rule) -> tuple[int, int, str] | None:
    """The dim of its operand that a call takes apart, the number of parts, and the factor that is
    the major one of each part; None where it takes nothing apart.
    """
    if rule.kind != "view" or len(rule.operands) != 1:
        return None
    for d, dim in enumerate(rule.operands[0]):
        if len(dim) < 2:
            continue
        counter, factor = dim[0], dim[1]
        begins_dim = any(out[:1] == (factor,) for out in rule.output)
        if begins_dim and (
            operator_name(node.target) == "aten.slice" or _is_selected(analysis, node, counter)
        ):
            return d, rule.sizes[counter], factor
    return None


def _is_selected(analysis: Analysis, node: fx.Node, factor: str) -> bool:
    """Whether a factor is a whole dim of a call's result, and each reader takes one entry of it."""
    rule = analysis.rules[node]
    if rule is None or (factor,) not in rule.output or not node.users:
        return False
    dim = rule.output.index((factor,))
    return all(_selects(analysis, user, dim) for user in node.users)


def _selects(analysis: Analysis, node: fx.Node, dim: int) -> bool:
    """Whether a call takes one entry of a dim of its operand, or only moves the dim to readers
    that all do.
    """
    rule = analysis.rules.get(node)
    if (
        rule is None
        or rule.kind != "view"
        or len(rule.operands) != 1
        or len(rule.operands[0][dim]) != 1
    ):
        return False
    (factor,) = rule.operands[0][dim]
    if any(factor in out for out in rule.output):
        return _is_selected(analysis, node, factor)
    return operator_name(node.target) in ("aten.select", "aten.slice")


def _comes_from_weights(
    analysis: Analysis,
    node: fx.Node,
    dim: int,
    path: dict[fx.Node, str],
    weights: dict[fx.Node, int],
) -> bool:
    """Whether a dim of a tensor that all readers take apart alike is a dim of weights: products
    with weights, elementwise operators and views lead from the weights to the tensor.

    Args:
        path: the calls from the weights to the readers, each with its factor of the dim. The calls
            that lead to ``node`` are added.
        weights: the parameters with the dim. Those that lead to ``node`` are added.
    """
    if node in analysis.state:
        weights[node] = dim
        return True
    rule = analysis.rules.get(node)
    if rule is None or len(rule.output[dim]) != 1 or not set(node.users) <= path.keys():
        return False
    (factor,) = rule.output[dim]
    if (
        rule.kind not in ("matmul", "elementwise", "view")
        or rule.kernels.get(factor) not in (None, "dropout")
        or factor in rule.whole
    ):
        return False
    path[node] = factor
    sources = [
        (operand, d, dims[d])
        for (operand, _), dims in zip(operands(node), rule.operands, strict=True)
        for d, factors in enumerate(dims)
        if factor in factors
    ]
    if not sources or any(factors != (factor,) for _, _, factors in sources):
        return False
    if rule.kind == "matmul" and any(analysis.batch.factors(n) for n, _, _ in sources):
        return False  # the dim comes from activations
    return all(_comes_from_weights(analysis, n, d, path, weights) for n, d, _ in sources)
