"""Dims that count from the end of another operand than the first one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.passes.canonical.canonicalise import canonicalise

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "diag_embed": lambda x: torch.diag_embed(x, 1, -1, -3),
    "cat with an empty one": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x], -1),
    "vecdot": lambda x: torch.linalg.vecdot(x[0], x[:, None], dim=-1),
    "cosine_similarity": lambda x: torch.cosine_similarity(x[0], x.expand(2, *x.shape), dim=-2),
    "addmm of a number": lambda x: torch.addmm(x[0, 0], x, x.mT),
}


class Applies(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4, dtype=torch.float64)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(x * self.weight)
        return (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


@pytest.mark.parametrize("name", CASES)
def test_the_canonical_graph_is_the_model(name: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Applies(CASES[name])
    captured = canonicalise(capture(model, x))
    state = {"weight": model.weight, **captured.state}
    values = [x if i.kind == "input" else state[i.target] for i in captured.inputs]
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule(nn.Module(), captured.graph))
    found = interpreter.run(*values, enable_io_processing=False)[captured.loss]
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)
