"""Any legal plan is correct: strategies drawn at random for every node give the loss and gradients of one device."""

from __future__ import annotations

import copy
import functools

import pytest
import small_graphs
import torch.distributed as dist
from equivalence import compare, worst
from pool import Pools

from autopar.passes.lower import lower
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Compiled

TOLERANCE = 1e-9
PLANS = {(2,): 9, (4,): 4, (2, 2): 12}  # of each model


def errors(name: str, sizes: tuple[int, ...], seeds: list[int]) -> dict[int, tuple[float, str]]:
    """The worst error of each random plan; a rank's work."""
    model, sample = small_graphs.make(name)
    analysis = small_graphs.analyse(model, sample)
    space = small_graphs.Space(analysis, sizes)
    mesh = Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = {}
    for seed in seeds:
        plan = space.plan(space.random(seed))
        try:
            compiled = Compiled(analysis.captured, plan, lower(analysis, plan), mesh, model=model)
            found[seed] = worst(compare(copy.deepcopy(model), sample, compiled))
        except Exception as e:
            raise AssertionError(f"{name} on {sizes}, seed {seed}: {e}") from e
    return found


@functools.cache
def _first_seed(name: str, sizes: tuple[int, ...]) -> int:
    return 1000 * list(small_graphs.MODELS).index(name) + 100 * list(PLANS).index(sizes)


@pytest.mark.parametrize("sizes", PLANS)
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_random_plans_are_right(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    world_size, first = sum(sizes) if len(sizes) == 1 else 4, _first_seed(name, sizes)
    for found in ranks(world_size).run(errors, name, sizes, list(range(first, first + PLANS[sizes]))):
        assert all(e < TOLERANCE for e, _ in found.values()), found


def test_there_are_200() -> None:
    assert len(small_graphs.MODELS) * sum(PLANS.values()) == 200
