"""The searches of one model and batch: that on the graph of the whole batch, and that on a
microbatch's of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.captured import BatchDivision
from autopar.search.inner.candidate import Candidate, best_candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import SearchCache
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options
from autopar.search.space.user_cuts import user_cut_nodes

Progress = Callable[[str], None]


class InnerSearches:
    """Makes a :class:`InnerSearch` when one is asked for.

    Args:
        known_of: what is known of the graph of a batch in so many microbatches, of any size; a
            PlanError where there is none.
        samples: of the whole batch.

    Attributes:
        unsolved: shapes that have no plan only because the solver found none in ``time_limit``.
    """

    def __init__(
        self,
        search_cache_of: Callable[[int], SearchCache],
        samples: int,
        options: Options,
        progress: Progress,
    ) -> None:
        self.search_cache_of, self.samples, self.options, self.progress = (
            search_cache_of,
            samples,
            options,
            progress,
        )
        self.timings: dict[str, float] = {}
        self.unsolved: list[Configuration] = []
        self._searches: dict[bool, InnerSearch] = {}
        self._failed: dict[int, PlanError] = {}

    def of(self, microbatches: int) -> InnerSearch:
        """The search on the graph of a microbatch, of any size; that of a whole batch is another
        one, without counts.
        """
        parts = microbatches > 1
        if parts not in self._searches:
            if microbatches in self._failed:
                raise self._failed[microbatches]
            try:
                known = self.search_cache_of(microbatches)
                self._check_exact(known.analysis.captured.division)
                cuts = (
                    user_cut_nodes(known.analysis, self.options.pipeline.split_before)
                    if self.options.pipeline
                    else ()
                )
                self._searches[parts] = InnerSearch(
                    known.analysis, known.cluster, self.options, cuts, self.timings, known
                )
            except PlanError as e:
                self._failed[microbatches] = e
                raise
        return self._searches[parts]

    def _check_exact(self, division: BatchDivision | None) -> None:
        """PlanError where microbatches that nobody asked for would compute something else."""
        if (
            division is not None
            and division.inexact_operators
            and self.options.micro_batch_size is None
        ):
            raise PlanError(
                f"micro_batch_size: {division.inexact_operators[0]} takes its statistics of the whole "
                "batch, and would take them of each "
                "microbatch; give micro_batch_size if that is wanted"
            )

    def divides(self, shape: Configuration) -> bool:
        """Whether the model can be computed in a shape's microbatches."""
        try:
            self.check_room(shape)
        except PlanError:
            return False
        return True

    def check_room(self, shape: Configuration) -> None:
        """PlanError where microbatches would tear apart samples that the model takes together."""
        division = self.of(shape.microbatches).analysis.captured.division
        if division is None:
            return
        apart = (
            division.max_chunks * division.parts == self.samples
        )  # else axes that may split samples count as if they did
        degree = math.prod(
            a.size for a in shape.axes if a.use == "data" or (a.use == "free" and not apart)
        )
        chunks = math.lcm(degree, division.parts) // division.parts
        if division.max_chunks % (shape.microbatches * chunks):
            together = self.samples // (division.max_chunks * division.parts)
            raise PlanError(
                f"micro_batch_size: {division.limiting_operator or 'the model'} takes {together} samples "
                "together"
                + (
                    f", in each of {division.parts} equal parts of the batch"
                    if division.parts > 1
                    else ""
                )
                + f", which {shape.microbatches} microbatches of a batch of {self.samples} over "
                f"data={degree} tear apart: "
                f"microbatches times data-parallel ranks must divide {division.max_chunks}"
            )

    def in_blocks(self) -> InnerSearches:
        """Those of plans that recompute every block."""
        other = InnerSearches(
            self.search_cache_of,
            self.samples,
            replace(self.options, recompute="full"),
            self.progress,
        )
        other.timings, other.unsolved = self.timings, self.unsolved
        return other

    def part(self, shape: Configuration) -> int:
        """The samples of a microbatch.

        Raises:
            PlanError: the batch does not split like that.
        """
        samples, rest = divmod(self.samples, shape.microbatches)
        degree = math.prod(a.size for a in shape.axes if a.use == "data")
        if rest or samples % degree:
            asked = f"a batch of {self.samples}" + (
                f" in {shape.microbatches} microbatches" if shape.microbatches > 1 else ""
            )
            raise PlanError(
                f"{asked} does not split over data={degree}: use a multiple of "
                f"{degree * shape.microbatches}, or another data size"
            )
        return samples

    def drafted(
        self,
        shape: Configuration,
        reserve: Sequence[float] | None = None,
        alike: bool = False,
        unlimited: bool = False,
    ) -> Candidate:
        """:func:`best_candidate` of a shape."""
        self.check_room(shape)
        search = self.of(shape.microbatches)
        return best_candidate(
            search, shape, self.part(shape), reserve, self.by_hand(search), alike, unlimited
        )

    def by_hand(self, search: InnerSearch) -> list[int] | None:
        """The first unit of each stage, where the user cut."""
        if not self.options.pipeline or not self.options.pipeline.split_before:
            return None
        cuts = user_cut_nodes(search.analysis, self.options.pipeline.split_before)
        return [0, *(search.units.starts.index(n) for n in cuts)]
