"""Rows of normalisations, whose rules are in ``autopar/rules/normalisation.py``."""

from __future__ import annotations

from emulate import Row

from rule_rows.operands import Operands, aten, fixed, row

operands = Operands()
f, n = operands.f, operands.n

ROWS: list[Row] = [
    row(aten.layer_norm.default, n(4, 2, 6), [6], n(6), n(6), 1e-5),
    row(aten.layer_norm.default, n(4, 6), [6]),
    row(aten.layer_norm.default, n(4, 2, 6), [2, 6], n(2, 6)),
    row(aten.rms_norm.default, n(4, 2, 6), [6], n(6)),
    row(aten.group_norm.default, n(4, 6, 2, 2), 3, n(6), n(6)),
    fixed(
        row(
            aten.batch_norm.default, n(4, 6, 2, 2), n(6), n(6), n(6), f(6), False, 0.1, 1e-5, False
        ),
        3,
        4,
    ),
    fixed(
        row(aten.batch_norm.default, n(4, 6), None, None, n(6), f(6), True, 0.1, 1e-5, False), 1, 2
    ),
    row(aten.batch_norm.default, n(4, 6, 2), n(6), n(6), None, None, True, 0.1, 1e-5, False),
]
MORE: list[Row] = [
    fixed(
        row(
            aten.instance_norm.default, n(4, 6, 8), n(6), n(6), n(6), f(6), False, 0.1, 1e-5, False
        ),
        3,
        4,
    ),
    row(aten.group_norm.default, n(4, 12, 2), 6, n(12), n(12)),
]
