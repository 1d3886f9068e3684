"""Operators with several results on two ranks: operators with a rule, operators whose dims are all
whole, and operators without a rule compute the same as on one device.
"""

from __future__ import annotations

import warnings

import torch
from pool import Pools
from torch import nn

import autopar

PLANS = (dict(data=2), dict(tensor=dict(size=2, mode="1d")))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(8, 8)
        self.gru = nn.GRU(2, 4, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.bag = nn.EmbeddingBag(10, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(x)
        top, places = h.topk(4, dim=1)
        largest, at = h.max(1, keepdim=True)
        ordered, order = h.sort(1)
        var, mean = torch.var_mean(h, 1, keepdim=True)
        square = h.view(-1, 2, 4)
        _, s, _ = torch.linalg.svd(square, full_matrices=False)
        _, r = torch.linalg.qr(square)
        lengths, steps = self.gru(h.view(-1, 4, 2))
        out, (_, cells) = self.lstm(lengths)
        words = self.bag((x.abs() * 3).long().clamp(0, 9))
        made = (
            torch.linspace(0, 1, 8).double()
            + torch.eye(8)[2]
            + torch.hann_window(8)
            + torch.triu_indices(8, 8)[0, :8]
        )
        total = (
            (top * places).sum()
            + (h * largest + at).mean()
            + (ordered * order).sum()
            + ((h - mean) / var).sigmoid().sum()
        )
        total = (
            total
            + s.sum()
            + (r**2).sum()
            + out.square().mean()
            + steps.mean()
            + cells.square().sum()
        )
        return total + words.square().mean() + (h * made).mean() + torch.histc(h.detach(), 4).sum()


def _compare() -> list[tuple[str, float, float, list[str], tuple[str, ...]]]:
    """For each plan: the errors of the loss and of the worst gradient against the eager model, the
    layouts of ``topk``, and the notes.
    """
    warnings.simplefilter("ignore")
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eager = Several()
    expected = eager(x)
    expected.backward()
    found = []
    for parallel in PLANS:
        compiled = autopar.compile(Several(), x, 2, parallel=parallel, progress=False)
        loss = compiled(x)
        loss.backward()
        pairs = zip(compiled.parameters(), eager.parameters(), strict=True)
        worst = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)  # type: ignore[union-attr, operator]
        layouts = [repr(node.out) for name, node in compiled.plan.nodes.items() if name == "topk"]
        found.append(
            (str(parallel), abs(float(loss) - float(expected)), worst, layouts, compiled.plan.notes)
        )
    return found


def test_several_results_are_those_of_one_device(ranks: Pools) -> None:
    first, second = ranks(2).run(_compare, timeout=250)
    assert first == second
    for plan, loss, gradient, layouts, notes in first:
        assert loss < 1e-9, plan
        assert gradient < 1e-9, plan
        assert any("embedding_bag" in note and "runs whole" in note for note in notes), plan
        assert (
            layouts == ["(S0,)"] if "data" in plan else layouts
        )  # the batch is not gathered for it
