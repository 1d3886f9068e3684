"""Tensors that a compiled program cannot take: what they do beyond their values would be lost."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor

from autopar.capture.function_tracer import is_transformed
from autopar.capture.hooks import comes_from
from autopar.errors import RunError

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_kind(x: torch.Tensor, name: str) -> None:
    """Raises :class:`RunError` for the argument ``x`` called ``name`` if it is of a transform of
    torch.func, has a tangent, is distributed, or is of a subclass that the user wrote.
    """
    if is_transformed(x):
        raise RunError(
            f"{name} is of a transform of torch.func (grad, jvp, vmap, ...), which cannot see into "
            "a compiled program: call the program outside, and get gradients by loss.backward() or "
            "torch.autograd.grad; or transform the plain model"
        )
    if unpack_dual(x).tangent is not None:
        raise RunError(
            f"{name} has a tangent (forward-mode differentiation), which the compiled program "
            "would lose: get gradients by loss.backward() or torch.autograd.grad, or call the "
            "plain model"
        )
    kind = type(x)
    if kind in _PLAIN:
        return
    if isinstance(x, DTensor):
        raise RunError(
            f"{name} is a DTensor: pass a plain tensor ({name}.full_tensor(), called on all ranks, "
            f"is the whole; {name}.to_local() is this rank's part)"
        )
    if not comes_from(("torch.", "autopar."), kind):
        raise RunError(
            f"{name} is a {kind.__name__}, a subclass of Tensor, whose code the compiled program "
            f"would not run: pass {name}.as_subclass(torch.Tensor)"
        )
