"""What the search minimises is the step time that the report has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from objective import ALLOWED, measure
from regret_cases import CASES

from autopar.search.fitting.reserves import Reserves
from autopar.search.inner.step_bounds import Level
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
