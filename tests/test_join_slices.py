"""Slices that cover a tensor without overlap become one split; other slices stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.passes.lowering.join_slices import join_slices

aten = torch.ops.aten
X = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def program(bounds: list[tuple[int, int]], stages: list[int | None]) -> fx.GraphModule:
    """The sum of the squares of all slices of columns, each times its number."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["local"] = (4, 12)
    total = None
    for number, ((start, end), stage) in enumerate(zip(bounds, stages, strict=True), 1):
        piece = graph.call_function(aten.slice.Tensor, (x, 1, start, end))
        piece.meta.update(stage=stage, val=X[:, start:end])
        square = graph.call_function(
            aten.mul.Tensor, (graph.call_function(aten.mul.Tensor, (piece, piece)), float(number))
        )
        part = graph.call_function(aten.sum.default, (square,))
        total = part if total is None else graph.call_function(aten.add.Tensor, (total, part))
    graph.output(total)
    return fx.GraphModule(nn.Module(), graph)


def gradient(module: fx.GraphModule) -> tuple[torch.Tensor, torch.Tensor]:
    x = X.clone().requires_grad_()
    value = module(x)
    return value, torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize(
    "bounds", [[(0, 4), (4, 8), (8, 12)], [(8, 12), (0, 1), (1, 8)], [(0, 6), (6, 12)]]
)
def test_pieces_of_a_whole_are_joined(bounds: list[tuple[int, int]]) -> None:
    module = program(bounds, [None] * len(bounds))
    expected = gradient(module)
    join_slices(module.graph)
    module.recompile()
    targets = [n.target for n in module.graph.nodes]
    assert targets.count(aten.split_with_sizes.default) == 1
    assert aten.slice.Tensor not in targets
    for mine, its in zip(gradient(module), expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(
    ("bounds", "stages"),
    [
        ([(0, 4), (4, 8)], [0, 0]),  # columns are left
        ([(0, 4), (8, 12)], [0, 0]),  # a gap
        ([(0, 8), (4, 12)], [0, 0]),  # the same slice twice
        ([(0, 12)], [0]),
        ([(0, 6), (6, 12)], [0, 1]),  # in two stages
        ([(0, 6), (0, 6), (6, 12)], [0, 0, 0]),
    ],
)
def test_other_slices_stay(bounds: list[tuple[int, int]], stages: list[int | None]) -> None:
    module = program(bounds, stages)
    before = str(module.graph)
    join_slices(module.graph)
    assert str(module.graph) == before
