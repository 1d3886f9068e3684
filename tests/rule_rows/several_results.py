"""Rows of several results, whose rules are in ``autopar/rules/several_results.py``."""

from __future__ import annotations

from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n

ROWS: list[Row] = [
    row(aten.topk.default, n(4, 6), 2),
    row(aten.topk.default, n(4, 6, 2), 3, 1),
    row(aten.sort.default, n(4, 6), 0),
    row(aten.sort.stable, n(4, 6), stable=True),
    row(aten.argsort.default, n(4, 6), 1),
    row(aten.msort.default, n(4, 6)),
    *(
        row(getattr(aten, name).dim, n(4, 6, 2), 1)
        for name in ("max", "min", "median", "nanmedian")
    ),
    *(row(getattr(aten, name).default, n(4, 6)) for name in ("max", "min", "median", "aminmax")),
    row(aten.max.dim, n(4, 6), 0, True),
    row(aten.mode.default, n(4, 6), 1, True),
    row(aten.kthvalue.default, n(4, 6), 2, 0),
    row(aten.cummax.default, n(4, 6), 1),
    row(aten.cummin.default, n(4, 6), 0),
    row(aten.aminmax.default, n(4, 6), dim=1),
    *(
        row(getattr(aten, name).correction, n(4, 6, 2), [1], correction=1)
        for name in ("var_mean", "std_mean")
    ),
    row(aten.frexp.Tensor, n(4, 6)),
]
MORE: list[Row] = []
