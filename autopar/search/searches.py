"""The searches of one model and batch: that on the graph of the whole batch, and that on a microbatch's of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.draft import Draft, outline
from autopar.search.handmade import cut_before
from autopar.search.known import Known
from autopar.search.options import Options
from autopar.search.search import Search
from autopar.search.shape import Shape

Progress = Callable[[str], None]


class Searches:
    """Makes a :class:`Search` when one is asked for.

    Args:
        known_of: what is known of the graph of a batch in so many microbatches, of any size; a PlanError where there is none.
        samples: of the whole batch.
    """

    def __init__(self, known_of: Callable[[int], Known], samples: int, options: Options, progress: Progress) -> None:
        self.known_of, self.samples, self.options, self.progress = known_of, samples, options, progress
        self.timings: dict[str, float] = {}
        self._searches: dict[bool, Search | PlanError] = {}

    def of(self, microbatches: int) -> Search:
        """The search on the graph of a microbatch, of any size; that of a whole batch is another one, without counts."""
        parts = microbatches > 1
        if parts not in self._searches:
            try:
                known = self.known_of(microbatches)
                cuts = cut_before(known.analysis, self.options.pipeline.split_before) if self.options.pipeline else ()
                self._searches[parts] = Search(known.analysis, known.cluster, self.options, cuts, self.timings, known)
            except PlanError as e:
                self._searches[parts] = e
        found = self._searches[parts]
        if isinstance(found, PlanError):
            raise found
        return found

    def in_blocks(self) -> Searches:
        """Those of plans that recompute every block."""
        other = Searches(self.known_of, self.samples, replace(self.options, recompute="full"), self.progress)
        other.timings = self.timings
        return other

    def part(self, shape: Shape) -> int:
        """The samples of a microbatch.

        Raises:
            PlanError: the batch does not split like that.
        """
        samples, rest = divmod(self.samples, shape.microbatches)
        degree = math.prod(a.size for a in shape.axes if a.use == "data")
        if rest or samples % degree:
            asked = f"a batch of {self.samples}" + (f" in {shape.microbatches} microbatches" if shape.microbatches > 1 else "")
            raise PlanError(
                f"{asked} does not split over data={degree}: use a multiple of {degree * shape.microbatches}, or another data size"
            )
        return samples

    def drafted(self, shape: Shape, reserve: Sequence[float] | None = None, alike: bool = False, unlimited: bool = False) -> Draft:
        """:func:`outline` of a shape."""
        search = self.of(shape.microbatches)
        return outline(search, shape, self.part(shape), reserve, self.by_hand(search), alike, unlimited)

    def by_hand(self, search: Search) -> list[int] | None:
        """The first unit of each stage, where the user cut."""
        if not self.options.pipeline or not self.options.pipeline.split_before:
            return None
        cuts = cut_before(search.analysis, self.options.pipeline.split_before)
        return [0, *(search.units.starts.index(n) for n in cuts)]
