"""Stage cuts: which units go to which stage, and which solution each unit takes, so that each stage
fits its memory and a step is short.

A pipeline whose stage i takes t_i seconds for a microbatch takes sum(t) + (m - 1) max(t) for m
microbatches (exactly so where the stages are equal; Narayanan et al. 2021), and the seconds of the
first microbatch's messages from stage to stage and back. So the slowest stage counts most. First
the least possible max(t) is found, then the least sum(t) with the messages, for that max(t) and for
a few larger ones. Each search is a dynamic program over the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.cost_model import schedule_seconds
from autopar.search.pipeline.best_chain import UnitRanges, best_chain
from autopar.search.pipeline.choose_solutions import choose_solutions
from autopar.search.pipeline.unit_costs import UnitCosts
from autopar.search.pipeline.units import rank_without_parameter

_MOST_PRICES = 16
# The slowest stage may take up to these multiples of the least possible max(t).
_SLACKS = (1.0, 1.01, 1.03, 1.1, 1.2, 1.4, 1.7, 2.0, math.inf)


class StagePartition:
    """The stages of one pipeline, each within its memory.

    Args:
        costs: of the units on the devices of each stage; one for all stages where they are alike.
        budgets: bytes of each stage.
        in_flight: microbatches in flight at each stage.
        pipeline: ranks; stage i is on rank i % pipeline.

    Attributes:
        received_bytes: [unit]: bytes that a stage receives in each microbatch, and holds, if it
            begins with this unit.
        receive_seconds: [unit] or [stage, unit]: seconds of receiving these bytes.
        has_parameter: [unit]: whether it reads a parameter.
    """

    def __init__(
        self,
        costs: UnitCosts | Sequence[UnitCosts],
        budgets: Sequence[float],
        in_flight: Sequence[float],
        pipeline: int,
    ) -> None:
        self.budgets, self.in_flight, self.pipeline = budgets, in_flight, pipeline
        self.costs = [costs] * len(budgets) if isinstance(costs, UnitCosts) else list(costs)
        self.units = self.costs[0].seconds.shape[1]
        self.received_bytes = self.receive_seconds = np.zeros(self.units)
        self.has_parameter: Sequence[bool] = (True,) * self.units
        self._prices = self._memory_prices()
        self._sums: dict[tuple[int, float], tuple[np.ndarray, np.ndarray]] = {}

    def _memory_prices(self) -> np.ndarray:
        """Prices of memory, in seconds a byte, at which some unit changes its best solution."""
        slopes = set().union(*(self._slopes(costs) for costs in self._different_costs()))
        prices = ordered = sorted(slopes)
        if len(ordered) > _MOST_PRICES:
            places = np.linspace(0, len(ordered) - 1, _MOST_PRICES)
            prices = [ordered[int(i)] for i in places]
        return np.array([0.0, *(p * (1 + 1e-9) for p in prices), max(ordered, default=1.0) * 1e6])

    def _different_costs(self) -> list[UnitCosts]:
        """The costs of each kind of devices."""
        return list({id(costs): costs for costs in self.costs}.values())

    def _slopes(self, costs: UnitCosts) -> set[float]:
        """For each two solutions of a unit, the seconds that a byte costs that one saves."""
        nbytes, seconds, unit_class = (
            costs.nbytes(max(self.in_flight)),
            costs.seconds,
            costs.unit_class,
        )
        slopes = set()
        for unit in {int(np.argmax(unit_class == c)) for c in set(unit_class.tolist())}:
            for i in range(len(seconds)):
                saved = nbytes[i, unit] - nbytes[:, unit]
                cost = seconds[:, unit] - seconds[i, unit]
                slopes |= {
                    float(c / s) for c, s in zip(cost, saved, strict=True) if s > 0 and c > 0
                }
        return slopes

    def _prefix_sums(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """[price, unit]: seconds and bytes of all units before, each in its best solution at the
        price.
        """
        costs, in_flight = self.costs[stage], self.in_flight[stage]
        key = id(costs), in_flight
        if key not in self._sums:
            seconds, nbytes = costs.seconds, costs.nbytes(in_flight)
            units = np.arange(self.units)
            best = [(seconds + price * nbytes).argmin(axis=0) for price in self._prices]
            zero = np.zeros((len(self._prices), 1))
            seconds_sum, bytes_sum = (
                np.concatenate(
                    [zero, np.array([each[b, units] for b in best]).cumsum(axis=1)], axis=1
                )
                for each in (seconds, nbytes)
            )
            self._sums[key] = seconds_sum, bytes_sum
        return self._sums[key]

    def seconds(self, stage: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Seconds of one microbatch, for ranges of units [start, end) on a stage; infinite where no
        choice of solutions fits the stage's memory.

        The lowest price at which a range fits, and the price below it, bracket the best mixture of
        solutions. Its seconds are interpolated between them.
        """
        seconds_sum, bytes_sum = self._prefix_sums(stage)
        seconds = seconds_sum[:, ends] - seconds_sum[:, starts]
        nbytes = bytes_sum[:, ends] - bytes_sum[:, starts]
        room = self._room(stage, starts)
        fits = nbytes <= room
        first = fits.argmax(axis=0)  # the lowest price that fits
        ranges = np.arange(len(starts))
        seconds_there, bytes_there = seconds[first, ranges], nbytes[first, ranges]
        below = np.maximum(first - 1, 0)
        span = np.maximum(nbytes[below, ranges] - bytes_there, 1e-30)
        # The part of the units that may take their solution at the price below.
        part = np.where(first > 0, (room - bytes_there) / span, 0.0)
        gain = np.clip(part, 0, 1) * (seconds_there - seconds[below, ranges])
        return np.where(fits.any(axis=0), seconds_there - gain, np.inf)

    def _room(self, stage: int, start: np.ndarray | int) -> np.ndarray:
        """Bytes for the units of a stage that begins with unit ``start``."""
        in_flight = self.in_flight[stage]
        room: np.ndarray = (
            self.budgets[stage]
            - float((self.costs[stage].duplicated["kept"] * in_flight).min())
            - in_flight * self.received_bytes[start]
        )
        return room

    def best(self, microbatches: int) -> tuple[tuple[int, ...], float] | None:
        """The first unit of each stage, and the seconds of all microbatches; None where no cut
        fits.

        Each rank reads a parameter, if there is a cut in which each rank reads one in the same of
        its chunks.
        """
        count = len(self.budgets)
        if count > self.units:
            return None
        ranges = [self._stage_ranges(stage) for stage in range(count)]
        best = self._best(ranges, microbatches)
        if (
            best is None
            or rank_without_parameter(self.has_parameter, best[0], self.pipeline) is None
        ):
            return best
        for chunk in range(0, count, self.pipeline):
            training = [
                self._ranges_with_parameter(r) if chunk <= i < chunk + self.pipeline else r
                for i, r in enumerate(ranges)
            ]
            if (other := self._best(training, microbatches)) is not None:
                return other
        return best

    def _ranges_with_parameter(self, ranges: UnitRanges) -> UnitRanges:
        before = np.cumsum([0, *self.has_parameter])
        keep = before[ranges.ends] > before[ranges.starts]
        return UnitRanges(*(column[keep] for column in ranges))

    def _best(
        self, ranges: Sequence[UnitRanges], microbatches: int
    ) -> tuple[tuple[int, ...], float] | None:
        """The chain of ranges, one for each stage, that ends its microbatches first; and its
        seconds.
        """
        count = len(ranges)
        slowest = best_chain(ranges, self.units)
        if slowest is None:
            return None
        found: list[tuple[float, tuple[int, ...]]] = []
        for tried, slack in pairwise((0.0, *_SLACKS) if count > 1 else (0.0, 1.0)):
            if found and microbatches * slowest.value * tried >= min(found)[0]:
                break  # every cut that is left has a slower stage than the cuts tried
            chain = best_chain(ranges, self.units, slowest.value * slack * (1 + 1e-12))
            assert chain is not None
            messages = 2 * float(self._received_seconds(chain.starts).sum())
            seconds = self._pipeline_seconds(chain.seconds, microbatches)
            found.append((seconds + messages, chain.starts))
        seconds, starts = min(found)
        return starts, seconds

    def _received_seconds(self, starts: Sequence[int]) -> np.ndarray:
        """[stage]: seconds of receiving what each stage reads of the stages before."""
        each = np.broadcast_to(self.receive_seconds, (len(self.costs), self.units))
        return each[np.arange(len(starts)), list(starts)]

    def _pipeline_seconds(self, times: Sequence[float], microbatches: int) -> float:
        """Seconds of all microbatches, from the seconds of each stage for one."""
        chunks = len(times) // self.pipeline
        ranks = [sum(times[r :: self.pipeline]) for r in range(self.pipeline)]
        # Warm-up and drain: each rank but the slowest one runs one chunk once.
        fill = sum(times) / chunks - max(ranks) / chunks
        return microbatches * max(ranks) + fill

    def step_seconds(
        self, starts: Sequence[int], chosen: np.ndarray, microbatches: int, schedule: str
    ) -> float:
        """Seconds of a step where unit ``u`` takes solution ``chosen[u]``."""
        units, ranges = np.arange(self.units), self.ranges(starts)
        stages = list(zip(self.costs, ranges, strict=True))

        def stage_seconds(kind: str) -> list[float]:
            return [
                float(getattr(costs, kind)[chosen, units][a:b].sum()) for costs, (a, b) in stages
            ]

        stage_backward, stage_step = stage_seconds("backward"), stage_seconds("step")
        stage_forward = [
            seconds + float(costs.duplicated["forward"].min())
            for seconds, costs in zip(stage_seconds("forward"), self.costs, strict=True)
        ]
        end = max(sum(stage_step[r :: self.pipeline]) for r in range(self.pipeline))
        if len(ranges) == 1:
            return microbatches * (stage_forward[0] + stage_backward[0]) + end
        makespan = schedule_seconds(
            schedule,
            self.pipeline,
            len(ranges) // self.pipeline,
            microbatches,
            stage_forward,
            stage_backward,
            send=[*self._received_seconds(starts)[1:], 0.0],
        )
        return float(makespan) + end

    def fullest_stage(self) -> tuple[int, float, float]:
        """Of equal cuts, each unit in the solution that needs least memory: the stage that is most
        above its budget, its bytes that last, and its bytes of activations.
        """
        cuts = np.linspace(0, self.units, len(self.budgets) + 1).astype(int)
        stages = []
        for stage, (a, b) in enumerate(pairwise(cuts)):
            in_flight = self.in_flight[stage]
            costs, units = self.costs[stage], np.arange(b - a)
            best = costs.nbytes(in_flight)[:, a:b].argmin(axis=0)
            state = costs.state[:, a:b][best, units].sum()
            kept = costs.kept[:, a:b][best, units].sum() * in_flight
            kept += self.received_bytes[a] * in_flight
            stages.append((state + kept - self.budgets[stage], stage, float(state), float(kept)))
        _, stage, state, kept = max(stages)
        return stage, state, kept

    def ranges(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The units [start, end) of each stage, from the first unit of each stage."""
        return list(zip(starts, [*starts[1:], self.units], strict=True))

    def _stage_ranges(self, stage: int) -> UnitRanges:
        """The ranges of units that may be a stage."""
        count = len(self.budgets)
        each = self.units / count
        is_small = count <= 2 or self.units <= 24 or len(self._different_costs()) > 1
        longest = self.units if is_small else math.ceil(3 * each) + 4
        starts = np.arange(stage, self.units - (count - stage - 1))
        starts = starts[:1] if stage == 0 else starts
        lengths = np.arange(1, longest + 1)
        a, b = (x.ravel() for x in np.meshgrid(starts, lengths, indexing="ij"))
        b = a + b
        keep = (b <= self.units - (count - stage - 1)) & ((b == self.units) | (stage < count - 1))
        a, b = a[keep], b[keep]
        received = np.broadcast_to(self.receive_seconds, (count, self.units))[stage]
        return UnitRanges(a, b, self.seconds(stage, a, b), 2 * received[a])

    def solutions(self, starts: Sequence[int]) -> np.ndarray | None:
        """[unit]: the solution that it takes, so that each stage is fast within its memory; None
        where a stage does not fit.
        """
        chosen = np.zeros(self.units, dtype=int)
        for stage, (a, b) in enumerate(self.ranges(starts)):
            costs = self.costs[stage]
            of_stage = choose_solutions(
                costs.seconds[:, a:b],
                costs.nbytes(self.in_flight[stage])[:, a:b],
                costs.unit_class[a:b],
                float(self._room(stage, a)),
            )
            if of_stage is None:
                return None
            chosen[a:b] = of_stage
        return chosen
