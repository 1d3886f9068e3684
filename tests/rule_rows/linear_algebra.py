"""Rows of linear algebra, whose rules are in ``autopar/rules/linear_algebra.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, fixed, row

operands = Operands()
n = operands.n
OF_MATRICES = """cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex lu_factor
lu_factor_ex matrix_exp qr slogdet svd svdvals"""


def matrices(*shape: int) -> torch.Tensor:
    """A batch of positive definite matrices with well separated eigenvalues; the last dim is the
    size of a matrix.
    """
    x = n(*shape, shape[-1]) * 0.1
    return x @ x.mT + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))


ROWS: list[Row] = [
    *(row(getattr(aten, f"linalg_{name}").default, matrices(4, 6)) for name in OF_MATRICES.split()),
    *(
        row(getattr(aten, name).default, matrices(4, 6))
        for name in ("cholesky", "det", "inverse", "logdet", "matrix_exp", "pinverse")
    ),
    *(row(getattr(aten, name).default, matrices(4, 6)) for name in ("qr", "slogdet", "svd")),
    row(aten.linalg_lu.default, matrices(4, 2, 6)),
    row(aten.linalg_matrix_rank.default, matrices(4, 6), 1e-9),
    row(aten.linalg_pinv.default, matrices(4, 6), 1e-9),
    *(
        fixed(row(getattr(aten, f"linalg_ldl_factor{ex}").default, matrices(4, 6)), 0)
        for ex in ("", "_ex")
    ),  # has no derivative
    row(aten.linalg_solve.default, matrices(4, 6), n(4, 6, 2)),
    row(aten.linalg_solve_triangular.default, matrices(4, 6), n(4, 6, 2), upper=True),
]
MORE: list[Row] = []
