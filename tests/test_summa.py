"""SUMMA on squares of ranks compared with a linear layer on one device, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import Tensors, compare, draw, make_mesh
from pool import Pools

from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.kernels.summa import summa_linear


def _operands(t: Tensors, trains: tuple[bool, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """The input and the weight, detached where they do not train."""
    x, w = t["x"], t["w"]
    assert x is not None
    assert w is not None
    return x if trains[0] else x.detach(), w if trains[1] else w.detach()


def _check(
    side: int,
    shape: tuple[int, ...],
    features: int,
    bias: bool,
    swapped: bool,
    trains: tuple[bool, bool],
) -> None:
    mesh, _ = make_mesh((side, side))
    row, column = (0, 1) if swapped else (1, 0)
    last = len(shape) - 1

    def cut(t: torch.Tensor, on_column: str, on_row: str) -> torch.Tensor:
        return redistribute(redistribute(t, mesh, column, "I", on_column), mesh, row, "I", on_row)

    def split(t: Tensors) -> torch.Tensor:
        (x, w), b = _operands(t, trains), t["b"]
        y = summa_linear(
            cut(x, "S0", f"S{last}"),
            cut(w, "S1", "S0"),
            None if b is None else cut(b, "R", "S0"),
            mesh,
            row,
            column,
        )
        return redistribute(redistribute(y, mesh, row, f"S{last}", "I"), mesh, column, "S0", "I")

    def whole(t: Tensors) -> torch.Tensor:
        return F.linear(*_operands(t, trains), t["b"])

    found: Tensors = {
        "x": draw(*shape),
        "w": draw(features, shape[-1], seed=1),
        "b": draw(features, seed=2) if bias else None,
    }
    compare(split, whole, found)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("shape", "features", "bias"), [((4, 6), 10, True), ((2, 3, 8), 4, False), ((6, 1, 2), 2, True)]
)
def test_equals_a_linear_layer(
    ranks: Pools, shape: tuple[int, ...], features: int, bias: bool, swapped: bool
) -> None:
    ranks(4).run(_check, 2, shape, features, bias, swapped, (True, True))


@pytest.mark.parametrize("trains", [(True, False), (False, True)])
def test_only_what_trains_has_a_gradient(ranks: Pools, trains: tuple[bool, bool]) -> None:
    ranks(4).run(_check, 2, (4, 6), 10, True, False, trains)


@pytest.mark.slow
def test_on_nine_ranks(ranks: Pools) -> None:
    ranks(9).run(_check, 3, (3, 2, 6), 9, True, True, (True, True), timeout=120)
