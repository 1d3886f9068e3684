"""Forwards that treat the samples of their batch in many ways, and the model that each
belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

B, T, D = 8, 5, 6
Sample = dict[str, torch.Tensor]
Forward = Callable[..., Any]


def tensors() -> Sample:
    """Inputs that cases take by name: rows, sequences, labels, masks and tables, some of the
    batch's size by chance.
    """
    g = torch.Generator().manual_seed(0)
    real = {
        "x": (B, D),
        "sequence": (B, T, D),
        "square": (B, B, D),
        "bias": (B, B),
        "table": (B, D),
        "weights": (B,),
    }
    made = {name: torch.randn(shape, generator=g).double() for name, shape in real.items()}
    made["mask"] = (torch.rand(B, generator=g) > 0.4).double()
    made["padding"] = (torch.rand(B, T, generator=g) > 0.7).double()
    made["labels"] = torch.randint(0, D, (B,), generator=g)
    made["soft"] = torch.softmax(torch.randn(B, D, generator=g).double(), -1)
    made["tokens"] = torch.randint(0, 4, (B, T), generator=g)
    return made


class Net(nn.Module):
    """One layer and more, and a forward by name."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.linear = nn.Linear(D, D)
        self.token = nn.Parameter(torch.randn(1, 3))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(D)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(D))
        self.double()

    def forward(self, **inputs: torch.Tensor) -> Any:
        return CASES[self.case](self, **inputs)


def preference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(a - b).mean()


def pairs_of_chunks(m: Net, x: torch.Tensor) -> torch.Tensor:
    return preference(*m.linear(x).mean(-1).chunk(2))


def pairs_by_slices(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).mean(-1)
    return preference(score[: len(x) // 2], score[len(x) // 2 :])


def pairs_of_every_other_row(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).mean(-1)
    return preference(score[::2], score[1::2])


def pairs_by_a_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).view(len(x) // 2, 2, -1)
    return preference(score[:, 0], score[:, 1])


def halves_by_a_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).view(2, len(x) // 2, -1)
    return preference(score[0], score[1])


def pairs_put_side_by_side(m: Net, x: torch.Tensor) -> torch.Tensor:
    return preference(*m.linear(torch.cat([x, -x])).mean(-1).chunk(2))


def sorted_and_largest(m: Net, x: torch.Tensor) -> torch.Tensor:
    z = m.linear(x)
    return (z.sort(-1)[0] * torch.arange(D)).mean() + z.topk(2)[0].sum() + z.max(-1)[0].mean()


def labels_that_count(m: Net, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.linear(x) @ m.linear.weight.repeat(2, 1).t(), torch.arange(len(x)))


def positions_summed(m: Net, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * x.new_full((len(x), 1), 1.0).cumsum(0)).sum()


def sum_over_the_batch_size(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).square().sum() / len(x) + len(x)


def mask_of_positions(m: Net, square: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (
        m.linear(torch.softmax(square @ square.transpose(1, 2) + bias, -1) @ square).square().mean()
    )


def weights_of_positions(m: Net, square: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (m.linear(square).mean(-1) * weights).sum()


def table_of_labels(
    m: Net, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return (m.linear(x) * table[labels]).mean()


def masked_mean(m: Net, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (m.linear(x).square().mean(-1) * mask).sum() / mask.sum()


def each_cross_entropy(m: Net, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(m.linear(x), labels, reduction="none") * torch.arange(len(x))).mean()


def soft_labels(m: Net, x: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    weight = torch.arange(1.0, D + 1, dtype=torch.float64)
    return F.cross_entropy(m.linear(x), soft, weight=weight, label_smoothing=0.1) + F.cross_entropy(
        m.linear(x), soft, reduction="sum"
    )


def share_of_one(m: Net, x: torch.Tensor) -> torch.Tensor:
    return 1 - m.linear(x).sigmoid().mean()


def repeated_token(m: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([m.token.repeat(len(x), 1), m.linear(x)], 1).square().mean()


def multihead_attention(m: Net, sequence: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    found, weights = m.attention(sequence, sequence, sequence, key_padding_mask=padding > 0)
    return found.square().mean() + weights.square().mean()


def transformer_encoder(m: Net, sequence: torch.Tensor) -> torch.Tensor:
    return m.encoder(sequence).square().mean()


def last_token(m: Net, sequence: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    place = (torch.arange(tokens.shape[1]) * (tokens != 0).int()).argmax(-1)
    rows = torch.arange(len(tokens))
    return (
        F.cross_entropy(m.linear(sequence)[rows, place], tokens[:, 0])
        + m.linear(sequence)[rows, -1].square().mean()
    )


def other_outputs(m: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    z = m.linear(x)
    return {
        "loss": z.square().mean(),
        "mean": z.mean(),
        "weight": m.linear.weight * 2,
        "z": z,
        "inputs": x.mean(),
        "first": z[:, 0],
    }


def buffers_that_change(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    z = m.linear(x)
    m.average.mul_(0.9).add_(0.1 * z.mean(0).detach())
    return z.square().mean() * m.calls


def each_against_all(m: Net, x: torch.Tensor) -> torch.Tensor:
    z = F.normalize(m.linear(x), dim=-1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(x)))


def statistics(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.linear(x)).exp().mean()


def root_of_the_mean(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).square().mean().sqrt()


EXACT: tuple[Forward, ...] = (
    pairs_of_chunks, pairs_by_slices, pairs_of_every_other_row, pairs_by_a_view, halves_by_a_view,
    positions_summed, sum_over_the_batch_size, mask_of_positions, weights_of_positions,
    table_of_labels, masked_mean, each_cross_entropy, soft_labels, share_of_one, repeated_token,
    multihead_attention, transformer_encoder, last_token, other_outputs, labels_that_count,
    pairs_put_side_by_side, sorted_and_largest,
)  # fmt: skip
IN_PAIRS = (
    "pairs_of_chunks",
    "pairs_by_slices",
    "pairs_of_every_other_row",
    "pairs_by_a_view",
    "halves_by_a_view",
)
REFUSED = (each_against_all, statistics, root_of_the_mean)
CASES: Mapping[str, Forward] = {f.__name__: f for f in (*EXACT, *REFUSED, buffers_that_change)}


def made(case: str) -> tuple[Net, Sample]:
    names = list(CASES[case].__annotations__)[1:-1]
    given = tensors()
    return Net(case), {name: given[name] for name in names}
