"""Rows of writes into parts of tensors, whose rules are in ``autopar/rules/writing.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, fixed, row

operands = Operands()
b, f, i, n = operands.b, operands.f, operands.i, operands.n

ROWS: list[Row] = []
MORE: list[Row] = [
    row(aten.index_add.default, n(6, 4), 0, i(6, 12), n(12, 4), alpha=2.0),
    row(aten.index_add.default, n(4, 6, 2), 1, i(6, 4), n(4, 4, 2)),
    row(aten.index_copy.default, n(4, 6), 1, torch.tensor([0, 3]), n(4, 2)),
    row(aten.index_fill.int_Scalar, n(4, 6), 1, i(6, 2), 0.5),
    row(aten.index_reduce.default, n(4, 6), 1, i(6, 4), f(4, 4), "amax"),
    row(aten.scatter.src, n(4, 6), 1, torch.tensor([[0, 3]] * 4), n(4, 2)),
    row(aten.scatter.value, n(4, 6), 1, i(6, 4, 2), 0.5),
    row(aten.scatter_add.default, n(4, 6), 1, i(6, 4, 8), n(4, 8)),
    # torch has a gradient of the source only if the index has its shape
    fixed(row(aten.scatter_add.default, n(4, 6), 0, i(4, 2, 6), n(4, 6)), 2),
    fixed(row(aten.scatter_add.default, n(4, 6), 1, i(6, 2, 4), n(3, 4)), 2),
    row(aten.scatter_reduce.two, n(4, 6), 1, i(6, 4, 8), f(4, 8), "amax"),
    row(aten.scatter_reduce.two, n(4, 6), 1, i(6, 4, 8), f(4, 8), "mean", include_self=False),
    row(aten.index_put.default, n(6, 4), [i(6, 12)], n(12, 4), True),
    row(aten.index_put.default, n(6, 4, 2), [None, torch.tensor([0, 3])], n(6, 2, 2)),
    row(aten.index_put.default, n(6, 4, 2), [i(6, 3, 1), i(4, 2)], n(2, 2), True),
    row(aten.index_put.default, n(4, 6, 2), [b(4, 6)], n()),
]
