"""The canonical graph of a function or a model, and the comparison of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import zoo
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.ir.captured import CapturedModel
from autopar.passes.canonical.canonicalise import canonicalise


def targets(captured: CapturedModel) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def canonical(model: nn.Module, *sample: Any, **options: Any) -> CapturedModel:
    return canonicalise(capture(model, sample if len(sample) != 1 else sample[0], **options))


def leaves(value: Any) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def assert_same(actual: Any, expected: Any) -> None:
    pairs = list(zip(leaves(actual), leaves(expected), strict=True))
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Function(nn.Module):
    """``sum(f(x · weight) · coefficients)``, so that every element of f counts in the loss."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.f, self.weight = (
            f,
            nn.Parameter(torch.linspace(-2, 3, 48, dtype=torch.float64).view(2, 4, 6)),
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.f(x * self.weight)
        return {
            "loss": (y * torch.arange(y.numel(), dtype=torch.float64).view(y.shape)).sum(),
            "y": y,
        }


def assert_function_kept(f: Callable[..., torch.Tensor]) -> CapturedModel:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    model = Function(f)
    reference = copy.deepcopy(model)
    captured = canonical(model, x)
    expected = reference(x)
    expected["loss"].backward()
    result, _ = zoo.run(captured, x)
    result["loss"].backward()
    assert_same((result, model.weight.grad), (expected, reference.weight.grad))
    assert not any(getattr(t, "_schema", None) and t._schema.is_mutable for t in targets(captured))
    return captured
