"""Rows of Fourier transforms, whose rules are in ``autopar/rules/fourier.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n

ROWS: list[Row] = []
MORE: list[Row] = [
    row(aten.view_as_real.default, torch.complex(n(4, 6), n(4, 6))),
    row(aten.view_as_complex.default, n(4, 6, 2)),
    row(aten._fft_r2c.default, n(4, 6, 8), [2], 0, True),
    row(aten._fft_c2c.default, torch.complex(n(4, 6, 2), n(4, 6, 2)), [0, 1], 0, True),
    row(aten._fft_c2r.default, torch.complex(n(4, 6), n(4, 6)), [1], 2, 10),
]
