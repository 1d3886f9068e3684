"""Rows of losses, whose rules are in ``autopar/rules/loss.py``."""

from __future__ import annotations

from typing import Any

import torch
from emulate import Row

from autopar.runtime.kernels import graph_kernels
from rule_rows.operands import Operands, aten, fixed, overload, row

operands = Operands()
f, i, n = operands.f, operands.i, operands.n
LOSSES = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss
kl_div poisson_nll_loss smooth_l1_loss soft_margin_loss"""


def _loss(name: str) -> Row:
    target = overload(name)
    x = f(4, 6).log() if name == "kl_div" else f(4, 6)
    more: dict[str, Any] = (
        {"log_input": True, "full": False, "eps": 1e-8} if name == "poisson_nll_loss" else {}
    )
    return fixed(row(target, x, f(4, 6), **more, reduction=0), 1)


ROWS: list[Row] = [
    *map(_loss, LOSSES.split()),
    row(graph_kernels.cross_entropy, n(4, 6, 12), i(12, 4, 6), None, 3, 0.1),
    fixed(row(graph_kernels.cross_entropy, n(4, 12), i(12, 4), f(12), -100, 0.0), 2),
    row(graph_kernels.target_count, i(12, 4, 6), None, 3, torch.float64),
    fixed(row(graph_kernels.target_count, i(12, 4, 6), f(12), 3, torch.float64), 1),
    fixed(
        row(aten.binary_cross_entropy_with_logits.default, n(4, 6), f(4, 6), f(4, 1), f(6), 0), 2, 3
    ),
    fixed(row(aten.binary_cross_entropy.default, f(4, 6), f(4, 6), f(6), 0), 2),
    row(aten.margin_ranking_loss.default, n(4, 6), n(4, 6), n(4, 6).sign(), 0.1, 0),
    row(aten.cross_entropy_loss.default, n(4, 12), i(12, 4), None, 0, 3, 0.1),
    fixed(row(aten.cross_entropy_loss.default, n(4, 12), i(12, 4), f(12), 0), 2),
    row(aten.cross_entropy_loss.default, n(4, 6, 12), i(6, 4, 12), None, 0),
    row(aten.cross_entropy_loss.default, n(4, 12), f(4, 12), None, 0),
    row(aten.nll_loss.default, n(4, 12), i(12, 4), None, 0, 3),
    fixed(row(aten.nll_loss_nd.default, n(4, 6, 12), i(6, 4, 12), f(6), 0), 2),
    row(aten.nll_loss2d.default, n(4, 6, 12, 2), i(6, 4, 12, 2), None, 0),
]
MORE: list[Row] = [
    fixed(row(aten.cosine_embedding_loss.default, n(4, 6), n(4, 6), n(4).sign(), 0.1, 0), 2),
    row(aten.triplet_margin_loss.default, n(4, 6), n(4, 6), n(4, 6), 1.0, 2.0, 1e-6, False, 0),
    row(
        aten.triplet_margin_loss.default,
        n(4, 2, 6),
        n(4, 2, 6),
        n(4, 2, 6),
        1.0,
        2.0,
        1e-6,
        True,
        0,
    ),
    row(aten.multi_margin_loss.default, n(4, 6), i(6, 4), 1, 1.0, None, 0),
    fixed(row(aten.multi_margin_loss.default, n(4, 6), i(6, 4), 1, 1.0, f(6), 0), 2),
    row(aten.multilabel_margin_loss.default, n(4, 6), i(6, 4, 6), 0),
    row(
        aten._ctc_loss.Tensor,
        n(8, 4, 6).log_softmax(-1),
        i(5, 4, 2) + 1,
        torch.full((4,), 8),
        torch.full((4,), 2),
    ),
]
