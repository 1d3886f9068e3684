"""The parallel configurations that the options leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost_model.schedule import LOOPED, SINGLE
from autopar.errors import PlanError, without_frames
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import too_many_stages_error
from autopar.search.open_families import Family
from autopar.search.space.check_schedule import check_backend, check_schedule
from autopar.search.space.configuration import Configuration
from autopar.search.space.placements import check_kinds


class Enumeration:
    """Lists the configurations that the options leave.

    Attributes:
        failures: why configurations are not possible.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.failures: list[PlanError] = []

    def add_failure(self, failure: PlanError) -> None:
        """Adds the reason why a configuration is not possible."""
        self.failures.append(without_frames(failure))

    def families(self) -> Iterator[Family]:
        """Every mesh of every pipeline size in every schedule, with every number of microbatches.

        Their placements are open. Without a pipeline, one family has all numbers of microbatches in
        rising order. More microbatches of smaller kernels only save memory. So the outer search
        takes the next number only where the one before it has to save memory. In a pipeline each
        number is a family.
        """
        asked, world = self.options.pipeline, self.options.world_size
        sizes = [p for p in range(1, world + 1) if world % p == 0]
        for pipeline in [asked.size] if asked else sizes:
            for axes in self.options.meshes(pipeline):
                schedule = self.options.schedule or "1f1b"
                one = Configuration(pipeline, axes, 1, schedule=schedule, place=None)
                if pipeline > 1:
                    for m in self.microbatch_counts(one):
                        yield from ((c,) for c in self._in_schedules(replace(one, microbatches=m)))
                    continue
                chunks = (asked.chunks if asked else None) or 1
                counts = self.microbatch_counts(one)
                if family := tuple(replace(one, microbatches=m, chunks=chunks) for m in counts):
                    yield family

    def _in_schedules(self, near: Configuration) -> Iterator[Configuration]:
        """A pipeline's configuration in every schedule with every number of chunks."""
        asked = self.options.pipeline.chunks if self.options.pipeline else None
        given = self.options.schedule
        chunks = [asked] if asked else range(1, self._most_chunks(near) + 1)
        for schedule in [given] if given else (*SINGLE, *LOOPED):
            least = 2 if schedule == "interleaved-1f1b" else 1
            possible = [c for c in chunks if c == 1 or schedule not in SINGLE]
            # Where nothing is left, what was asked for leads to an error that says why.
            for count in [c for c in possible if c >= least] or ([least] if given else []):
                yield replace(near, schedule=schedule, chunks=asked or count)

    def _most_chunks(self, near: Configuration) -> int:
        """The stages that each pipeline rank can have at most."""
        try:
            units = len(self.searches.of(near.microbatches).units.nodes)
        except PlanError as e:
            self.add_failure(e)
            return 0
        return max(units // near.pipeline, 1)

    def microbatch_counts(self, configuration: Configuration) -> list[int]:
        """The numbers of microbatches that divide the batch, in rising order."""
        samples, size = self.searches.samples, self.options.micro_batch_size
        ranks = math.prod(configuration.sizes)
        degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
        if all(a.use != "free" for a in configuration.axes):
            degrees = [math.prod(a.size for a in configuration.axes if a.use == "data")]
        if size is not None:
            return sorted({samples // (d * size) for d in degrees if samples % (d * size) == 0})
        counts = range(1, samples // min(degrees) + 1)
        return [m for m in counts if samples % (m * min(degrees)) == 0] or [1]

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
                self.add_failure(e)
        return tuple(found)

    def _check(self, configuration: Configuration) -> None:
        pipeline, microbatches = configuration.pipeline, configuration.microbatches
        check_schedule(*configuration.schedule_numbers)
        check_backend(self.options.backend, *configuration.schedule_numbers)
        self.searches.microbatch_samples(configuration)
        if pipeline > 1:
            check_kinds(configuration, self.searches.of(microbatches).cluster)
        # Without a pipeline the search may never need the graph of a microbatch.
        if self.options.micro_batch_size is not None or configuration.stages > 1:
            self.searches.check_split(configuration)
        if configuration.stages > 1:
            units = len(self.searches.of(microbatches).units.nodes)
            if configuration.stages > units:
                raise too_many_stages_error(configuration, units)
