"""Rows of convolutions, whose rules are in ``autopar/rules/convolution.py``."""

from __future__ import annotations

from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n

ROWS: list[Row] = [
    row(aten.conv1d.default, n(4, 6, 8), n(4, 6, 3), n(4), [1], [1]),
    row(aten.conv2d.default, n(4, 6, 8, 8), n(4, 6, 3, 3), None, [2, 2], [1, 1]),
    row(aten.conv2d.padding, n(2, 4, 6, 6), n(4, 4, 3, 3), n(4), [1, 1], "same"),
    row(aten.conv2d.default, n(2, 8, 6, 6), n(12, 2, 3, 3), n(12), [1, 1], [1, 1], [1, 1], 4),
    row(aten.conv2d.default, n(2, 6, 6, 6), n(12, 1, 3, 3), n(12), [1, 1], [1, 1], [1, 1], 6),
    row(aten.conv2d.default, n(2, 4, 12, 8), n(6, 4, 3, 2), n(6), [3, 2]),
    row(aten.conv2d.default, n(2, 4, 8, 6), n(4, 4, 5, 1), n(4), [2, 1], [2, 0]),
    row(aten.conv3d.default, n(2, 4, 4, 4, 4), n(6, 4, 2, 2, 2), n(6)),
]
MORE: list[Row] = [
    row(aten.conv_transpose1d.default, n(4, 6, 8), n(6, 4, 3), n(4), [2], [1]),
    row(
        aten.conv_transpose2d.input, n(4, 8, 4, 4), n(8, 3, 2, 2), n(12), [2, 2], [0, 0], [0, 0], 4
    ),
    row(aten.conv_transpose3d.input, n(2, 4, 2, 2, 2), n(4, 6, 2, 2, 2)),
]
