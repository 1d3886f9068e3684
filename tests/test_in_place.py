"""Writes in place become functional, or are refused with their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo
from canonical_graphs import Function, assert_function_kept, assert_same, canonical
from torch import nn

from autopar.errors import CaptureError


def _transposed_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.transpose(0, 1).permute(1, 2, 0)[0].mul_(2)
    return y


def _views_see_the_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    before, row = y[:, 1:3], y.view(-1)[5:7]
    row.add_(100)
    y[0].zero_()
    return before * y.flatten()[1] + row.sum()


def _pieces_share_memory(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 1  # autograd refuses such writes to tensors that need a gradient
    a, b = y.chunk(2, dim=-1)
    y.exp_()
    a.add_(b)
    y.unbind(0)[1].neg_()
    return a * x.sum() + b


def _contiguous_may_copy(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    same, copied = y.contiguous(), y.transpose(0, 1).contiguous()
    same.add_(1)
    copied.mul_(3)
    return y.sum() + copied.sum()


def _set_items(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1] * 2
    y[0, 1:3, ...] = 7
    y[x > 0] = -1.0
    y[:, torch.tensor([2, 0])] += x[:, :2]
    y.diagonal(dim1=0, dim2=1).fill_(torch.tensor(3))
    return y * x


def _change_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = y.select(0, 0)
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    y.mul_(2)
    return y + z.sum()


def _promotion(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32)
    y += x  # stays float32
    mask = x > 0
    mask &= x < 1
    mask |= x > 2
    return y * mask


def _dropout_returns_its_operand(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = F.dropout(y.mT, 0.5, training=False)
    z += 1
    z[0].mul_(2)
    return y


def _on_itself(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.add_(y).masked_fill_(y > 1, 0.5)
    return y.copy_(x[0]) + y.index_fill_(0, torch.tensor([1]), 9)


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.narrow(1, 1, 2).unflatten(0, (1, -1)).squeeze(0).mul_(0.5)
    y[-1].neg_()
    return y


WRITES = [
    _transposed_write,
    _views_see_the_write,
    _pieces_share_memory,
    _contiguous_may_copy,
    _set_items,
    _change_views,
    _promotion,
    _dropout_returns_its_operand,
    _on_itself,
    _narrowed,
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_become_functional(write: Callable[..., torch.Tensor]) -> None:
    assert_function_kept(write)


def test_a_write_to_part_of_a_buffer_is_an_update() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, 4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            with torch.no_grad():
                self.total[1].mul_(0.5).add_(x.mean(0))
            return (x * self.total[1]).sum() * self.steps

    model, x = Counts(), torch.randn(5, 4)
    captured = canonical(model, x)
    result, updates = zoo.run(captured, x)
    assert captured.updates == ("total", "steps")
    assert torch.equal(result, model(x))
    assert_same(updates, {"total": model.total, "steps": model.steps})


def test_a_write_to_an_input_stays_inside() -> None:
    captured = canonical(Function(lambda x: x), torch.ones(2, 4, 6, dtype=torch.float64))
    assert captured.updates == ()

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x.sum()

    x = torch.zeros(3)
    captured = canonical(Writes(), x)
    assert zoo.run(captured, x)[0] == 3
    assert captured.updates == ()
    assert torch.equal(x, torch.zeros(3))
    assert any("'args[0]'" in note for note in captured.notes)


def _hidden_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    with torch.no_grad():
        y.mul_(2)
    return y


def _write_through_detach(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.detach().mul_(2)
    return y


def _resized(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 1
    y.resize_(2, 24)
    return y


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_hidden_write, "writes, without gradient, to a tensor that has one"),
        (_write_through_detach, "writes, without gradient, to a tensor that has one"),
        (_resized, "no form that returns the result"),
    ],
)
def test_writes_without_a_functional_form_name_the_place(
    write: Callable[..., torch.Tensor], message: str
) -> None:
    with pytest.raises(
        CaptureError, match=rf"module '\(root\)' at tests/canonical_graphs.py:\d+.*{message}"
    ):
        canonical(Function(write), torch.ones(2, 4, 6, dtype=torch.float64))


def test_a_parameter_may_not_change_in_the_forward() -> None:
    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.clamp_(max=0.5)
            return (x * self.weight).sum()

    with pytest.raises(CaptureError, match=r"parameter 'weight'.*register_buffer"):
        canonical(Clips(), torch.ones(3))
