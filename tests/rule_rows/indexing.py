"""Rows of lookups, masks and new tensors, whose rules are in ``autopar/rules/indexing.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
i, n = operands.i, operands.n
WINDOWS = "hann hamming blackman bartlett kaiser"

ROWS: list[Row] = [
    row(aten.embedding.default, n(12, 4), i(12, 4, 6), 3),
    row(aten.gather.default, n(4, 6, 3), 1, i(6, 4, 2, 3)),
    row(aten.gather.default, n(4, 6), -1, i(6, 2, 4)),
    row(aten.take_along_dim.default, n(4, 6), i(6, 4, 2), 1),
    row(aten.take_along_dim.default, n(4, 6), i(6, 1, 2), 1),
    row(aten.index_select.default, n(4, 6, 2), 1, i(6, 8)),
    row(aten.index.Tensor, n(6, 4, 8), [i(6, 4)]),
    row(aten.index.Tensor, n(6, 4, 8), [None, i(4, 2, 6)]),
    row(aten.index.Tensor, n(6, 4, 8), [i(6, 2, 1), i(4, 6)]),
    row(aten.index.Tensor, n(6, 4, 8), [None, i(4, 4, 1), i(8, 1, 2)]),
    row(aten.index.Tensor, n(6, 4, 8), [i(6)]),
    row(aten.zeros.default, [4, 6], dtype=torch.float64),
    row(aten.ones.default, [4, 6], dtype=torch.float64),
    row(aten.full.default, [4, 6], 2.0, dtype=torch.float64),
    row(aten.new_zeros.default, n(4, 6), [6, 4]),
    row(aten.new_ones.default, n(4, 6), [6, 4]),
    row(aten.new_full.default, n(4, 6), [6, 4], 3.0),
    row(aten.zeros_like.default, n(4, 6)),
    row(aten.ones_like.default, n(4, 6)),
    row(aten.full_like.default, n(4, 6), 3.0),
    row(aten.arange.default, 12),
    row(aten.scalar_tensor.default, 2.0, dtype=torch.float64),
    row(aten.triu.default, n(4, 6, 6), 1),
    row(aten.tril.default, n(6, 4)),
    row(aten.one_hot.default, i(6, 4, 2), 6),
    row(aten.linspace.default, 0.0, 1.0, 12, dtype=torch.float64),
    row(aten.logspace.default, 0.0, 1.0, 12, dtype=torch.float64),
    row(aten.eye.default, 6, dtype=torch.float64),
    row(aten.triu_indices.default, 4, 6),
    row(aten.tril_indices.default, 4, 6),
    *(
        row(getattr(aten, f"{name}_window").default, 12, dtype=torch.float64)
        for name in WINDOWS.split()
    ),
]
MORE: list[Row] = [
    row(aten.diagonal.default, n(4, 6, 6), 1, 1, 2),
    row(aten.diag_embed.default, n(4, 6), 0, -2, -1),
    row(aten.diag_embed.default, n(4, 6), 1, 0, 2),
    row(aten.bucketize.Tensor, n(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
    row(aten.isin.Tensor_Tensor, i(9, 4, 6), i(9, 2, 2)),
    row(aten.searchsorted.Tensor, n(6).sort()[0], n(4, 6)),
    row(aten.searchsorted.Tensor, n(4, 6).sort()[0], n(4, 2)),
]
