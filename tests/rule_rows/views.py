"""Rows of views and moves, whose rules are in ``autopar/rules/views.py``."""

from __future__ import annotations

from emulate import Row

from autopar.runtime.kernels import graph_kernels
from rule_rows.operands import Operands, aten, row

operands = Operands()
b, n = operands.b, operands.n

ROWS: list[Row] = [
    row(graph_kernels.send, n(4, 6)),
    row(graph_kernels.send, b(4, 6)),
    row(aten.cumsum.default, n(4, 6), 1),
    row(aten.cumprod.default, n(4, 6), 0),
    row(aten.diff.default, n(4, 6), 1, 1),
    row(aten.diff.default, n(4, 6), 1, 1, n(4, 2), n(4, 1)),
    row(aten.reshape.default, n(4, 6), [24]),
    row(aten.reshape.default, n(24), [4, 6]),
    row(aten.reshape.default, n(4, 6, 2), [12, 4]),
    row(aten.reshape.default, n(4, 6), [3, 8]),
    row(aten.reshape.default, n(6, 4), [8, 3]),
    row(aten.reshape.default, n(4, 1, 6), [1, 2, 2, 1, 6]),
    row(aten.reshape.default, n(1), []),
    row(aten.squeeze.dims, n(4, 1, 6, 1), [1, 3]),
    row(aten.unsqueeze.default, n(4, 6), 1),
    row(aten.permute.default, n(4, 6, 2), [2, 0, 1]),
    row(aten.transpose.int, n(4, 6, 2), -1, 0),
    row(aten.t.default, n(4, 6)),
    row(aten.t.default, n(4)),
    row(aten.expand.default, n(4, 1, 6), [2, 4, 6, 6]),
    row(aten.expand.default, n(), [4, 6]),
    row(aten.slice.Tensor, n(4, 6), 1, 2, 6, 2),
    row(aten.roll.default, n(4, 6), [1, -2], [1, 0]),
    row(aten.roll.default, n(4, 6), [1]),
    row(aten.flip.default, n(4, 6, 2), [0, -1]),
    row(aten.select.int, n(4, 6, 2), 1, -1),
    row(aten.slice_scatter.default, n(4, 6), n(4, 2), 1, 2, 4),
    row(aten.select_scatter.default, n(4, 6), n(4), 1, -1),
    row(aten.constant_pad_nd.default, n(4, 6), [1, 1]),
    row(aten.constant_pad_nd.default, n(4, 6, 2), [0, 0, 1, -1]),
    row(aten.constant_pad_nd.default, n(4, 6), [0, 2], 1.5),
    row(aten.pad.default, n(4, 6, 6), [2, 1], "reflect"),
    row(aten.cat.default, [n(4, 6), n(4, 2), n(4, 6)], 1),
    row(aten.cat.default, [n(4, 6), n(4, 6)], -2),
    row(aten.stack.default, [n(4, 6), n(4, 6)], 1),
    row(aten.stack.default, [n(4, 6), n(4, 6), n(4, 6)], -1),
    row(aten.repeat.default, n(4, 6), [2, 1, 3]),
]
MORE: list[Row] = [
    row(aten.logcumsumexp.default, n(4, 6), 1),
    row(aten.reshape.default, n(4, 0, 6), [0, 24]),
]
