"""Compares the results of two runs of one training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Relative to the norm of the expected tensor. Two runs may add in different orders, so they differ
# by rounding.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
# Relative to the largest gradient's norm. A gradient with a smaller norm is compared as if its norm
# were this.
_FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """One tensor that both runs computed.

    Attributes:
        name: ``"loss"``, ``"output 1"``, ``"gradient of body.weight"``, ``"buffer
            norm.running_mean"``.
        error: the norm of the difference, relative to the norm of the expected tensor.
        allowed: the largest ``error`` that rounding explains.
        found: the value of a number, or the norm and shape of a tensor, in the checked run.
        expected: the same in the run of the model. Both are empty where ``error`` is allowed.
    """

    name: str
    error: float
    allowed: float
    found: str = ""
    expected: str = ""

    @property
    def is_allowed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class StepResults:
    """The results of one step, by name: outputs, gradients of parameters (sparse gradients as dense
    tensors), and new values of buffers.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    def by_name(self) -> dict[str, torch.Tensor | None]:
        gradients = {f"gradient of {name}": g for name, g in self.gradients.items()}
        return {
            **self.outputs,
            **gradients,
            **{f"buffer {name}": b for name, b in self.buffers.items()},
        }


def differences(found: StepResults, expected: StepResults) -> list[Difference]:
    """Compares every tensor of ``expected``, the loss first; a missing gradient is zero."""
    norms = (_fast_norm(g) for g in expected.gradients.values() if g is not None)
    largest = max((n for n in norms if n < float("inf")), default=0.0)
    tensors, result = found.by_name(), []
    for name, value in expected.by_name().items():
        if name.startswith("buffer ") and name not in tensors:
            continue  # a buffer that the graph neither reads nor writes
        floor = _FLOOR * largest if name.startswith("gradient") else 0.0
        if (difference := _difference(name, tensors.get(name), value, floor)) is not None:
            result.append(difference)
    return result


def _difference(name: str, found: Any, expected: Any, floor: float) -> Difference | None:
    if found is None and expected is None:
        return None
    expected = torch.zeros_like(found) if expected is None else expected
    found = torch.zeros_like(expected) if found is None else found
    error, allowed = relative_error(found, expected, floor), TOLERANCE.get(expected.dtype, 0.0)
    if error <= allowed:
        return Difference(name, error, allowed)
    return Difference(name, error, allowed, _in_words(found), _in_words(expected))


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of the difference, divided by the norm of ``expected`` or by ``floor``, whichever is
    larger.

    Two entries that are both NaN, or the same infinity, are equal. Infinite where shapes or dtypes
    differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    a, b = found.detach(), expected.detach()
    if not (a.is_floating_point() or a.is_complex()):
        a, b = a.double(), b.double()
    difference, scale = _fast_norm(a - b), _fast_norm(b)
    if not (difference < float("inf") and scale < float("inf")):
        same = (a == b) | (a.isnan() & b.isnan())
        difference = _norm(torch.where(same, torch.zeros_like(a), a - b))
        scale = _norm(torch.where(b.isfinite(), b, torch.zeros_like(b)))
    error = difference / max(scale, floor, 1e-30)
    return error if error == error else float("inf")


def _fast_norm(t: torch.Tensor) -> float:
    """The Euclidean norm in the tensor's own precision, at least float32; it may overflow."""
    half = t.dtype in (torch.bfloat16, torch.float16)
    return float(torch.linalg.vector_norm(t.detach(), dtype=torch.float32 if half else None))


def _norm(t: torch.Tensor) -> float:
    """The Euclidean norm, added up in float64."""
    wide = torch.complex128 if t.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(t.detach(), dtype=wide))


def _in_words(t: torch.Tensor) -> str:
    return (
        f"{t.item():.7g}"
        if t.numel() == 1
        else f"of norm {_norm(t.double() if not t.is_complex() else t):.7g} {list(t.shape)}"
    )
