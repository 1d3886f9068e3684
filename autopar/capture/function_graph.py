"""The forward and the backward of a ``torch.autograd.Function`` as one graph of operators.

All private names of torch that this needs are in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from autopar.capture.function_operator import FunctionOperator, given_argument
from autopar.ir.nodes import operands, result_tensors


@dataclass(frozen=True)
class FunctionGraph:
    """The operators of one call.

    Attributes:
        graph: takes the operands and the gradients of the results; returns the results and the
            gradients of the operands.
        operand_count: how many operands are tensors.
        differentiable: of each result that is a tensor whether it may have a gradient.
    """

    graph: fx.Graph
    operand_count: int
    differentiable: tuple[bool, ...]

    @property
    def operands(self) -> list[fx.Node]:
        """The placeholder of each operand."""
        return self.graph.find_nodes(op="placeholder")[: self.operand_count]

    @property
    def gradients(self) -> list[fx.Node | None]:
        """The placeholder of the gradient of each result; None for a result of integers."""
        given = iter(self.graph.find_nodes(op="placeholder")[self.operand_count :])
        return [next(given) if has_one else None for has_one in self.differentiable]

    @property
    def results(self) -> list[fx.Node]:
        """The node of each result."""
        return self._returned[: len(self.differentiable)]

    @property
    def operand_gradients(self) -> list[fx.Node | None]:
        """The node of the gradient of each operand; None where there is none."""
        return self._returned[len(self.differentiable) :]

    @property
    def _returned(self) -> list[Any]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]


class _Context(FunctionCtx):
    """What a forward keeps for a backward, outside of autograd."""

    saved_tensors: tuple[Any, ...] = ()

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) for a in args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def trace_function(
    call: fx.Node, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> FunctionGraph:
    """The graph of a call of a :class:`FunctionOperator`, with operands of other shapes. Its
    tensors have no data.

    Args:
        shapes: of each tensor operand.
        results: the shape of each result that is a tensor.

    Raises:
        Exception: what the Function raises, such as at an operator that needs data.
    """
    operator: FunctionOperator = call.target  # type: ignore[assignment]
    like = [n.meta["val"] for n, _ in operands(call)]
    kinds = result_tensors(call)
    differentiable = tuple(t.is_floating_point() or t.is_complex() for t in kinds)

    def joint(*tensors: torch.Tensor) -> list[Any]:
        given, gradients = iter(tensors[: len(like)]), iter(tensors[len(like) :])
        filled: Any = map_arg(call.args, lambda _: next(given))
        args = [given_argument(a, like[0].device if like else None) for a in filled]
        context = _Context(args)
        made = _forward(operator.function, context, args)
        of_results = iter([next(gradients) if has_one else None for has_one in differentiable])
        of_all = [next(of_results) if isinstance(t, torch.Tensor) else None for t in made]
        back = operator.function.backward(context, *of_all)  # type: ignore[attr-defined]
        back = [*(back if isinstance(back, tuple) else (back,)), *[None] * len(args)]
        found = [t for t in made if isinstance(t, torch.Tensor)]
        return [*found, *_of_operands(call.args, back)]

    with FakeTensorMode(), torch.no_grad():
        pairs = [*zip(shapes, like, strict=True), *zip(results, kinds, strict=True)]
        is_given = [True] * len(like) + [*differentiable]
        tensors = [
            torch.empty(shape, dtype=t.dtype, device=t.device)
            for (shape, t), given in zip(pairs, is_given, strict=True)
            if given
        ]
        traced = make_fx(joint, tracing_mode="fake", pre_dispatch=True)(*tensors)
    return FunctionGraph(traced.graph, len(like), differentiable)


def is_switch(node: fx.Node) -> bool:
    """Whether a call only switches gradients, or switches autocast off, as ``torch.amp.custom_bwd``
    does.
    """
    if node.target is _enter_autocast:
        return not node.args[2]
    return node.target in (torch._C._set_grad_enabled, _exit_autocast)


def _forward(function: Any, context: _Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a Function's forward, in either of its forms."""
    if function.setup_context is torch.autograd.Function.setup_context:
        made = function.forward(context, *args)
    else:
        made = function.forward(*args)
        function.setup_context(context, tuple(args), made)
    return made if isinstance(made, tuple) else (made,)


def _of_operands(args: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The gradient of each tensor operand, of those of the arguments. Tensors in lists have
    none.
    """
    found: list[Any] = []
    for argument, gradient in zip(args, gradients, strict=False):
        inside: list[fx.Node] = []
        map_arg(argument, inside.append)
        found += [gradient if isinstance(argument, fx.Node) else None for _ in inside]
    return found
