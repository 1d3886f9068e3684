"""Pipelined programs on torch's schedules: what they compute, and the loop that users write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import staged
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, differences, full, loss_of, step, step_in_parts, worst
from pipeline_cases import DATA, GRID, RUNS, TENSOR, TOLERANCE, ZERO, batch, build, close, part
from pool import Pools
from staged import Case
from torch import nn

import autopar

TWO = [Case(2, schedule, chunks, options=part(2)) for schedule, chunks in RUNS]
FOUR = [
    Case(2, "1f1b", options=part(2, **DATA)),
    Case(2, "zero-bubble", 2, options=part(2, **TENSOR)),
    Case(4, "1f1b", options=part(2)),
]
MORE = [
    *(Case(2, schedule, chunks, 16, part(4, **ZERO)) for schedule, chunks in RUNS),
    *(Case(2, schedule, chunks, 16, part(4, **TENSOR)) for schedule, chunks in RUNS),
    *(Case(4, schedule, chunks, 16, part(2)) for schedule, chunks in RUNS),
]
EIGHT = [
    *(Case(2, schedule, chunks, 16, part(2, **GRID)) for schedule, chunks in RUNS),
    *(Case(4, schedule, chunks, 16, part(2, **DATA)) for schedule, chunks in RUNS),
    Case(4, "interleaved-1f1b", 2, 16, part(2, **TENSOR)),
    Case(8, "gpipe", 1, 16, part(4)),
    Case(8, "1f1b", 1, 16, part(2)),
]
MODELS = ("gpt2", "llama", "t5", "vit", "unet")
ON_FOUR = ("gpt2", "unet")  # on four ranks in tests that are not slow
OFTEN = ("gpt2", "unet")  # in slow tests: one stack, and skips. The others are alike
SLOW_MODELS = [
    pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive)
    for name in MODELS
]


def _equal(ranks: Pools, world_size: int, name: str, cases: list[Case]) -> None:
    everywhere = ranks(world_size).run(staged.check, name, cases, timeout=600)
    model, _ = getattr(zoo, name)()
    for i, case in enumerate(cases):
        for (error, what), _, _ in (found[i] for found in everywhere):
            assert error < TOLERANCE, (case, what, error)
        held = [names for found in everywhere for names in [found[i][2]]]
        assert {n for names in held for n in names} == {n for n, _ in model.named_parameters()}
        assert all(len(names) < len(list(model.parameters())) for names in held)


def test_two_ranks_equal_one_device(ranks: Pools) -> None:
    _equal(ranks, 2, "gpt2", TWO)  # other models are below, with other numbers of microbatches


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 4, name, FOUR)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_more_on_four_ranks_equals_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 4, name, MORE if name in ON_FOUR else [*FOUR, *MORE])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_eight_ranks_equal_one_device(ranks: Pools, name: str) -> None:
    _equal(ranks, 8, name, EIGHT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_any_number_of_microbatches(ranks: Pools, name: str) -> None:
    sizes = {m: dict(batch=2 * m, options=part(2)) for m in range(1, 9)}
    cases = [Case(2, "gpipe", **size) for size in sizes.values()] + [
        Case(2, "zero-bubble", **sizes[4])
    ]
    cases += [Case(2, "1f1b", **sizes[m]) for m in range(2, 9)]
    cases += [
        Case(2, schedule, 2, **sizes[m])
        for schedule in ("interleaved-1f1b", "zero-bubble")
        for m in (1, 2, 3, 4, 6, 8)
    ]
    _equal(ranks, 2, name, cases)


def _trains(case: Case) -> None:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        compiled = build(model, sample, case)
        histories = []
        for m, clip in ((compiled, autopar.clip_grad_norm_), (model, nn.utils.clip_grad_norm_)):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
            history = []
            for number, order in enumerate((2.0, 1.0, float("inf"))):
                loss = loss_of(m(**batch(sample, number)))
                (loss * 3).backward()
                loss_of(m(**batch(sample, number + 1))).backward()  # accumulates
                norm = clip(m.parameters(), 0.05, order)
                optimizer.step()
                optimizer.zero_grad()
                history.append((loss.item(), norm.item()))
            histories.append(torch.tensor(history))
    close(*histories)
    mine = dict(compiled.named_parameters())
    for name, p in model.named_parameters():
        if name in mine:
            close(mine[name], p, 1e-7, name)
    # The tied embedding is on the first and the last stage, with equal values.
    (tied,) = [
        full(p).detach() for name, p in mine.items() if name == "transformer.wte.weight"
    ] or [None]
    if tied is not None:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, tied)
        assert all(torch.equal(tied, other) for other in everywhere)


@pytest.mark.parametrize(
    "case",
    [Case(2, "1f1b", options=part(2)), Case(2, "zero-bubble", 2, options=part(4))],
    ids=str,
)
def test_training_equals_one_device(ranks: Pools, case: Case) -> None:
    ranks(2).run(_trains, case)


def test_training_with_split_stages_equals_one_device(ranks: Pools) -> None:
    ranks(4).run(_trains, Case(2, "interleaved-1f1b", 2, options=part(2, **ZERO)))


def _evaluates(case: Case) -> None:
    with Double():
        model, sample = zoo.cnn(dtype=torch.float64, dropout=0.5)
        compiled = build(model, sample, case)
        loss_of(compiled(**sample)).backward()  # moves BatchNorm's statistics
        merged: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(merged, {n: full(b) for n, b in compiled.named_buffers()})
        plain = copy.deepcopy(model).eval()
        plain.load_state_dict({n: b for part in merged for n, b in part.items()}, strict=False)
        assert all(b.sum() != 0 for n, b in plain.named_buffers())
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found, expected = compiled.eval()(**batch(sample, 1)), plain(**batch(sample, 1))
            close(found["logits"], expected["logits"])
            close(found["loss"], expected["loss"])
            assert found["loss"].requires_grad == grad
        for n, b in compiled.named_buffers():
            assert torch.equal(b, plain.get_buffer(n)), f"evaluation changed {n}"
        compiled.train()
        one, two = (full(compiled(**sample)["logits"]) for _ in range(2))
        assert not torch.equal(one, two)
        with torch.no_grad():
            assert not compiled(**sample)["loss"].requires_grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"])
def test_evaluation_is_the_models(ranks: Pools, schedule: str) -> None:
    ranks(2).run(
        _evaluates, Case(2, schedule, 2 if schedule == "interleaved-1f1b" else 1, options=part(2))
    )


def _normalises(case: Case) -> None:
    model, sample = zoo.cnn(dtype=torch.float64)
    compiled = build(model, sample, case)
    found = step(compiled, sample)
    expected = step_in_parts(
        copy.deepcopy(model), sample, compiled.plan.microbatches, compiled.plan.data_degree
    )
    error, what = worst(differences(found, staged.own(expected, found)))
    assert error < TOLERANCE, what


def test_batch_norm_takes_each_microbatchs_statistics(ranks: Pools) -> None:
    ranks(2).run(_normalises, Case(2, "1f1b", options=part(2)))
