"""Rows of reductions, whose rules are in ``autopar/rules/reduce.py``."""

from __future__ import annotations

from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
b, i, n = operands.b, operands.i, operands.n

ROWS: list[Row] = [
    row(aten.sum.dim_IntList, n(4, 6, 2), [0, 2], False),
    row(aten.sum.dim_IntList, n(4, 6, 2), [1], True),
    row(aten.sum.dim_IntList, i(8, 4, 6), [1]),
    row(aten.mean.dim, n(4, 6, 2), [0, 1], False),
    row(aten.mean.dim, n(4, 6, 2), [-1], True),
    *(
        row(getattr(aten, name).default, n(4, 6, 2), [1], True)
        for name in ("amax", "amin", "logsumexp")
    ),
    row(aten.amax.default, n(4, 6)),
    *(
        row(getattr(aten, name).correction, n(4, 6, 2), [1], correction=1)
        for name in ("var", "std")
    ),
    row(aten.var.dim, n(4, 6), None),
    *(row(getattr(aten, name).dim, n(4, 6) > 0, 1) for name in ("any", "all")),
    row(aten.any.default, b(4, 6)),
    row(aten.prod.dim_int, n(4, 6), 0, True),
    row(aten.prod.default, n(4, 6)),
    *(row(getattr(aten, name).default, n(4, 6), 1) for name in ("argmax", "argmin")),
    row(aten.argmax.default, n(4, 6)),
    row(aten.linalg_vector_norm.default, n(4, 6), 2, [1], True),
    row(aten.linalg_vector_norm.default, n(4, 6)),
    row(aten.norm.ScalarOpt_dim, n(4, 6), 2, [1]),
    row(aten.norm.Scalar, n(4, 6), 2),
    row(aten.softmax.int, n(4, 6, 2), 1),
    row(aten.log_softmax.int, n(4, 6), -1),
]
MORE: list[Row] = [
    row(aten.nansum.default, n(4, 6), [1]),
    row(aten.count_nonzero.dim_IntList, b(4, 6), [0]),
    row(aten.count_nonzero.default, i(3, 4, 6)),
    row(aten.histc.default, i(4, 12).double(), 4, 0, 3),
    row(aten.histc.default, n(4, 6), 3),
    row(aten.cosine_similarity.default, n(4, 6, 2), n(6, 1), 1),
    row(aten.cosine_similarity.default, n(4, 6), n(4, 6), -1),
    row(aten._safe_softmax.default, n(4, 6, 2), 1),
]
