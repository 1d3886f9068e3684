"""Recomputation and offloading change no number, and no call is computed again without need."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import search_space
import small_graphs
import staged
import torch
import zoo
from by_hand import calls, compiled, one_device, part_of
from equivalence import compare, loss_of, traced_once, worst
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from towers import X

import autopar
import autopar.api
from autopar.api import _check_types
from autopar.frontend import traced_model as tracing
from autopar.passes.lowering.lower import lower
from autopar.passes.lowering.mark_recomputed import recomputable
from autopar.runtime.communication.mesh import Mesh

Numbers = dict[str, torch.Tensor]


def numbers(program: nn.Module, sample: dict[str, Any], steps: int = 1) -> Numbers:
    """Loss, gradients and buffers after ``steps`` steps, with the random numbers of one seed."""
    torch.manual_seed(0)
    for _ in range(steps):
        loss = loss_of(program(**sample))
        loss.backward()
    gradients = {f"{n}.grad": p.grad for n, p in program.named_parameters() if p.grad is not None}
    found = {"loss": loss.detach(), **gradients, **dict(program.named_buffers())}
    return {name: getattr(value, "_local_tensor", value).clone() for name, value in found.items()}


def same(found: Numbers, expected: Numbers) -> bool:
    """Whether all tensors are equal bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def shares(names: list[str]) -> list[tuple[str, ...]]:
    """All names, and random parts of them."""
    return [
        tuple(names),
        *(part_of(names, share, seed) for seed, share in enumerate((0.3, 0.6, 0.9))),
    ]


def not_recomputed(names: list[str], recomputed: tuple[str, ...]) -> tuple[str, ...]:
    """The calls among ``names`` that are not recomputed."""
    return tuple(name for name in names if name not in recomputed and " -> " not in name)


# -- whole models


def on_one_rank(name: str, microbatches: int) -> list[bool]:
    model, sample = getattr(zoo, name)(dropout=0.1)
    analysis, prologue = tracing.TracedModel(model, sample, None).analyse(microbatches)

    def run(recomputed: tuple[str, ...], offloaded: tuple[str, ...] = ()) -> Numbers:
        parts = dict(recomputed=recomputed, offloaded=offloaded)
        plan = one_device(analysis, microbatches=microbatches, **parts)
        program = compiled(analysis, plan, copy.deepcopy(model), prologue=copy.deepcopy(prologue))
        return numbers(program, sample, steps=2)

    expected, names = run(()), calls(analysis)
    found = [run(recomputed) for recomputed in shares(names)]
    found += [
        run(recomputed, not_recomputed(names, recomputed))
        for recomputed in ((), *shares(names)[1:])
    ]
    return [same(each, expected) for each in found]


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize(
    "name",
    ["gpt2", "cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama"))],
)
def test_the_same_numbers(ranks: Pools, name: str) -> None:
    assert all(ranks(1).run(on_one_rank, name, 1)[0])


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_the_same_numbers_in_microbatches(ranks: Pools, name: str) -> None:
    assert all(ranks(1).run(on_one_rank, name, 2)[0])


def on_several(name: str, sizes: tuple[int, ...], seeds: list[int]) -> list[tuple[bool, float]]:
    """For each seed: whether recomputation leaves the numbers of a random plan as they are, and
    their error against one device.
    """
    _clear_sharding_prop_cache()
    model, sample = small_graphs.make(name)
    analysis = small_graphs.analyse(model, sample)
    space, mesh = search_space.Space(analysis, sizes), Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = []
    for seed in seeds:
        plan = space.plan(space.random(seed))
        expected = numbers(compiled(analysis, plan, model, mesh), sample)
        names = sorted(set(recomputable(lower(analysis, plan).train.graph).values()))
        again = shares(names)[seed % 4]
        plan = dataclasses.replace(plan, recomputed=again, offloaded=not_recomputed(names, again))
        _check_types(analysis, lower(analysis, plan), mesh)
        alike = same(numbers(compiled(analysis, plan, model, mesh), sample), expected)
        found.append(
            (
                alike,
                worst(compare(copy.deepcopy(model), sample, compiled(analysis, plan, model, mesh)))[
                    0
                ],
            )
        )
    return found


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_random_plans(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    for found in ranks(math.prod(sizes)).run(on_several, name, sizes, list(range(3))):
        assert all(alike and error < 1e-9 for alike, error in found), found


def sharded(name: str, options: dict[str, Any]) -> list[bool]:
    _clear_sharding_prop_cache()
    model, sample = getattr(zoo, name)(dropout=0.1)
    plan = autopar.plan(model, sample, 2, progress=False, **options)
    analysis, prologue = tracing.TracedModel(model, sample, None).analyse(plan.microbatches)

    def run(recomputed: tuple[str, ...]) -> Numbers:
        given = dataclasses.replace(plan, recomputed=recomputed)
        return numbers(
            compiled(analysis, given, model, prologue=copy.deepcopy(prologue)), sample, steps=2
        )

    names = sorted(
        set(recomputable(lower(analysis, plan, copy.deepcopy(prologue)).train.graph).values())
    )
    expected = run(())
    return [same(run(recomputed), expected) for recomputed in shares(names)]


TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", TENSOR), ("mlp", dict(parallel=dict(data=2), zero=2, micro_batch_size=2))],
)
def test_sharded(ranks: Pools, name: str, options: dict[str, Any]) -> None:
    assert all(all(found) for found in ranks(2).run(sharded, name, options))


def pipelined(name: str, schedules: list[tuple[str, int]]) -> list[bool]:
    _clear_sharding_prop_cache()
    model, sample = getattr(zoo, name)(dropout=0.1)
    found = []
    with traced_once():
        analysis = autopar.frontend.traced_model.TracedModel(model, sample, None).analyse(4)[0]
        names = calls(analysis)
        for schedule, chunks in schedules:
            starts = staged.even_starts(analysis.captured, 2 * chunks)
            plan = staged.cut_plan(
                one_device(analysis, microbatches=4), analysis.captured, starts, 2, schedule
            )
            programs = [autopar.compile(model, sample, 2, plan=plan)]
            for recomputed in (tuple(names), part_of(names, 0.6, 0)):
                offloaded = not_recomputed(names, recomputed)
                again = dataclasses.replace(plan, recomputed=recomputed, offloaded=offloaded)
                programs.append(autopar.compile(model, sample, 2, plan=again))
            expected, *others = (numbers(program, sample, steps=2) for program in programs)
            found += [same(other, expected) for other in others]
    return found


SCHEDULES = [("1f1b", 1), ("zero-bubble", 1)]


@pytest.mark.parametrize("name", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_in_a_pipeline(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(pipelined, name, SCHEDULES, timeout=150):
        assert all(found), found


class Results(nn.Module):
    """Operators with several results, complex numbers, and a buffer that the forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w + self.mean
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        values, places = h.exp().topk(3, -1)
        spectrum = torch.fft.rfft(h.sin(), dim=-1)
        spectrum = spectrum * spectrum.conj() + spectrum.exp()
        return (
            values.square().mean() + (h.gather(-1, places) * values).sum() + spectrum.abs().mean()
        )


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_several_results_complex_numbers_and_replaced_buffers(ranks: Pools, share: float) -> None:
    expected, found = ranks(1).run(replaced, share)[0]
    assert same(found, expected)


def replaced(share: float) -> tuple[Numbers, Numbers]:
    torch.manual_seed(0)
    model = Results()
    analysis = small_graphs.analyse(model, {"x": X})
    plans = (
        one_device(analysis),
        one_device(analysis, recomputed=part_of(calls(analysis), share, 3)),
    )
    expected, found = (
        numbers(compiled(analysis, plan, copy.deepcopy(model)), {"x": X}, steps=2) for plan in plans
    )
    return expected, found
