"""Any legal plan is correct: strategies drawn at random for every node give the loss and gradients of one device."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import small_graphs
from equivalence import compare, worst
from pool import Pools
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from autopar.analysis import Analysis
from autopar.passes.lower import lower
from autopar.passes.microbatch import accumulate
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Compiled

TOLERANCE = 1e-9
PLANS = {(2,): 9, (4,): 4, (2, 2): 12}  # of each model
# Those whose loss is a mean or a cross entropy of samples that know nothing of each other.
IN_PARTS = ("mlp", "attention", "language", "softmax")


def errors(name: str, sizes: tuple[int, ...], seeds: list[int], microbatches: int = 1) -> dict[int, tuple[float, str]]:
    """The worst error of each random plan; a rank's work."""
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    model, sample = small_graphs.make(name)
    part = {k: x[: len(x) // microbatches] for k, x in sample.items()}
    analysis, prologue = small_graphs.analyse(model, part), None
    if microbatches > 1:
        captured, prologue = accumulate(analysis, microbatches)
        analysis = Analysis(captured)
    space = small_graphs.Space(analysis, sizes)
    mesh = Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = {}
    for seed in seeds:
        plan = dataclasses.replace(space.plan(space.random(seed)), microbatches=microbatches)
        try:
            lowered = lower(analysis, plan, copy.deepcopy(prologue))
            compiled = Compiled(analysis.captured, plan, lowered, mesh, model=model)
            found[seed] = worst(compare(copy.deepcopy(model), sample, compiled))
        except Exception as e:
            raise AssertionError(f"{name} on {sizes}, seed {seed}: {e}") from e
    return found


@pytest.mark.parametrize("sizes", PLANS)
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_random_plans_are_right(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    for found in ranks(math.prod(sizes)).run(errors, name, sizes, list(range(PLANS[sizes]))):
        assert all(e < TOLERANCE for e, _ in found.values()), found


def test_there_are_200() -> None:
    assert len(small_graphs.MODELS) * sum(PLANS.values()) == 200


@pytest.mark.parametrize("name", IN_PARTS)
def test_random_plans_in_microbatches_are_right(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(errors, name, (2,), list(range(5)), 2):
        assert all(e < TOLERANCE for e, _ in found.values()), found
