"""Any legal plan is correct: strategies drawn at random for every node give the loss and gradients
of one device.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import search_space
import small_graphs
import torch
import torch.distributed as dist
from equivalence import compare, worst
from pool import Pools
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from autopar.api import _check_types
from autopar.passes.lowering.lower import lower
from autopar.passes.microbatch.derive_microbatch import derive_microbatch
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.module.compiled import Compiled

aten = torch.ops.aten
TOLERANCE = 1e-9
PLANS = {(2,): 9, (4,): 4, (2, 2): 12}  # of each model
# Those whose loss is a mean or a cross entropy of samples that know nothing of each other.
IN_PARTS = ("mlp", "attention", "language", "softmax")


def errors(
    name: str, sizes: tuple[int, ...], seeds: list[int], microbatches: int = 1
) -> dict[int, tuple[float, str]]:
    """The worst error of each random plan; a rank's work."""
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    model, sample = small_graphs.make(name)
    analysis, prologue = small_graphs.analyse(model, sample), None
    if microbatches > 1:
        captured, prologue = derive_microbatch(analysis, microbatches)
        analysis = Analysis(captured)
    space = search_space.Space(analysis, sizes)
    mesh = Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = {}
    for seed in seeds:
        plan = dataclasses.replace(space.plan(space.random(seed)), microbatches=microbatches)
        try:
            lowered = lower(analysis, plan, copy.deepcopy(prologue))
            _check_types(
                analysis, lowered, mesh
            )  # as compile() does: it must not refuse what is right
            compiled = Compiled(analysis.captured, plan, lowered, mesh, model=model)
            found[seed] = worst(compare(copy.deepcopy(model), sample, compiled))
        except Exception as e:
            raise AssertionError(f"{name} on {sizes}, seed {seed}: {e}") from e
    return found


@pytest.mark.sampled(fast=5, slow=3)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=[pytest.mark.slow] * (math.prod(sizes) > 2)) for sizes in PLANS],
)
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_random_plans_are_right(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    for found in ranks(math.prod(sizes)).run(
        errors, name, sizes, list(range(PLANS[sizes])), timeout=150
    ):
        assert all(e < TOLERANCE for e, _ in found.values()), found


def test_there_are_200() -> None:
    assert len(small_graphs.MODELS) * sum(PLANS.values()) == 200


@pytest.mark.parametrize("name", IN_PARTS)
def test_random_plans_in_microbatches_are_right(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(errors, name, (2,), list(range(5)), 2, timeout=150):
        assert all(e < TOLERANCE for e, _ in found.values()), found


class Noisy(torch.nn.Module):
    """Random operators that no rule splits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.drop = torch.nn.Dropout2d(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.conv(x))
        keep = torch.bernoulli(
            torch.full((len(x), 1, 1, 1), 0.5, dtype=x.dtype)
        ) + 0.1 * torch.rand_like(y)
        return (y * keep).square().mean()


def noise(seed: int) -> tuple[list[float], float]:
    """Loss and some gradients, and the next call's loss, with this rank's own generator in another
    state than the others'.
    """
    _clear_sharding_prop_cache()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Noisy().double(), small_graphs._floats(4, 3, 6, 6)
    analysis = small_graphs.analyse(model, x)
    space = search_space.Space(analysis, (2,))
    plan = space.plan(space.random(seed))
    torch.manual_seed(dist.get_rank())
    lowered = lower(analysis, plan)
    (drop,) = [n for n in lowered.evaluate.graph.nodes if aten.feature_dropout.default in n.args]
    assert drop.args[-1] is False
    mesh = Mesh((2,), ("a",), "cpu")
    _check_types(analysis, lowered, mesh)
    compiled = Compiled(analysis.captured, plan, lowered, mesh, model=model)
    loss = compiled(x)
    loss.backward()
    gradient = compiled.get_parameter("conv.bias").grad.full_tensor()
    return [loss.item(), *gradient.tolist()], compiled(x).item()


def test_unsplit_random_operators_draw_alike_on_all_ranks(ranks: Pools) -> None:
    for seed in range(5):
        (first, next_loss), second = ranks(2).run(noise, seed)
        assert (pytest.approx(first, rel=1e-12), pytest.approx(next_loss, rel=1e-12)) == second
        assert first[0] != next_loss  # another call draws again
