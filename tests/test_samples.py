"""What a model does with the samples of its batch is exact in microbatches, or refused: pairs,
positions, counts, masks, statistics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import zoo
from equivalence import differences, full, own, step, worst
from pool import Pools
from torch import nn

import autopar
from autopar.ir.layout import S

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


def _preference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(a - b).mean()


def pairs_of_chunks(m: Net, x: torch.Tensor) -> torch.Tensor:
    return _preference(*m.linear(x).mean(-1).chunk(2))


def pairs_by_slices(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).mean(-1)
    return _preference(score[: len(x) // 2], score[len(x) // 2 :])


def pairs_of_every_other_row(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).mean(-1)
    return _preference(score[::2], score[1::2])


def pairs_by_a_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).view(len(x) // 2, 2, -1)
    return _preference(score[:, 0], score[:, 1])


def halves_by_a_view(m: Net, x: torch.Tensor) -> torch.Tensor:
    score = m.linear(x).view(2, len(x) // 2, -1)
    return _preference(score[0], score[1])


def pairs_put_side_by_side(m: Net, x: torch.Tensor) -> torch.Tensor:
    return _preference(*m.linear(torch.cat([x, -x])).mean(-1).chunk(2))


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


def errors(case: str, **options: Any) -> float:
    """The worst error of the loss, the outputs, the gradients and the buffers."""
    model, sample = made(case)
    compiled = autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )
    assert compiled.plan.microbatches > 1
    found, expected = step(compiled, sample), step(model, sample)
    return worst(differences(found, own(expected, found)))[0]


def all_errors(cases: list[str], **options: Any) -> dict[str, float]:
    return {case: errors(case, **options) for case in cases}


def test_microbatches_on_one_rank(ranks: Pools) -> None:
    names = [*(f.__name__ for f in EXACT), "buffers_that_change"]
    (found,) = ranks(1).run(all_errors, names, micro_batch_size=2, timeout=240)
    assert found == {name: pytest.approx(0, abs=1e-9) for name in names}


def test_microbatches_of_a_single_sample(ranks: Pools) -> None:
    names = ["masked_mean", "last_token", "multihead_attention", "other_outputs"]
    (found,) = ranks(1).run(all_errors, names, micro_batch_size=1)
    assert found == {name: pytest.approx(0, abs=1e-9) for name in names}


TWO = [
    "pairs_of_chunks",
    "pairs_by_a_view",
    "positions_summed",
    "mask_of_positions",
    "masked_mean",
    "last_token",
    "other_outputs",
]


def test_microbatches_on_two_data_parallel_ranks(ranks: Pools) -> None:
    for found in ranks(2).run(
        all_errors, TWO, parallel=dict(data=2), micro_batch_size=2, timeout=240
    ):
        assert found == {name: pytest.approx(0, abs=1e-9) for name in TWO}


def test_microbatches_of_a_pipeline(ranks: Pools) -> None:
    for found in ranks(2).run(_piped, timeout=240):
        assert found == pytest.approx(0, abs=1e-9)


class Deep(nn.Module):
    """A preference loss and a masked mean over two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x).tanh()).mean(-1)
        return (
            _preference(*h.chunk(2))
            + (h * mask).sum() / mask.sum()
            + (h * torch.arange(len(x)).cumsum(0)).mean()
        )


def _piped() -> float:
    model = Deep().double()
    sample = {name: x for name, x in tensors().items() if name in ("x", "mask")}
    cut = dict(pipeline=dict(size=2, split_before=["second"]))
    compiled = autopar.compile(
        copy.deepcopy(model), sample, 2, progress=False, parallel=cut, micro_batch_size=2
    )
    found, expected = step(compiled, sample), step(model, sample)
    return worst(differences(found, own(expected, found)))[0]


class Pairs(nn.Module):
    """A preference loss between neighbours, and outputs of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.linear(x)
        return {
            "loss": _preference(*h.unflatten(0, (-1, 2)).mean(-1).unbind(1)),
            "h": h,
            "turned": h.t(),
            "positive": (h > 0).long(),
        }


def pairs_in_tiles() -> list[float]:
    """The worst errors, of training and in eval(), where a microbatch is a pair, and ranks have a
    sample of it each.
    """
    model, sample = Pairs().double(), {"x": tensors()["x"]}
    options = dict(parallel=dict(tensor=dict(size=4, mode="2d")), micro_batch_size=2)
    compiled = autopar.compile(copy.deepcopy(model), sample, 4, progress=False, **options)
    assert compiled.plan.microbatches == B // 2
    assert S(0) in compiled.plan.nodes["linear"].out
    found, expected = step(compiled, sample), step(model, sample)
    errors = [worst(differences(found, own(expected, found)))[0]]
    with torch.no_grad():
        outputs, wanted = compiled.eval()(**sample), model.eval()(**sample)
    return errors + [
        float((full(outputs[k]).double() - wanted[k].double()).abs().max()) for k in wanted
    ]


def test_outputs_of_microbatches_that_ranks_cut_again(ranks: Pools) -> None:
    for found in ranks(4).run(pairs_in_tiles):
        assert found == pytest.approx([0] * 5, abs=1e-9)


def evaluated() -> float:
    """The worst error of outputs in eval() without gradients."""
    model, sample = made("other_outputs")
    compiled = autopar.compile(
        copy.deepcopy(model), sample, 1, progress=False, micro_batch_size=2
    ).eval()
    with torch.no_grad():
        found, expected = compiled(**sample), model(**sample)
    return max(float((full(found[k]) - expected[k]).abs().max()) for k in expected)


def test_evaluation_in_microbatches(ranks: Pools) -> None:
    assert ranks(1).run(evaluated) == [pytest.approx(0, abs=1e-12)]


def planned(case: str, world_size: int = 2, **options: Any) -> autopar.Plan:
    model, sample = made(case)
    return autopar.plan(model, sample, world_size, progress=False, **options)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "each_against_all",
            r"matmul.* at .*test_samples.py:\d+ mixes samples.*dim 0 of \(8, 6\) and dim 1 of "
            r"\(6, 8\)",
        ),
        ("root_of_the_mean", r"sqrt.* at .*test_samples.py:\d+ mixes samples"),
    ],
)
def test_what_mixes_samples_is_refused_in_microbatches_and_planned_with_one(
    case: str, message: str
) -> None:
    with pytest.raises(autopar.PlanError, match=message):
        planned(case, micro_batch_size=2)
    assert planned(case).microbatches == 1


def test_statistics_of_microbatches_are_taken_only_where_they_are_asked_for() -> None:
    model, sample = zoo.cnn(batch=8)
    free = autopar.plan(model, sample, 2, progress=False, parallel=dict(pipeline=2))
    assert (free.microbatches, free.pipeline) == (1, 2)
    plan = planned("statistics", 1, micro_batch_size=2)
    assert plan.microbatches == 4
    assert any("BatchNorm uses the statistics of each microbatch" in note for note in plan.notes)


@pytest.mark.parametrize("case", IN_PAIRS)
def test_pairs_are_not_torn_apart(case: str) -> None:
    with pytest.raises(autopar.PlanError, match=r"8 microbatches of a batch of 8"):
        planned(case, 1, micro_batch_size=1)
    assert planned(case, 1, micro_batch_size=2).microbatches == 4


def sequence_classifier() -> dict[str, float]:
    """GPT-2's: the last token that is no padding tells."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, num_labels=3, pad_token_id=0
    )
    config.use_cache, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop = (
        False,
        0.0,
        0.0,
        0.0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2ForSequenceClassification(config).double()
    g = torch.Generator().manual_seed(3)
    sample = {
        "input_ids": torch.randint(0, 4, (B, T), generator=g),
        "labels": torch.randint(0, 3, (B,), generator=g),
    }
    compiled = autopar.compile(
        copy.deepcopy(model), sample, 2, progress=False, parallel=dict(data=2), micro_batch_size=2
    )
    found, expected = step(compiled, sample), step(model, sample)
    return differences(found, own(expected, found))


def test_gpt2_for_sequence_classification(ranks: Pools) -> None:
    for found in ranks(2).run(sequence_classifier):
        assert math.isfinite(max(found.values()))
        assert max(found.values()) < 1e-9, found
