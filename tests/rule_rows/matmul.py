"""Rows of matrix products, whose rules are in ``autopar/rules/matmul.py``."""

from __future__ import annotations

from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n

ROWS: list[Row] = [
    row(aten.linear.default, n(4, 2, 6), n(12, 6), n(12)),
    row(aten.linear.default, n(4, 6), n(12, 6)),
    row(aten.linear.default, n(6), n(12, 6), n(12)),
    row(aten.matmul.default, n(6), n(6)),
    row(aten.matmul.default, n(4, 6), n(6)),
    row(aten.matmul.default, n(6), n(6, 4)),
    row(aten.matmul.default, n(4, 6), n(6, 12)),
    row(aten.matmul.default, n(2, 4, 6), n(6, 12)),
    row(aten.matmul.default, n(4, 6), n(2, 6, 12)),
    row(aten.matmul.default, n(6), n(2, 6, 12)),
    row(aten.matmul.default, n(2, 4, 6), n(6)),
    row(aten.matmul.default, n(2, 1, 4, 6), n(6, 6, 2)),
    row(aten.bmm.default, n(4, 2, 6), n(4, 6, 3)),
    row(aten.mv.default, n(4, 6), n(6)),
    row(aten.dot.default, n(6), n(6)),
    row(aten.baddbmm.default, n(4, 2, 3), n(4, 2, 6), n(4, 6, 3), beta=2.0, alpha=0.5),
    row(aten.baddbmm.default, n(4, 1, 3), n(4, 2, 6), n(4, 6, 3)),
    row(aten.addmm.default, n(4, 3), n(4, 6), n(6, 3), alpha=0.5),
    row(aten.addmm.default, n(3), n(4, 6), n(6, 3), beta=0.5),
]
MORE: list[Row] = [
    row(aten.einsum.default, "bij,bjk->bik", [n(4, 2, 6), n(4, 6, 3)]),
    row(aten.einsum.default, "ij,jk", [n(4, 6), n(6, 2)]),
    row(aten.einsum.default, "...qhd,...khd->...hqk", [n(4, 2, 6, 2), n(4, 3, 6, 2)]),
    row(aten.einsum.default, "i...,i... -> ...", [n(4, 6, 2), n(4, 1, 2)]),
    row(aten.einsum.default, "bij,j", [n(2, 4, 6), n(6)]),
    row(aten.einsum.default, "bii->bi", [n(4, 6, 6)]),
    row(aten.einsum.default, "bij->jb", [n(4, 2, 6)]),
    row(aten.einsum.default, "ij->", [n(4, 6)]),
    row(aten.einsum.default, "i,j->ij", [n(4), n(6)]),
    row(aten.einsum.default, "ij,j,k->ik", [n(4, 6), n(6), n(2)]),
    row(aten.bilinear.default, n(4, 2, 3), n(4, 2, 6), n(4, 3, 6), n(4)),
    row(aten.bilinear.default, n(4, 3), n(4, 6), n(2, 3, 6)),
    row(aten.cdist.default, n(2, 4, 3), n(6, 3)),
    row(aten.cdist.default, n(4, 3), n(6, 3), 1.0),
    row(aten.addmv.default, n(4), n(4, 6), n(6), beta=0.5),
    row(aten.addr.default, n(4, 6), n(4), n(6), alpha=2.0),
    row(aten.addbmm.default, n(4, 3), n(2, 4, 6), n(2, 6, 3)),
    row(aten.baddbmm.default, n(2, 3), n(4, 2, 6), n(4, 6, 3)),
]
