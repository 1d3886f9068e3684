"""``zero=1`` and ``zero=2`` split what is stored, however dear that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import zoo

import autopar
from autopar.cost_model import Cluster
from autopar.cost_model.links import CollectiveFigures
from autopar.ir.layout import I, R, S
from autopar.search.space.choices.parameter_strategies import parameter_strategies

TENSOR = dict(size=2, mode="1d")


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("parallel", [dict(data=2), dict(data=2, tensor=TENSOR)])
def test_each_parameter_is_stored_in_parts(zero: int, parallel: dict[str, Any]) -> None:
    """Also where a reduce-scatter takes so long that whole gradients would be summed sooner."""
    cpu = Cluster.load("cpu")
    slow = {"reduce_scatter": CollectiveFigures(startup=0.01, latency=0.0, efficiency=0.01)}
    cluster = replace(cpu, links=(replace(cpu.links[0], collectives=slow),))
    model, sample = zoo.mlp(batch=8, dropout=0.0)
    ranks = 4 if "tensor" in parallel else 2
    options = dict(cluster=cluster, parallel=parallel, progress=False)
    plan = autopar.plan(model, sample, ranks, zero=zero, **options)
    axis = list(plan.mesh).index("data")
    assert all(p.stored[axis].is_shard for p in plan.parameters.values())


def test_a_parameter_that_does_not_divide_is_stored_whole() -> None:
    found = parameter_strategies((3,), "parameter", True, [2], 1, [False])
    assert {(s.stored, s.used) for s in found} == {((I,), (I,)), ((I,), (R,))}
    found = parameter_strategies((4,), "parameter", True, [2], 1, [False])
    assert {(s.stored, s.used) for s in found} == {((S(0),), (R,))}


def test_along_a_tensor_axis_a_parameter_may_be_whole_on_each_rank() -> None:
    """Ranks that compute the same have the same gradient."""
    found = parameter_strategies((4,), "parameter", True, [2], 1, [True])
    assert ((I,), (I,)) in {(s.stored, s.used) for s in found}


def test_a_used_layout_to_which_no_part_can_be_gathered_may_be_stored_whole() -> None:
    """An embedding of an odd number of words, whose columns are split along a tensor axis: parts of
    these columns along the samples' axis would be gathered to other columns.
    """
    found = parameter_strategies((5, 4), "parameter", True, [2, 2], 1, [False, True])
    layouts = {(s.stored, s.used) for s in found}
    assert ((I, S(1)), (I, S(1))) in layouts
    assert ((I, I), (I, I)) not in layouts
    even = parameter_strategies((4, 4), "parameter", True, [2, 2], 1, [False, True])
    assert ((S(0), S(1)), (R, S(1))) in {(s.stored, s.used) for s in even}
    assert not any(s.stored[0] is I for s in even)
