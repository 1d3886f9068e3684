"""The two parts of a backward make the gradients of the whole backward, each part its share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

from autopar.runtime.pipeline.split_backward import SplitBackward

Tensors = list[torch.Tensor]


class Entry(torch.autograd.Function):
    """The one node that makes all inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        raise AssertionError("the inputs' gradients are taken here, not passed on")


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def program(
    x: torch.Tensor,
    y: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    e: torch.Tensor,
    g: torch.Tensor,
) -> Tensors:
    """A weight that is used twice with different biases, a parameter that meets an input only at
    the end, a parameter that meets none, and an input that is an output.
    """
    h = F.layer_norm(torch.tanh(F.linear(x, w, b)), (4,), g)
    h = F.linear(h, w, c) + y
    return [h * g, (e * 2).exp() * w.sum(), y]


@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_both_parts_are_the_whole(used: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    leaves = [_leaf(4, 4), _leaf(4), _leaf(4), _leaf(4), _leaf(4)]
    inputs = [_leaf(3, 4), _leaf(3, 4)]
    outputs = program(*inputs, *leaves)
    gradients = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward([outputs[i] for i in used], [gradients[i] for i in used])
    expected = [x.grad for x in (*inputs, *leaves)]
    for leaf in leaves:
        leaf.grad = None

    entered = Entry.apply(torch.zeros((), requires_grad=True), *(x.detach() for x in inputs))
    outputs = program(*entered, *leaves)
    split = SplitBackward(
        [get_gradient_edge(outputs[i]) for i in used],
        [gradients[i] for i in used],
        [get_gradient_edge(x) for x in entered],
    )
    found = split.inputs()
    assert all(leaf.grad is None for leaf in leaves)
    split.leaves()
    for mine, theirs in zip([*found, *(leaf.grad for leaf in leaves)], expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
