"""What a graph cannot hold of a ``torch.autograd.Function`` or a hook is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_functions import Net, Reverse, Setup

from autopar.capture.capture_graph import capture
from autopar.errors import CaptureError


class Dirty(Reverse):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(scale)


class Closed(Reverse):
    model: Net

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * Closed.model.scale


def view_written_to(net: Net, h: torch.Tensor) -> torch.Tensor:
    y = h * 1
    z = Reverse.apply(y, 2.0)
    y.add_(1)
    return z


def closed(net: Net, h: torch.Tensor) -> torch.Tensor:
    Closed.model = net
    return Closed.apply(h, 2.0)


def hook(name: str) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def between(net: Net, h: torch.Tensor) -> torch.Tensor:
        getattr(h, name)(*[] if name == "retain_grad" else [lambda g: -g])
        return h

    return between


def module_hook(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.head.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return h


class Quantised(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: t.half(), lambda t: t.float())


def quantised(net: Net, h: torch.Tensor) -> torch.Tensor:
    with Quantised():
        return h * h.sin()


def penalty(net: Net, h: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(net.head(h).sigmoid().sum(), h, create_graph=True)
    return h + grad.norm(dim=1, keepdim=True)


REFUSED = {
    "writes to its operands": lambda net, h: Dirty.apply(h, 2.0),
    r"given a Net, which.*give it tensors as arguments of their own": lambda net, h: Reverse.apply(
        h, net
    ),
    "reads a tensor of the model that is not among its arguments": closed,
    "returns a view of its operand, and": view_written_to,
    "under a transform of torch.func": lambda net, h: torch.func.vmap(Setup.apply)(h),
    "register_hook in the forward.*write a torch.autograd.Function": hook("register_hook"),
    "retain_grad in the forward": hook("retain_grad"),
    "a module has a backward hook": module_hook,
    "saved_tensors_hooks": quantised,
    "is under a transform of torch.func": lambda net, h: torch.func.vmap(
        lambda row: row * row.softmax(0)
    )(h),
    "torch.autograd.grad in the forward": penalty,
    "backward.. in the forward": lambda net, h: (h.sum().backward(), h)[1],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(problem: str) -> None:
    place = r"at tests/(autograd_functions|test_function_refusals)\.py:\d+"
    with pytest.raises(CaptureError, match=rf"{place}.*{problem}"):
        capture(Net(REFUSED[problem]), torch.randn(8, 8))
