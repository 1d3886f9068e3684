"""The values of tensors that are computed from ranges and numbers alone, such as positions.

A dim along which a value is the same everywhere, such as the batch, is held with size 1, so a value
takes the memory of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import arguments, operands, shape

aten = torch.ops.aten

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_ELEMENTWISE = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.eq.Tensor,
    aten.eq.Scalar,
    aten.ne.Tensor,
    aten.ne.Scalar,
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.to.dtype,
)
_MOST_ELEMENTS = 1 << 24  # a larger value is not computed


class KnownValues:
    """The values of the nodes of one graph; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """The value of ``node`` on the CPU, which broadcasts to the node's shape; None where it
        depends on the model's inputs or parameters, or an operator is not known here.
        """
        if node not in self._known:
            self._known[node] = self._value(node)
        return self._known[node]

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
            return None
        if node.target in _RANGES:
            return node.target(*node.args, **{**node.kwargs, "device": "cpu"})  # type: ignore[operator]
        sources = [self.of(n) for n, _ in operands(node)]
        if any(x is None for x in sources):
            return None
        if node.target in _ELEMENTWISE:
            known = iter(sources)
            args = [next(known) if isinstance(a, fx.Node) else a for a in node.args]
            whole = torch.broadcast_shapes(*[x.shape for x in sources if x is not None])
            if math.prod(whole) > _MOST_ELEMENTS:
                return None
            return node.target(*args, **node.kwargs)  # type: ignore[operator]
        rule = _RULES.get(node.target)
        return rule(node, *sources) if rule is not None else None


def _full(node: fx.Node) -> torch.Tensor:
    value, default = node.meta["val"], node.target is aten.ones.default
    number = arguments(node).get("fill_value", default)
    return torch.full([1] * value.ndim, number, dtype=value.dtype, device="cpu")


def _same(node: fx.Node, x: torch.Tensor) -> torch.Tensor:
    return x


def _unsqueeze(node: fx.Node, x: torch.Tensor) -> torch.Tensor:
    whole = _with_all_dims(node.all_input_nodes[0], x)
    return whole.unsqueeze(arguments(node)["dim"])


def _reshape(node: fx.Node, x: torch.Tensor) -> torch.Tensor | None:
    """Where the reshape only adds or removes dims of size 1."""
    source = node.all_input_nodes[0]
    whole = _with_all_dims(source, x)
    if [n for n in shape(source) if n != 1] != [n for n in shape(node) if n != 1]:
        return None
    kept = iter(held for n, held in zip(shape(source), whole.shape, strict=True) if n != 1)
    return whole.reshape([next(kept) if n != 1 else 1 for n in shape(node)])


def _along(node: fx.Node, *sources: torch.Tensor) -> torch.Tensor | None:
    """A call that works along one dim, which is then held whole."""
    given = arguments(node)
    dim = given["dim"] % len(shape(node))
    wholes = []
    for (source, _), x in zip(operands(node), sources, strict=True):
        held = list(_with_all_dims(source, x).shape)
        held[dim] = shape(source)[dim]
        wholes.append(_with_all_dims(source, x).expand(held))
    if node.target is aten.diff.default and len(wholes) > 1:
        # The parts that are joined must agree in all other dims.
        common = torch.broadcast_shapes(*[w.select(dim, 0).shape for w in wholes])
        wholes = [w.expand(*common[:dim], w.shape[dim], *common[dim:]) for w in wholes]
    if sum(w.numel() for w in wholes) > _MOST_ELEMENTS:
        return None
    known = iter(wholes)
    args = [next(known) if isinstance(a, fx.Node) else a for a in node.args]
    kwargs = {k: next(known) if isinstance(a, fx.Node) else a for k, a in node.kwargs.items()}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _with_all_dims(source: fx.Node, x: torch.Tensor) -> torch.Tensor:
    """``x`` with as many dims as the node whose value it is."""
    return x.reshape([1] * (len(shape(source)) - x.ndim) + list(x.shape))


_RULES: dict[Any, Callable[..., torch.Tensor | None]] = {
    aten.full.default: _full,
    aten.ones.default: _full,
    aten.zeros.default: _full,
    aten.expand.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.reshape.default: _reshape,
    aten.view.default: _reshape,
    aten.slice.Tensor: _along,
    aten.diff.default: _along,
    aten.cumsum.default: _along,
}
