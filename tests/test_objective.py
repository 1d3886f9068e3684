"""What the search minimises is the step time that the report has."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from objective import ALLOWED, difference, measure
from regret_cases import CASES

from autopar.frontend.traced_model import TracedModel
from autopar.search.fitting.reserves import Reserves
from autopar.search.inner.step_bounds import Level
from autopar.search.neighbours import tensor_modes
from autopar.search.open_families import OpenFamilies, OpenFamily
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis


@pytest.mark.parametrize(
    ("name", "draws"), [("cnn-5-cpu", 3), pytest.param("cnn-8-p100", 2, marks=pytest.mark.slow)]
)
def test_objective_and_report_agree(name: str, draws: int) -> None:
    row = measure(next(case for case in CASES if case.name == name), draws, seed=0)
    assert len(row.drawn) == draws
    assert max(abs(each) for each in (row.free, *row.drawn)) <= ALLOWED


def pipeline(chunks: int, microbatches: int = 8) -> Configuration:
    return Configuration(
        2, (Axis("data", 4),), microbatches, chunks=chunks, schedule="zero-bubble", place=0
    )


def waiting(estimate: float, chunks: int, level: Level = Level.SOLVED) -> OpenFamily:
    return OpenFamily(estimate, estimate / 2, level, (pipeline(chunks),))


def test_families_come_in_the_order_of_their_estimates() -> None:
    families = OpenFamilies()
    for estimate in (3.0, 1.0, 2.0):
        families.push(waiting(estimate, chunks=1))
    assert [each.estimate for each in families.first(2)] == [1.0, 2.0]
    assert sorted(families.bounds()) == [0.5, 1.0, 1.5]
    assert [families.pop().estimate for _ in range(3)] == [1.0, 2.0, 3.0]
    assert not families


def test_a_known_ratio_of_unequal_stages_holds_for_all_meshes_but_not_after_the_cut() -> None:
    families = OpenFamilies()
    families.push(waiting(1.0, chunks=4))
    families.push(waiting(1.2, chunks=1))
    families.push(waiting(1.6, chunks=4, level=Level.CUT))
    families.learn_ratio(Level.CUT, pipeline(4, microbatches=16), 1.5)
    families.learn_ratio(Level.CUT, pipeline(4, microbatches=32), 1.7)  # the lowest ratio counts
    assert [families.pop().estimate for _ in range(3)] == [1.2, 1.0, 1.6]


def test_a_known_ratio_of_scarce_memory_holds_for_as_many_replicas_and_microbatches() -> None:
    def of_one_replica(replicas: int, tensor: int, microbatches: int = 8) -> OpenFamily:
        axes = Axis("tensor", tensor, use="tensor"), Axis("data", replicas, use="data")
        configuration = replace(pipeline(1, microbatches), axes=axes)
        return OpenFamily(1.0, 0.5, Level.PLACED, (configuration,))

    families = OpenFamilies()
    families.learn_ratio(Level.SOLVED, of_one_replica(4, 2).family[0], 2.0)
    assert families.estimate(of_one_replica(4, 3)) == 2.0
    assert families.estimate(of_one_replica(4, 2)._replace(level=Level.SOLVED)) == 1.0
    assert families.estimate(of_one_replica(2, 4)) == 1.0
    assert families.estimate(of_one_replica(4, 2, microbatches=16)) == 1.0


def test_similar_configurations_leave_free_what_one_had_to() -> None:
    reserves = Reserves()
    assert reserves.of(pipeline(1)) == [0.0, 0.0]
    # The second rank left 5 bytes free, of which 2 were not needed.
    reserves.learn(pipeline(1), [0.0, 5.0], [-7.0, -2.0])
    assert reserves.of(pipeline(4)) == [0.0, 3.0]
    assert reserves.of(pipeline(4, microbatches=16)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        # The rank that ends last is not the one that computes longest.
        ("gpt-4l-8-cpu", dict(mesh=(2, 2), schedule="1f1b", micro_batch_size=1)),
        # A plan at its own prices is as fast as one at other prices.
        ("vit-6l-12-a100", dict(parallel=dict(data=4, tensor=dict(size=3, mode="1d")), zero=2)),
        ("cnn-8-p100", dict(mesh=(2, 2), schedule="interleaved-1f1b", micro_batch_size=6)),
        # The rounds lead away from the fastest plan, which is confirmed at its own prices.
        pytest.param("llama-32l-256-h100", dict(parallel=dict(data=256)), marks=pytest.mark.slow),
    ],
)
def test_a_plan_at_its_own_prices_takes_what_is_reported(
    case: str, options: dict[str, Any]
) -> None:
    found = next(each for each in CASES if each.name == case)
    traced = TracedModel(*found.make(), None, found.options.get("precision"))
    assert abs(difference(traced, found, options)) < 1e-5


def test_a_pickled_axis_has_the_hash_of_the_process_that_reads_it() -> None:
    axis = Axis("data", 4)
    before = hash(axis)
    code = (
        "import pickle, sys; axis = pickle.load(sys.stdin.buffer); "
        "print(len({axis, type(axis)('data', 4)}))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(axis),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        check=True,
    )
    assert other.stdout.strip() == b"1"
    assert hash(axis) == before == hash(replace(axis))


def test_one_axis_of_a_mode_may_split_samples() -> None:
    """Around data parallelism over 24 ranks stands a mode whose depth replicates products of 2 x 2
    ranks, and no mode that splits them over more ranks than are worth a try.
    """
    near = Configuration(1, (Axis("data", 24, use="data"),), 1, place=None)
    enumeration = Mock(microbatch_counts=lambda configuration: [1], failures=[])
    modes = [family[0] for family in tensor_modes(enumeration, near)]
    sizes = {tuple(a.size for a in each.axes if a.mode is not None) for each in modes}
    assert {(2, 2), (2, 2, 2), (3, 2, 2), (6, 2, 2)} <= {tuple(s) for s in sizes}
    assert all(math.prod(s) // max(s) <= 4 for s in sizes)
