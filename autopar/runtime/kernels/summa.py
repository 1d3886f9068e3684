"""A linear layer whose input, weight and output lie in blocks on a square of ranks (SUMMA: van de
Geijn and Watts, 1997).

On a square of q x q ranks, rank (i, j) has the block (i, j) of the input X [M, K], of the weight W
[K, N] and of the output Y = X W [M, N]. Step t of q takes X's blocks (i, t), which their owners
broadcast along each row, and W's blocks (t, j), which are broadcast down each column. The blocks of
the next step are on their way while those of this step are multiplied: a rank has two blocks of X
and two of W beside its own, and never a whole row. In the backward

    dX(i, t) = sum over j of dY(i, j) W(t, j)^T along the row
    dW(t, j) = sum over i of X(i, t)^T dY(i, j) down the column

Each sum travels around the ring of its row or column, ends at its owner, and is on its way while
the part of the next sum is multiplied. The blocks are broadcast in the order in which the sums need
them. A rank receives (q - 1) / q^2 (M K + K N) elements for each of Y, dX and dW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.runtime.communication import functional
from autopar.runtime.communication.kernel_collectives import start_ring_shift
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.stand_ins import runs_alone


def summa_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mesh: Mesh,
    row: int,
    column: int,
) -> torch.Tensor:
    """``x @ weight.T + bias``, of ``x`` [..., K], ``weight`` [N, K] and ``bias`` [N].

    The ranks of a row of the square lie along the mesh axis ``row``, those of a column along
    ``column``: ``x`` is cut by K on ``row`` and by one of its leading dims on ``column``, the
    weight by N on ``row`` and by K on ``column``, the bias by N on ``row`` (R on ``column``), the
    result by N on ``row`` and by the leading dim on ``column``.
    """
    y = _Summa.apply(x.flatten(0, -2), weight, mesh, row, column).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, mesh: Mesh, row: int, column: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.row, ctx.column = mesh, row, column
        y: torch.Tensor | None = None
        order = range(mesh.sizes[row])
        for block, part in zip(
            _broadcasts(x, mesh, row, order), _broadcasts(weight, mesh, column, order), strict=True
        ):
            y = block @ part.t() if y is None else y.addmm_(block, part.t())
        assert y is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        mesh, row, column = ctx.mesh, ctx.row, ctx.column
        blocks = _broadcasts(x, mesh, row, _sum_order(mesh, column))
        parts = _broadcasts(weight, mesh, column, _sum_order(mesh, row))
        x_sum, weight_sum = _TravellingSum(mesh, row), _TravellingSum(mesh, column)
        for _ in range(mesh.sizes[row]):
            if ctx.needs_input_grad[0]:
                x_sum.add(grad @ next(parts))
            if ctx.needs_input_grad[1]:
                weight_sum.add(grad.t() @ next(blocks))
        return x_sum.total, weight_sum.total, None, None, None


def _broadcasts(own: torch.Tensor, mesh: Mesh, axis: int, order: range) -> Iterator[torch.Tensor]:
    """The blocks of the ranks along an axis, in ``order``; the next one is on its way meanwhile."""
    group, n, me = mesh.group(axis).group_name, mesh.sizes[axis], mesh.coordinate[axis]

    def sent(step: int) -> torch.Tensor:
        source = order[step] % n
        if source == me:
            block = own.contiguous()
        elif runs_alone():
            block = own.clone(memory_format=torch.contiguous_format)
        else:
            block = torch.empty_like(own, memory_format=torch.contiguous_format)
        return functional.broadcast_(block, source, group) if n > 1 else block

    coming = sent(0)
    for step in range(len(order)):
        block, coming = coming, sent(step + 1) if step + 1 < len(order) else coming
        yield functional.wait_tensor(block) if n > 1 else block


def _sum_order(mesh: Mesh, axis: int) -> range:
    """The ranks whose sums arrive here, in their order; this rank's sum is the last."""
    n, me = mesh.sizes[axis], mesh.coordinate[axis]
    return range(me - 1 + n, me - 1, -1)


class _TravellingSum:
    """One sum for each rank along an axis. Each sum collects the ranks' parts on its way to its
    owner. ``total`` is this rank's sum, in the end.
    """

    def __init__(self, mesh: Mesh, axis: int) -> None:
        self._mesh, self._axis = mesh, axis
        self._coming: Callable[[], torch.Tensor] | None = None
        self._count = 0
        self.total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """Adds this rank's part to the sum that has arrived, in the order of :func:`_sum_order`."""
        if self._coming is not None:
            part += self._coming()
        self._count += 1
        if self._count < self._mesh.sizes[self._axis]:
            mesh, axis = self._mesh, self._axis
            group = mesh.group(axis).group_name
            self._coming = start_ring_shift(part, group, mesh.sizes[axis], mesh.coordinate[axis])
        else:
            self.total = part
