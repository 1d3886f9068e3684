"""Dims that are equal parts side by side, which all that read them take apart: a fused query, key
and value, or a fused gate and up.
"""

from __future__ import annotations

from collections import defaultdict

import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.rules.registry import operator_name

Parts = dict[
    fx.Node, dict[str, int]
]  # of a call's factors: in how many equal parts each may be cut, each of them in chunks
Dims = dict[fx.Node, dict[int, int]]  # the same of the dims of parameters


def fused(analysis: Analysis) -> tuple[Parts, Dims]:
    """From where a tensor is taken apart back to the product with a weight that made it, and that
    weight.
    """
    starts: dict[tuple[fx.Node, int, int], dict[fx.Node, str]] = defaultdict(
        dict
    )  # of a tensor, its dim and its parts: who takes it apart
    for node, rule in analysis.rules.items():
        if rule is not None and (found := _takes_apart(analysis, node, rule)) is not None:
            dim, count, factor = found
            starts[operands(node)[0][0], dim, count][node] = factor
    calls: Parts = defaultdict(dict)
    state: Dims = defaultdict(dict)
    for (tensor, dim, count), readers in starts.items():
        path: dict[fx.Node, str] = dict(readers)
        ends: dict[fx.Node, int] = {}
        if _made(analysis, tensor, dim, path, ends):
            for node, factor in path.items():
                calls[node][factor] = count
            for node, d in ends.items():
                state[node][d] = count
    return dict(calls), dict(state)


def _takes_apart(analysis: Analysis, node: fx.Node, rule: Rule) -> tuple[int, int, str] | None:
    """Which dim of its operand a call takes apart, in how many parts, and the factor that is each
    part's major one.
    """
    if rule.kind != "view" or len(rule.operands) != 1:
        return None
    for d, dim in enumerate(rule.operands[0]):
        if len(dim) < 2:
            continue
        of_parts, factor = dim[0], dim[1]
        begins = any(out[:1] == (factor,) for out in rule.output)
        if begins and (
            operator_name(node.target) == "aten.slice" or _selected(analysis, node, of_parts)
        ):
            return d, rule.sizes[of_parts], factor
    return None


def _selected(analysis: Analysis, node: fx.Node, factor: str) -> bool:
    """Whether a factor of a call's result is a dim of its own, of which each reader takes one."""
    rule = analysis.rules[node]
    dim = (
        next((d for d, factors in enumerate(rule.output) if factors == (factor,)), None)
        if rule is not None
        else None
    )
    return (
        dim is not None
        and bool(node.users)
        and all(_selects(analysis, user, dim) for user in node.users)
    )


def _selects(analysis: Analysis, node: fx.Node, dim: int) -> bool:
    rule = analysis.rules.get(node)
    if (
        rule is None
        or rule.kind != "view"
        or len(rule.operands) != 1
        or len(rule.operands[0][dim]) != 1
    ):
        return False
    kept = {f for out in rule.output for f in out}
    (factor,) = rule.operands[0][dim]
    if factor in kept:
        return _selected(analysis, node, factor)
    return operator_name(node.target) in ("aten.select", "aten.slice")


def _made(
    analysis: Analysis, node: fx.Node, dim: int, path: dict[fx.Node, str], ends: dict[fx.Node, int]
) -> bool:
    """Whether products with weights, and what is done to each element of them, made a dim that all
    readers take apart alike; they, and what is done to the weights, join the ``path``, and the dims
    of the weights the ``ends``."""
    if node in analysis.state:
        ends[node] = dim
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
        (n, d)
        for (n, _), dims in zip(operands(node), rule.operands, strict=True)
        for d, f in enumerate(dims)
        if factor in f
    ]
    alone = all(
        dims[d] == (factor,) for dims in rule.operands for d, f in enumerate(dims) if factor in f
    )
    weights = rule.kind != "matmul" or not any(analysis.batch.factors(n) for n, _ in sources)
    return (
        alone
        and bool(sources)
        and weights
        and all(_made(analysis, n, d, path, ends) for n, d in sources)
    )
