"""The stage cuts that the search finds, compared with all possible cuts, on random unit costs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.search.pipeline.partition import StagePartition
from autopar.search.pipeline.unit_costs import KINDS, UnitCosts


def tables(seed: int, solutions: int, units: int, kinds: int) -> UnitCosts:
    """Each solution is slower than the one before and needs less memory, by factors that differ
    from unit to unit. Some units are equal.
    """
    draw = np.random.default_rng(seed)
    unit_class = np.concatenate([np.arange(kinds), draw.integers(0, kinds, units - kinds)])
    slower = 1 + np.cumsum(draw.uniform(0, 0.3, (solutions, kinds)), axis=0)
    leaner = np.cumprod(draw.uniform(0.3, 0.9, (solutions, kinds)), axis=0)
    made = {
        "forward": draw.uniform(1, 4, kinds) * slower,
        "backward": draw.uniform(2, 8, kinds) * slower,
        "kept": draw.uniform(1, 4, kinds) * leaner,
        "state": np.tile(draw.uniform(1, 4, kinds), (solutions, 1)),
        "step": np.zeros((solutions, kinds)),
    }
    return UnitCosts(
        **{kind: made[kind][:, unit_class] for kind in KINDS},
        duplicated={kind: np.zeros(solutions) for kind in KINDS},
        unit_class=unit_class,
    )


def cuts(units: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.combinations(range(1, units), stages - 1)]


def fastest(table: UnitCosts, run: tuple[int, int], flight: float, budget: float) -> float:
    """The least seconds of a range of units, over all mixtures of solutions that fit."""
    a, b = run
    units = np.arange(a, b)
    picks = np.array(list(itertools.product(range(len(table.seconds)), repeat=b - a)))
    seconds, memory = (
        table.seconds[picks, units].sum(axis=1),
        (table.kept[picks, units] * flight + table.state[picks, units]).sum(axis=1),
    )
    return float(seconds[memory <= budget].min(initial=math.inf))


def step(times: Sequence[float], microbatches: int) -> float:
    return sum(times) + (microbatches - 1) * max(times)


@pytest.mark.parametrize(("units", "stages"), [(5, 1), (6, 2), (8, 3), (9, 4), (6, 6)])
def test_the_cut_is_the_best_where_memory_is_free(units: int, stages: int) -> None:
    for seed, microbatches in itertools.product(range(20), (1, 4, 32)):
        table = tables(seed, 1, units, units)
        found = StagePartition(table, [math.inf] * stages, [1.0] * stages, stages).best(
            microbatches
        )
        assert found is not None
        taking = table.seconds[0]
        every = {
            cut: step(
                [taking[a:b].sum() for a, b in itertools.pairwise([*cut, units])], microbatches
            )
            for cut in cuts(units, stages)
        }
        assert found[1] == pytest.approx(min(every.values()))
        assert every[found[0]] == pytest.approx(found[1])


def budgets(table: UnitCosts, flights: Sequence[float], part: float) -> list[float]:
    """Budgets between the least memory of equal stages and the memory of the fastest solutions."""
    units, found = table.seconds.shape[1], []
    for stage, flight in enumerate(flights):
        a, b = (round(units * i / len(flights)) for i in (stage, stage + 1))
        memory = (table.kept * flight + table.state)[:, a:b].sum(axis=1)
        found.append(float(memory[-1] + part * (memory[0] - memory[-1])))
    return found


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_each_unit_takes_what_is_fastest_within_memory(part: float) -> None:
    mixed = 0
    for seed in range(10):
        table, flights = tables(seed, 3, 8, 3), [2.0, 1.0]
        room = budgets(table, flights, part)
        stages = StagePartition(table, room, flights, 2)
        for cut in cuts(8, 2):
            runs = list(itertools.pairwise([*cut, 8]))
            least = [
                fastest(table, run, flight, budget)
                for run, flight, budget in zip(runs, flights, room, strict=True)
            ]
            taken = stages.solutions(cut)
            assert (taken is None) == (max(least) == math.inf)
            for stage, (a, b) in enumerate(runs):
                estimated = float(stages.seconds(stage, np.array([a]), np.array([b]))[0])
                assert (
                    estimated <= least[stage] * 1.01
                )  # a relaxation: parts of units, at the prices for most microbatches
                assert (estimated == math.inf) == (least[stage] == math.inf)
                if taken is not None:
                    units = np.arange(a, b)
                    memory = table.kept * flights[stage] + table.state
                    assert memory[taken[a:b], units].sum() <= room[stage] * (1 + 1e-6)
                    assert table.seconds[taken[a:b], units].sum() == pytest.approx(
                        least[stage], rel=1e-3
                    )
                    mixed += len(set(taken[a:b].tolist())) > 1
    assert mixed


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("part", [0.2, 0.6])
def test_the_cut_is_nearly_the_best_within_memory(stages: int, part: float) -> None:
    """All cuts with their best mixtures of solutions are compared with the search's cut and its
    mixtures.
    """
    for seed in range(15):
        table, flights = tables(seed, 3, 8, 3), [float(stages - s) for s in range(stages)]
        room = budgets(table, flights, part)
        every = {
            cut: step(
                [
                    fastest(table, run, *of)
                    for run, *of in zip(itertools.pairwise([*cut, 8]), flights, room, strict=True)
                ],
                8,
            )
            for cut in cuts(8, stages)
        }
        found = StagePartition(table, room, flights, stages).best(8)
        assert (found is None) == (min(every.values()) == math.inf)
        if found is not None:
            assert every[found[0]] <= min(every.values()) * 1.05


@pytest.mark.parametrize(("units", "stages"), [(6, 2), (8, 3), (9, 4)])
@pytest.mark.parametrize("often", [0.3, 0.9])
def test_a_cut_where_little_is_sent(units: int, stages: int, often: float) -> None:
    """Some cuts have large messages, whose seconds there and back count once. A search that does
    not know the messages finds worse cuts.
    """
    better = 0
    for seed, microbatches in itertools.product(range(20), (1, 4, 16)):
        table, draw = tables(seed, 1, units, units), np.random.default_rng(seed)
        search = StagePartition(table, [math.inf] * stages, [1.0] * stages, stages)
        unaware = search.best(microbatches)
        search.receive_seconds = np.where(
            draw.random(units) < often, draw.uniform(5, 10, units), 0.1
        )
        search.receive_seconds[0] = 0.0
        found = search.best(microbatches)
        assert found is not None
        assert unaware is not None
        taking = table.seconds[0]
        every = {
            cut: step(
                [taking[a:b].sum() for a, b in itertools.pairwise([*cut, units])], microbatches
            )
            + 2 * search.receive_seconds[list(cut)].sum()
            for cut in cuts(units, stages)
        }
        assert every[found[0]] == pytest.approx(found[1])
        assert every[found[0]] <= min(every.values()) * 1.1
        better += every[found[0]] < every[unaware[0]]
    assert better > 5


def test_what_a_stage_is_sent_takes_its_memory() -> None:
    table = tables(0, 1, 6, 6)
    memory = (table.kept * 2 + table.state)[0]
    search = StagePartition(table, [math.inf, float(memory[2:].sum())], [2.0, 2.0], 2)
    assert search.solutions((0, 2)) is not None
    search.received_bytes = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert search.solutions((0, 2)) is None
    assert search.solutions((0, 3)) is not None
    assert search.best(4)[0] != (0, 2)  # type: ignore[index]


@pytest.mark.parametrize(("units", "pipeline", "chunks"), [(6, 2, 1), (8, 3, 1), (8, 2, 2)])
def test_each_rank_reads_a_parameter(units: int, pipeline: int, chunks: int) -> None:
    """The best of the cuts in which each rank has a parameter; any cut, where none exists."""
    seen = Counter[str]()
    for seed in range(20):
        table = tables(seed, 1, units, units)
        search = StagePartition(
            table, [math.inf] * pipeline * chunks, [1.0] * pipeline * chunks, pipeline
        )
        unaware = search.best(4)
        has_parameter = search.has_parameter = [
            bool(n < 0.5) for n in np.random.default_rng(seed).random(units)
        ]
        found = search.best(4)
        assert found is not None
        assert unaware is not None
        good = {
            cut: step([table.seconds[0, a:b].sum() for a, b in search.ranges(cut)], 4)
            for cut in cuts(units, pipeline * chunks)
            if all(
                any(any(has_parameter[a:b]) for a, b in search.ranges(cut)[rank::pipeline])
                for rank in range(pipeline)
            )
        }
        if chunks == 1:
            assert (found[0] in good) == bool(good)
        if good and chunks == 1:
            assert found[1] == pytest.approx(min(good.values()))
        seen["before"] += unaware[0] in good
        seen["now"] += found[0] in good
        seen["good"] += bool(good)
    assert seen["before"] < seen["now"]
    assert seen["now"] >= (1 if chunks == 1 else 0.9) * seen["good"]


def test_nothing_fits() -> None:
    table = tables(0, 2, 4, 4)
    stages = StagePartition(table, [1e-3, 1e-3], [1.0, 1.0], 2)
    assert stages.best(4) is None
    assert stages.solutions((0, 2)) is None
    stage, state, kept = stages.fullest_stage()
    assert stage in (0, 1)
    assert min(state, kept) > 0
    assert (
        StagePartition(table, [math.inf] * 5, [1.0] * 5, 5).best(4) is None
    )  # more stages than units
