"""The parallel configurations that the outer search compares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import too_many_stages_error
from autopar.search.space.check_schedule import check_schedule
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import mode_mesh
from autopar.search.space.modes.mode import Mode
from autopar.search.space.modes.registry import mode_names, modes_without_keywords

MOST_STAGES = 64  # ranks of a pipeline, where the user leaves its size free
REPLICA_SAMPLES = (1, 2, 4)  # of a microbatch in a pipeline
INTERLEAVED = "interleaved-1f1b"
CHUNKS = (2, 4)  # of a rank, where the user leaves them free
# Ranks along an axis of a mode that the user did not ask for. Its kernels run step by step along
# the axis, and to price them takes as many steps.
LONGEST_MODE_AXIS = 16

Family = tuple[Configuration, ...]  # that differ in the number of microbatches alone


class Enumeration:
    """Lists the configurations that the options leave.

    Attributes:
        failures: why configurations are not possible.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.failures: list[PlanError] = []

    def families(self) -> Iterator[Family]:
        """Every mesh of every pipeline size, in one schedule.

        Without a pipeline, more microbatches only save memory. So one family has all numbers of
        microbatches, the fewest first, and these stand for the rest. In a pipeline each number is
        a family.
        """
        asked, world = self.options.pipeline, self.options.world_size
        sizes = range(1, min(world, MOST_STAGES) + 1)
        for pipeline in [asked.size] if asked else [p for p in sizes if world % p == 0]:
            chunks = asked.chunks if asked else None
            chunks = chunks or (2 if self.options.schedule == INTERLEAVED and pipeline > 1 else 1)
            schedule = self.options.schedule or (INTERLEAVED if chunks > 1 else "1f1b")
            for axes in self.options.meshes(pipeline):
                one = Configuration(pipeline, axes, 1, chunks, schedule)
                family = [replace(one, microbatches=m) for m in self.microbatch_counts(one)]
                if one.stages > 1:
                    if self._may_run_whole and not any(map(self.searches.can_split, family)):
                        # The batch goes through the stages in one piece.
                        family.append(replace(one, schedule="gpipe"))
                    yield from ((configuration,) for configuration in family)
                elif family:
                    yield tuple(family)

    @property
    def _may_run_whole(self) -> bool:
        return self.options.micro_batch_size is None and self.options.schedule is None

    def interleaved(self, near: Configuration) -> Iterator[Configuration]:
        """The configuration with several chunks a rank, where the options leave them free."""
        asked = self.options.pipeline.chunks if self.options.pipeline else None
        if near.pipeline > 1 and asked is None and self.options.schedule is None:
            yield from (replace(near, chunks=chunks, schedule=INTERLEAVED) for chunks in CHUNKS)

    def in_tensor_modes(self, near: Configuration) -> Iterator[Family]:
        """Meshes of modes such as ``2d``, in no more microbatches than ``near``.

        Their axes have about as many ranks together as the axes of ``near`` that may split other
        factors than the batch: half as many to twice as many.
        """
        ranks = math.prod(near.sizes)
        split = math.prod(a.size for a in near.axes if a.use != "data")
        is_free = any(a.use == "free" for a in near.axes)
        for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
            if is_free or split <= 2 * size <= 4 * split:
                for name in mode_names():
                    for mode in modes_without_keywords(name, size):
                        if not mode.plain:
                            yield from self._in_mode(near, mode, size)

    def _in_mode(self, near: Configuration, mode: Mode, size: int) -> Iterator[Family]:
        """``near`` with ``size`` ranks in a mode; the other ranks of a stage split samples."""
        ranks, pipeline = math.prod(near.sizes), near.pipeline
        data = ranks // size
        groups = mode.groups(0, ranks * pipeline, data, pipeline, size)
        if max(map(len, groups.values())) > LONGEST_MODE_AXIS:
            return
        try:
            configuration = replace(near, axes=mode_mesh(mode, data, pipeline))
        except PlanError as e:
            self.failures.append(e)
            return
        counts = self.microbatch_counts(configuration) if configuration.stages == 1 else []
        fewer = [m for m in counts if m < near.microbatches]
        yield tuple(replace(configuration, microbatches=m) for m in (*fewer, near.microbatches))

    def microbatch_counts(self, configuration: Configuration) -> list[int]:
        """The numbers of microbatches that are tried, in rising order."""
        samples, size = self.searches.samples, self.options.micro_batch_size
        ranks = math.prod(configuration.sizes)
        degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
        if all(a.use != "free" for a in configuration.axes):
            degrees = [math.prod(a.size for a in configuration.axes if a.use == "data")]
        if size is not None:
            return sorted({samples // (d * size) for d in degrees if samples % (d * size) == 0})
        # A microbatch of a single sample over all ranks has a price, but cannot run yet.
        divisors = [
            m
            for m in (2**i for i in range(samples.bit_length()))
            if samples % m == 0 and (m < samples or m == 1)
        ]
        if configuration.stages == 1:
            return divisors
        replica = degrees[0]
        counts = [samples // (replica * b) for b in REPLICA_SAMPLES if samples % (replica * b) == 0]
        return [m for m in counts if min(2, samples) <= m < max(2, samples)] or divisors[-1:]

    def possible(self, configurations: Sequence[Configuration]) -> Family:
        """The configurations that the schedule, the batch and the graph allow. The reasons of the
        others go to ``failures``.
        """
        found = []
        for configuration in configurations:
            try:
                self._check(configuration)
                found.append(configuration)
            except PlanError as e:
                self.failures.append(e)
        return tuple(found)

    def _check(self, configuration: Configuration) -> None:
        pipeline, microbatches = configuration.pipeline, configuration.microbatches
        check_schedule(configuration.schedule, pipeline, configuration.chunks, microbatches)
        self.searches.microbatch_samples(configuration)
        # Without a pipeline the search may never need the graph of a microbatch.
        if self.options.micro_batch_size is not None or configuration.stages > 1:
            self.searches.check_split(configuration)
        if configuration.stages > 1:
            units = len(self.searches.of(microbatches).units.nodes)
            if configuration.stages > units:
                raise too_many_stages_error(configuration, units)
