"""Regions without gradients, views, arguments and linears have one form in the canonical graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from canonical_graphs import Function, assert_function_kept, canonical, targets
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.nodes import arguments, operands, set_operand, shape

aten = torch.ops.aten


# --- gradients that stop
# --------------------------------------------------------------------------------------------------


def _regions(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = x.sin() * 2
        with torch.enable_grad():
            b = x.exp() * a
        c = b + x
    return a + b + c * x


def _detaches(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).detach().view(x.shape) * x + torch.ones(6).detach()


def _autocast_off(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.tanh() * x


@pytest.mark.parametrize("f", [_regions, _detaches, _autocast_off])
def test_regions_keep_their_gradients(f: Callable[..., torch.Tensor]) -> None:
    captured = assert_function_kept(f)
    assert (aten.detach.default in targets(captured)) == (f is not _autocast_off)


def test_autocast_is_refused() -> None:
    def casts(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.mT

    with pytest.raises(CaptureError, match=r"autocast on .cpu, torch.bfloat16.*precision="):
        canonical(Function(casts), torch.ones(2, 4, 6, dtype=torch.float64))


# --- views and no-ops
# --------------------------------------------------------------------------------------------------

VIEWS: list[tuple[Callable[..., torch.Tensor], set[Any]]] = [
    (lambda x: x.movedim(0, -1), {aten.permute.default}),
    (lambda x: x.swapaxes(-1, 0), {aten.permute.default}),
    (lambda x: x.mT, {aten.permute.default}),
    (
        lambda x: x[:1].squeeze().flatten(),
        {aten.slice.Tensor, aten.squeeze.dims, aten.reshape.default},
    ),
    (lambda x: x.squeeze(0).squeeze(), set()),
    (lambda x: x.narrow(-1, -3, 2), {aten.slice.Tensor}),
    (lambda x: x.unflatten(-1, (2, -1)), {aten.reshape.default}),
    (lambda x: x[0].expand(3, -1, -1), {aten.select.int, aten.expand.default}),
    (lambda x: x.repeat(2, 3, 1, 2), {aten.reshape.default, aten.expand.default}),
    (lambda x: x[:, :1].repeat(1, 3, 1), {aten.slice.Tensor, aten.expand.default}),
    (lambda x: x[..., -1], {aten.select.int}),
    (lambda x: x.split([1, 5], dim=-1)[1], {aten.slice.Tensor}),
    (lambda x: torch.cat(x.chunk(4, -1)[::3], 2), {aten.slice.Tensor, aten.cat.default}),
    (lambda x: x.tensor_split((1, 3), -1)[1], {aten.slice.Tensor}),
    (lambda x: torch.stack(x.unbind(1)[1:], -2), {aten.select.int, aten.stack.default}),
    (lambda x: torch.broadcast_tensors(x, x[0])[1], {aten.select.int, aten.expand.default}),
    (lambda x: x.to(torch.float64).contiguous().clone().type_as(x).to("cpu"), set()),
    (lambda x: x.float().double().square(), {aten.to.dtype, aten.pow.Tensor_Scalar}),
    (lambda x: F.pad(x, (1, 0)), {aten.constant_pad_nd.default}),
    (lambda x: F.adaptive_avg_pool2d(x, 1), {aten.mean.dim}),
    (
        lambda x: x.mean() + x.sum() + x.sum(()),
        {aten.mean.dim, aten.sum.dim_IntList, aten.add.Tensor},
    ),
]


@pytest.mark.parametrize(("view", "wanted"), VIEWS, ids=range(len(VIEWS)))
def test_views_have_one_form(view: Callable[..., torch.Tensor], wanted: set[Any]) -> None:
    harness = {aten.mul.Tensor, aten.arange.default, aten.reshape.default, aten.sum.dim_IntList}
    assert set(targets(assert_function_kept(view))) - harness == wanted - harness


def test_arguments_are_in_normal_form() -> None:
    graph = assert_function_kept(
        lambda x: torch.softmax(
            torch.cat([x[:, -3:], x.transpose(-1, -2).mT[:, :9]], dim=-2), dim=-1
        )
    ).graph
    calls = {n.target: n.args[1:] for n in graph.nodes if n.op == "call_function"}
    assert calls[aten.slice.Tensor] == (1, 1, 4)
    assert calls[aten.transpose.int] == (2, 1)
    assert calls[aten.cat.default] == (1,)
    assert calls[aten.softmax.int] == (2,)
    cat = next(n for n in graph.nodes if n.target is aten.cat.default)
    assert [path for _, path in operands(cat)] == [(0, 0), (0, 1)]
    assert arguments(cat)["dim"] == 1
    other = operands(cat)[0][0]
    set_operand(cat, 1, other)
    assert [n for n, _ in operands(cat)] == [other, other]


# --- linears
# --------------------------------------------------------------------------------------------------


class Projections(nn.Module):
    """GPT-2's Conv1D, the same without bias, a linear on flattened tokens, and an addmm whose
    result stays flat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(self.bias, x.view(-1, 6), self.weight).view(x.shape)
        x = torch.mm(x.view(-1, 6), self.weight.t()).view(x.shape)
        x = F.linear(x.flatten(0, 1), self.weight, self.bias).unflatten(0, (2, -1))
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).pow(2).mean()


def test_linears_take_unflattened_tokens() -> None:
    model, x = Projections(), torch.randn(2, 4, 6)
    captured = canonical(model, x)
    linears = [n for n in captured.graph.nodes if n.target is aten.linear.default]
    assert [shape(n) for n in linears] == [(2, 4, 6)] * 3 + [(8, 6)]
    assert targets(captured).count(aten.t.default) == 2
    assert targets(captured).count(aten.reshape.default) == 1
    torch.testing.assert_close(zoo.run(captured, x)[0], model(x))
