"""Slices that fill a tensor become ``cat``; other written slices stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from canonical_graphs import assert_function_kept, targets
from torch.ops import aten


def halves(x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    made[..., :3].copy_(x[..., 3:])
    made[..., 3:].copy_(x[..., :3] * 2)
    return made


def in_any_order(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(2, 4, 9)
    made[:, :, -4:] = x[..., :4]
    made[:, :, 2:5] = x[..., 1:4]
    made[:, :, :2] = x[..., 4:]
    return made


def along_the_first(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[:1] = x[1:]
    made[1:] = x[:1].exp()
    return made


def with_a_gap(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[..., :2] = x[..., :2]
    made[..., 3:] = x[..., 3:]
    return made


def twice(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[..., :4] = x[..., :4]
    made[..., 3:] = x[..., 3:]
    return made


def with_steps(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[..., ::2] = x[..., :3]
    made[..., 1::2] = x[..., 3:]
    return made


def broadcast(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[..., :3] = x[:, :1, :3]
    made[..., 3:] = 1.0
    return made


def read_between(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[..., :3] = x[..., :3]
    between = made.sum()
    made[..., 3:] = x[..., 3:]
    return made * between


def in_two_dims(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(x.shape)
    made[:, :2] = x[:, :2]
    made[..., :3] = x[..., :3]
    return made


@pytest.mark.parametrize(
    "f",
    [
        lambda x: halves(x, x.new_empty(x.shape)),
        lambda x: halves(x, torch.zeros(x.shape, dtype=x.dtype)),
        in_any_order,
        along_the_first,
    ],
)
def test_slices_that_fill_a_tensor(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = targets(assert_function_kept(f))
    assert aten.cat.default in found
    assert aten.slice_scatter.default not in found


@pytest.mark.parametrize("f", [with_a_gap, twice, with_steps, read_between, in_two_dims])
def test_other_slices_stay(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = targets(assert_function_kept(f))
    assert aten.cat.default not in found
    assert aten.slice_scatter.default in found


def test_slices_of_one_row_and_of_a_number() -> None:
    assert_function_kept(broadcast)


def test_a_tensor_below_that_has_a_gradient_stays() -> None:
    """Its gradient is zero, where a tensor that is not read has none."""
    found = targets(assert_function_kept(lambda x: halves(x, (x * 3).clone())))
    assert aten.cat.default not in found
