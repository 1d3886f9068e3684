"""The specification of a tensor: shape, strides and dtype, without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx


class TensorSpec(NamedTuple):
    """The properties of a tensor that decide which kernels torch runs.

    ``stride`` counts elements. ``grad`` says whether the tensor needs a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False


def contiguous_spec(shape: Sequence[int], dtype: torch.dtype, grad: bool = False) -> TensorSpec:
    """The specification of a contiguous tensor, in row-major order."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return TensorSpec(tuple(shape), tuple(reversed(strides)), dtype, grad)


def input_spec(val: Any, grad: bool) -> Any:
    """The specification of an input of the program; a value that is no tensor stays as it is.

    Parameters and batches are contiguous.
    """
    return (
        contiguous_spec(tuple(val.shape), val.dtype, grad) if isinstance(val, torch.Tensor) else val
    )


def with_grad(value: Any, grad: bool) -> Any:
    """``value`` with ``TensorSpec.grad`` set; a value that is no tensor stays as it is."""
    if isinstance(value, TensorSpec) and value.grad != grad:
        return value._replace(grad=grad)
    return value


def with_operands(node: fx.Node, operands: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call, with ``operands`` in place of its tensors.

    ``operands`` are in the order of ``ir.nodes.operands``.
    """
    left = iter(operands)

    def put(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [next(left) if isinstance(item, fx.Node) else item for item in value]
        return next(left) if isinstance(value, fx.Node) else value

    return [put(a) for a in node.args], {k: put(v) for k, v in node.kwargs.items()}
