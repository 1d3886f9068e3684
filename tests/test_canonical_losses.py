"""Losses in the canonical graph are sums, with a count where they are means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from canonical_graphs import assert_same, canonical, targets
from torch import nn

from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import arguments, shape
from autopar.runtime.kernels.graph_kernels import cross_entropy, target_count

aten = torch.ops.aten


# --- losses
# --------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(logits, target)


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 1.5], dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"ignore_index": 2},
    {"label_smoothing": 0.2},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.3},
    {"weight": WEIGHT, "label_smoothing": 0.3, "reduction": "sum"},
]
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "rows": ((5, 6), (5,), F.cross_entropy),
    "flattened": (
        (3, 4, 6),
        (3, 4),
        lambda x, t, **o: F.cross_entropy(x.view(-1, 6), t.view(-1), **o),
    ),
    "image": ((2, 6, 3, 4), (2, 3, 4), F.cross_entropy),
    "transposed": ((2, 5, 6), (2, 5), lambda x, t, **o: F.cross_entropy(x.transpose(1, 2), t, **o)),
}


def assert_loss_kept(
    loss: Callable[..., torch.Tensor], logits: torch.Tensor, target: torch.Tensor
) -> CapturedModel:
    captured = canonical(Loss(loss), logits, target)
    logits.requires_grad_()
    expected = loss(logits, target)
    result, _ = zoo.run(captured, logits, target)
    assert_same(
        (result, *torch.autograd.grad(result, logits)),
        (expected, *torch.autograd.grad(expected, logits)),
    )
    return captured


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy_is_a_sum_and_a_count(form: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size, target_size, loss = FORMS[form]
    target = torch.randint(6, target_size)
    target.view(-1)[::4] = options.get("ignore_index", -100)
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    captured = assert_loss_kept(
        lambda x, t: loss(x, t, **options), torch.randn(size, dtype=torch.float64), target
    )
    node = next(n for n in captured.graph.nodes if n.target is cross_entropy)
    assert shape(node.args[0]) == (*target_size, 6)
    assert shape(node.args[1]) == target_size
    assert (target_count in targets(captured)) == (options.get("reduction") != "sum")
    assert aten.reshape.default not in targets(captured)
    assert form == "image" or aten.permute.default not in targets(captured)


def test_negative_log_likelihood_of_log_softmax_is_cross_entropy() -> None:
    logits, target = torch.randn(5, 6, dtype=torch.float64), torch.randint(6, (5,))
    captured = assert_loss_kept(lambda x, t: F.nll_loss(F.log_softmax(x, -1), t), logits, target)
    assert targets(captured) == [cross_entropy, target_count, aten.div.Tensor]


def test_bfloat16_losses_are_summed_in_float32() -> None:
    logits, target = torch.randn(4096, 6).bfloat16(), torch.randint(6, (4096,))
    captured = canonical(Loss(F.cross_entropy), logits, target)
    result = zoo.run(captured, logits, target)[0]
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, F.cross_entropy(logits, target))


def test_losses_of_other_forms_stay_with_a_note() -> None:
    logits, target = (
        torch.randn(6, dtype=torch.float64),
        torch.rand(6, dtype=torch.float64).softmax(-1),
    )  # one sample, without a batch dim
    captured = assert_loss_kept(F.cross_entropy, logits, target)
    assert targets(captured) == [aten.cross_entropy_loss.default]
    assert any("runs unsplit" in note for note in captured.notes)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.soft_margin_loss,
    ],
)
def test_elementwise_losses_reduce_by_themselves(
    loss: Callable[..., torch.Tensor], reduction: str
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)

    def total(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return loss(x, t, reduction=reduction).sum()

    captured = assert_loss_kept(total, logits, target)
    assert all(
        arguments(n).get("reduction", 0) == 0
        for n in captured.graph.nodes
        if n.op == "call_function"
    )
