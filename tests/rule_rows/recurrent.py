"""Rows of recurrent layers, whose rules are in ``autopar/rules/recurrent.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n


def _lstm(inputs: int) -> list[torch.Tensor]:
    return [n(8, inputs), n(8, 2)]


ROWS: list[Row] = [
    row(
        aten.gru.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(6, 6), n(6, 2), n(6), n(6)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row(
        aten.lstm.input,
        n(3, 4, 6),
        [n(2, 4, 2), n(2, 4, 2)],
        [*_lstm(6), *_lstm(6)],
        False,
        1,
        0.0,
        True,
        True,
        False,
    ),
    row(
        aten.rnn_tanh.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(2, 6), n(2, 2)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row(
        aten.rnn_relu.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(2, 6), n(2, 2)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
]
MORE: list[Row] = []
