"""What a model does with the samples of its batch is exact in microbatches, or refused: pairs,
positions, counts, masks, statistics.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import zoo
from equivalence import differences, full, own, step, worst
from pool import Pools
from sample_models import EXACT, IN_PAIRS, B, D, T, made, preference, tensors
from torch import nn

import autopar
from autopar.ir.layout import S


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
            preference(*h.chunk(2))
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
            "loss": preference(*h.unflatten(0, (-1, 2)).mean(-1).unbind(1)),
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
            r"matmul.* at .*sample_models.py:\d+ mixes samples.*dim 0 of \(8, 6\) and dim 1 of "
            r"\(6, 8\)",
        ),
        ("root_of_the_mean", r"sqrt.* at .*sample_models.py:\d+ mixes samples"),
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
