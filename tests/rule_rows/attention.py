"""Rows of attention, whose rules are in ``autopar/rules/attention.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
b, n = operands.b, operands.n

ROWS: list[Row] = [
    row(aten.scaled_dot_product_attention.default, n(4, 6, 2, 4), n(4, 6, 8, 4), n(4, 6, 8, 3)),
    row(
        aten.scaled_dot_product_attention.default,
        n(4, 6, 4, 4),
        n(4, 6, 4, 4),
        n(4, 6, 4, 4),
        None,
        0.0,
        True,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(4, 6, 4, 2),
        n(4, 6, 4, 2),
        n(4, 6, 4, 2),
        b(4, 1, 4, 4) | torch.eye(4).bool(),
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 6, 4, 2),
        n(2, 6, 4, 2),
        n(2, 6, 4, 2),
        n(6, 4, 4),
        0.0,
        False,
        scale=0.3,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 12, 4, 2),
        n(2, 4, 4, 2),
        n(2, 4, 4, 2),
        enable_gqa=True,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 6, 4, 2),
        n(2, 1, 4, 2),
        n(2, 1, 4, 2),
        n(2, 6, 4, 4),
        enable_gqa=True,
    ),
]
MORE: list[Row] = []
