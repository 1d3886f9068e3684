"""With ``batch="local"`` each rank passes the samples of its replica: loss, outputs and gradients
are those of one device on the global batch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, differences, own, step, traced_once, worst
from pool import Pools
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.ir.layout import I, S
from autopar.passes.lowering.conversion_path import conversion_steps

TOLERANCE = 1e-9
Sample = dict[str, torch.Tensor]
TENSOR = dict(size=2, mode="1d")
TWO: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2)),
    "microbatches, parameters split": dict(parallel=dict(data=2), micro_batch_size=1, zero=3),
}
FOUR: dict[str, dict[str, Any]] = {
    "data, in microbatches, all recomputed": dict(
        parallel=dict(data=4), micro_batch_size=1, recompute="full"
    ),
    "data and pipeline": dict(parallel=dict(data=2, pipeline=2), micro_batch_size=2),
    "data and tensor": dict(
        parallel=dict(data=2, tensor=TENSOR), zero=1, placement=("tensor", "data")
    ),
    "data and sequence": dict(parallel=dict(data=2, tensor=dict(size=2, mode="sequence"))),
}


def local(compiled: Any, sample: Sample) -> Sample:
    """This rank's samples: the replica's share of the global batch."""
    return {k: x.chunk(compiled.data_size)[compiled.data_rank] for k, x in sample.items()}


def check(name: str, configurations: dict[str, dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """The worst error of a model under each configuration."""
    _clear_sharding_prop_cache()
    model, sample = getattr(zoo, name)(dtype=torch.float64)
    found = {}
    with Double(), traced_once():
        expected, world = step(copy.deepcopy(model), sample), dist.get_world_size()
        for label, options in configurations.items():
            options = {"batch": "local", "progress": False, **options}
            compiled = autopar.compile(model, sample, world, **options)
            assert compiled.data_size > 1
            assert not any("gathers" in note for note in compiled.plan.notes)
            mine = step(compiled, local(compiled, sample))
            found[label] = worst(differences(mine, own(expected, mine)))
    return found


# The samples of GPT-2 have uneven numbers of labels that are ignored; BERT has a mask.
@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_two_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(check, name, TWO):
        assert max(found.values()) < (TOLERANCE, "")


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_four_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    for found in ranks(4).run(check, name, FOUR):
        assert max(found.values()) < (TOLERANCE, "")


def check_dropout(options: dict[str, Any]) -> tuple[float, str]:
    """The worst difference of local batches from global ones, with dropout."""
    _clear_sharding_prop_cache()
    model, sample = zoo.gpt2(dtype=torch.float64, dropout=0.1)
    found = []
    with Double(), traced_once():
        for batch in ("global", "local"):
            torch.manual_seed(3)
            twin = copy.deepcopy(model)
            compiled = autopar.compile(twin, sample, 2, batch=batch, progress=False, **options)
            found.append(step(compiled, local(compiled, sample)))
    return worst(differences(*found))


@pytest.mark.slow
def test_dropout_draws_what_it_draws_for_the_global_batch(ranks: Pools) -> None:
    for found in ranks(2).run(check_dropout, dict(parallel=dict(data=2), micro_batch_size=2)):
        assert found < (TOLERANCE, "")


class Odd(torch.nn.Module):
    """Takes a table that carries no samples, counts labels in a buffer, and weights classes by how
    often the batch has them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + (labels > 0).sum().to(self.seen.dtype)
        counts = torch.nn.functional.one_hot(labels, 4).sum(0).to(x.dtype)
        return torch.nn.functional.cross_entropy(self.layer(x + table), labels, weight=counts)


def batch(seed: int, samples: int = 8) -> Sample:
    draws = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 6, generator=draws, dtype=torch.float64),
        "labels": torch.randint(4, (samples,), generator=draws),
        "table": torch.ones(6, dtype=torch.float64),
    }


def check_odd() -> tuple[dict[str, float], float, list[str]]:
    """The errors of an odd model, of the gradient of its input, and the messages of wrong batches
    in calls with new programs.
    """
    _clear_sharding_prop_cache()
    rank, messages = dist.get_rank(), []
    model, given = Odd().double(), batch(0)
    x = given["x"].clone().requires_grad_()
    expected = step(copy.deepcopy(model), {**given, "x": x})
    options: dict[str, Any] = dict(parallel=dict(data=2), batch="local", progress=False)
    compiled = autopar.compile(model, given, 2, **options)
    mine = {**local(compiled, given), "table": given["table"]}
    mine["x"] = mine["x"].clone().requires_grad_()
    errors = differences(step(compiled, mine), expected)
    of_input = x.grad.chunk(2)[rank] - mine["x"].grad  # type: ignore[operator, union-attr]
    again = autopar.compile(model, given, 2, plan=compiled.plan, progress=False)
    wrong = [
        {**batch(5, 4)},  # a sampler was forgotten
        {**batch(rank, 4), "table": torch.full((6,), rank, dtype=torch.float64)},
        given,  # the global batch
    ]
    for bad in wrong:
        with pytest.raises(autopar.RunError) as caught:
            copy.deepcopy(again)(**bad)
        messages.append(str(caught.value))
    return errors, float(of_input.abs().max()), messages


def test_an_odd_model_and_wrong_batches(ranks: Pools) -> None:
    for errors, of_input, (alike, table, whole) in ranks(2).run(check_odd):
        assert max(errors.values()) < TOLERANCE
        assert of_input < TOLERANCE
        assert "in call 1 rank 1 was given the same samples as rank 0" in alike
        assert alike.count("\n    ") == 3
        assert "DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)" in alike
        assert "rank 1 of 2 was given another table than rank 0: it carries no samples" in table
        assert "x has size 8 in dim 0, expected 4" in whole
        assert 'with batch="local" a rank passes the 4 samples of its replica out of 8' in whole


def contradict() -> str:
    """The message where the ranks of one replica pass different samples."""
    _clear_sharding_prop_cache()
    options: dict[str, Any] = dict(parallel=dict(data=2, pipeline=2), micro_batch_size=2)
    compiled = autopar.compile(
        zoo.mlp()[0], zoo.mlp()[1], 4, batch="local", progress=False, **options
    )
    given = local(compiled, zoo.mlp()[1])
    if dist.get_rank() == 3:
        given = {name: x.flip(0) for name, x in given.items()}
    with pytest.raises(autopar.RunError) as caught:
        compiled(**given)
    return str(caught.value)


@pytest.mark.slow
def test_a_contradiction_within_a_replica(ranks: Pools) -> None:
    for message in ranks(4).run(contradict):
        assert "rank 3 of 4 was given another" in message
        assert "than rank 1: both are of replica 1" in message


def test_a_conversion_sends_as_little_as_it_can() -> None:
    x = torch.empty(8, 8)
    assert conversion_steps(x, (I, S(0)), (S(1), S(0)), (2, 2)) == ((0, "I", "S1"),)
    steps = conversion_steps(x, (I, S(0)), (S(0), I), (2, 2))
    assert steps == ((1, "S0", "I"), (0, "I", "S0"))
    with pytest.raises(autopar.PlanError, match="no conversion"):
        conversion_steps(torch.empty(3), (I,), (S(0),), (2,))


def test_a_batch_of_another_kind_is_refused() -> None:
    model, sample = zoo.mlp()
    with pytest.raises(autopar.PlanError, match='batch=\'both\': give "global" or "local"'):
        autopar.compile(model, sample, 1, batch="both", progress=False)
