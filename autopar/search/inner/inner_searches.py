"""The inner searches of one model and batch: one on the graph of the whole batch, one on the graph
of a microbatch of any size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from autopar.errors import PlanError
from autopar.ir.captured import BatchDivision
from autopar.search.inner.byte_floor import byte_floor
from autopar.search.inner.candidate import Candidate, best_candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import SearchCache
from autopar.search.inner.solver_work import SolverWork, operations_until
from autopar.search.inner.step_bounds import Level, StepBound, least_bytes, step_bound
from autopar.search.pricing.step_prices import StepPrices
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options
from autopar.search.space.placements import kind_orders, placements
from autopar.search.space.user_cuts import user_cut_nodes

Progress = Callable[[str], None]
# An estimate of memory may be this many times the counted memory.
ESTIMATE_MARGIN = 1.25

COMPARING = 0.85  # the part of the time limit in which configurations are compared
GRACE_SECONDS = 2.0  # beyond the time limit, for a first plan that fits
EXACT_OPERATIONS = 4e11  # of all exact searches together: about ten seconds


class InnerSearches:
    """Makes an :class:`InnerSearch` when the outer search asks for it.

    Args:
        search_cache_of: the cache of the graph of a batch in so many microbatches. Raises PlanError
            where the batch has no such graph.
        samples: of the whole batch.
        progress: is called with a few words about each step of the search.
        started: the moment of ``time.perf_counter`` at which planning started, from which the time
            limit counts; None: now.

    Attributes:
        unsolved: configurations for which the solver found no plan within its limit.
        exact_work: the work that is left for exact searches. Each may take about half of it.
    """

    def __init__(
        self,
        search_cache_of: Callable[[int], SearchCache],
        samples: int,
        options: Options,
        progress: Progress,
        started: float | None = None,
    ) -> None:
        self.search_cache_of, self.samples = search_cache_of, samples
        self.options, self.progress = options, progress
        self.timings: dict[str, float] = {}
        self.unsolved: list[Configuration] = []
        self.exact_work = SolverWork(EXACT_OPERATIONS)
        start = time.perf_counter() if started is None else started
        self._started, self._deadline = start, start + options.search_seconds
        self._searches: dict[bool, InnerSearch] = {}
        self._others: list[InnerSearches] = []  # with full recomputation
        self._failed: dict[int, PlanError] = {}

    def of(self, microbatches: int) -> InnerSearch:
        """The search for a batch in so many microbatches.

        One graph stands for microbatches of any size. The graph of the whole batch is another one:
        it counts the labels of the batch itself, where the graph of a microbatch takes the count
        as an input.
        """
        is_microbatch = microbatches > 1
        if is_microbatch not in self._searches:
            if microbatches in self._failed:
                raise self._failed[microbatches]
            try:
                self._searches[is_microbatch] = self._make(microbatches)
            except PlanError as e:
                self._failed[microbatches] = e
                raise
        return self._searches[is_microbatch]

    def _make(self, microbatches: int) -> InnerSearch:
        cache = self.search_cache_of(microbatches)
        self._check_exact(cache.analysis.captured.division)
        pipeline = self.options.pipeline
        cuts = user_cut_nodes(cache.analysis, pipeline.split_before) if pipeline else ()
        return InnerSearch(
            cache.analysis, cache.cluster, self.options, cuts, self.timings, cache, self._deadline
        )

    def _check_exact(self, division: BatchDivision | None) -> None:
        """Raises PlanError where microbatches would change the model's numbers, and the user did
        not ask for microbatches.
        """
        inexact = division is not None and division.inexact_operators
        if inexact and self.options.micro_batch_size is None:
            raise PlanError(
                f"micro_batch_size: {inexact[0]} takes its statistics of the whole batch, and "
                "would take them of each microbatch; give micro_batch_size if that is wanted"
            )

    def can_split(self, configuration: Configuration) -> bool:
        """Whether the model can be computed in a configuration's microbatches."""
        try:
            self.check_split(configuration)
        except PlanError:
            return False
        return True

    def check_split(self, configuration: Configuration) -> None:
        """Raises PlanError where microbatches would separate samples that the model takes
        together.
        """
        microbatches = configuration.microbatches
        division = self.of(microbatches).analysis.captured.division
        if division is None:
            return
        # Free axes may split samples. They count as if they did, unless every sample stands alone.
        every_sample_alone = division.max_chunks * division.parts == self.samples
        degree = math.prod(
            a.size
            for a in configuration.axes
            if a.use == "data" or (a.use == "free" and not every_sample_alone)
        )
        chunks = math.lcm(degree, division.parts) // division.parts
        if division.max_chunks % (microbatches * chunks):
            together = self.samples // (division.max_chunks * division.parts)
            parts = (
                f", in each of {division.parts} equal parts of the batch"
                if division.parts > 1
                else ""
            )
            raise PlanError(
                f"micro_batch_size: {division.limiting_operator or 'the model'} takes {together} "
                f"samples together{parts}, which {microbatches} microbatches of a batch of "
                f"{self.samples} over data={degree} tear apart: microbatches times data-parallel "
                f"ranks must divide {division.max_chunks}"
            )

    def with_full_recomputation(self) -> InnerSearches:
        """The searches for plans that recompute every block."""
        options = replace(self.options, recompute="full")
        other = InnerSearches(self.search_cache_of, self.samples, options, self.progress)
        self._others.append(other)
        other.timings, other.unsolved = self.timings, self.unsolved
        other.exact_work = self.exact_work
        other._started, other._deadline = self._started, self._deadline
        return other

    def forget(self) -> None:
        """:meth:`InnerSearch.forget` of all searches, after the last plan was written."""
        every: list[InnerSearch | InnerSearches] = [*self._searches.values(), *self._others]
        for each in every:
            each.forget()

    def microbatch_samples(self, configuration: Configuration) -> int:
        """The samples of one microbatch.

        Raises:
            PlanError: the batch does not divide by the microbatches and the data-parallel ranks.
        """
        samples, rest = divmod(self.samples, configuration.microbatches)
        degree = math.prod(a.size for a in configuration.axes if a.use == "data")
        if rest or samples % degree:
            asked = f"a batch of {self.samples}" + (
                f" in {configuration.microbatches} microbatches"
                if configuration.microbatches > 1
                else ""
            )
            raise PlanError(
                f"{asked} does not split over data={degree}: use a multiple of "
                f"{degree * configuration.microbatches}, or another data size"
            )
        return samples

    def of_configuration(self, configuration: Configuration) -> tuple[InnerSearch, int]:
        """The search for a configuration, and the samples of one microbatch."""
        search = self.of(configuration.microbatches)
        return search, self.microbatch_samples(configuration)

    def placements(self, configuration: Configuration) -> list[Configuration]:
        """The placements of an open configuration, without a place of the pipeline at which no link
        is faster than at another place. Each order of the axes stays: of two axes that split one
        dim the first is major, so that orders have different strategies.

        Raises:
            PlanError: the option ``placement`` leaves none.
        """
        cache = self.of(configuration.microbatches).cache
        if len(cache.cluster.kinds) > 1 and configuration.pipeline > 1:
            return kind_orders(configuration, cache.cluster, self.options)
        links_of = cache.links
        kept: list[Configuration] = []
        for placed in placements(configuration, self.options):
            own = links_of(placed)
            rivals = [c for c in kept if c.axes == placed.axes]
            if not any(links_of(c).are_no_slower(own) for c in rivals):
                slower = [c for c in rivals if own.are_no_slower(links_of(c))]
                kept = [*(c for c in kept if c not in slower), placed]
        return kept

    def has_compared_enough(self, part: float = 1.0) -> bool:
        """Whether this part of the time for comparing configurations has passed. The rest of the
        ``time_limit`` is for the plans that were found.
        """
        seconds = COMPARING * (self._deadline - self._started)
        return time.perf_counter() > self._started + part * seconds

    def is_out_of_time(self, has_plan: bool = True) -> bool:
        """Whether the ``time_limit`` has passed. Without a plan that fits, the search goes on for
        some seconds more.
        """
        return time.perf_counter() > self._deadline + GRACE_SECONDS * (not has_plan)

    def operations_left(self, limit: float) -> float:
        """The solver's operations up to ``limit`` for which time is left; 0 beyond the limit."""
        return operations_until(self._deadline, limit)

    def step_bound(self, configuration: Configuration, level: Level) -> StepBound:
        """:func:`step_bound` of a configuration."""
        search, samples = self.of_configuration(configuration)
        return step_bound(search, configuration, samples, level)

    def byte_floor(self, configuration: Configuration) -> float:
        """:func:`byte_floor` of a configuration; it needs no other graph than those made so far."""
        search = self._any(configuration)
        return byte_floor(search, configuration, self.samples)

    def budget(self, configuration: Configuration) -> float:
        """Bytes that a plan may use, of the device that may use most."""
        return self._any(configuration).budget(configuration)

    def _any(self, configuration: Configuration) -> InnerSearch:
        """A search that exists, for values that all have; otherwise that of a configuration."""
        return next(iter(self._searches.values()), None) or self.of(configuration.microbatches)

    def least_bytes(self, configuration: Configuration) -> float:
        """Bytes of the fullest device that no plan of a configuration goes below."""
        search, samples = self.of_configuration(configuration)
        return least_bytes(search, configuration, samples)

    def largest_tensor_bytes(self, configuration: Configuration) -> float:
        """Bytes of the largest result of a call in one microbatch, split over all ranks of a
        stage.
        """
        search, samples = self.of_configuration(configuration)
        largest = search.cache.floors.of("largest tensor", lambda: _largest_tensor_bytes(search))
        share = samples / search.analysis.batch.size
        return largest * share / math.prod(configuration.sizes)

    def may_fit(self, configuration: Configuration) -> bool:
        """Whether a plan of the configuration may fit the budget."""
        search = self.of(configuration.microbatches)
        return self.least_bytes(configuration) <= ESTIMATE_MARGIN * search.budget(configuration)

    def candidate(
        self,
        configuration: Configuration,
        reserve: Sequence[float] | None = None,
        same_layouts: bool = False,
        unlimited: bool = False,
        step_prices: StepPrices | None = None,
    ) -> Candidate:
        """:func:`best_candidate` of a configuration."""
        self.check_split(configuration)
        search, samples = self.of_configuration(configuration)
        return best_candidate(
            search,
            configuration,
            samples,
            reserve,
            self.user_starts(search),
            same_layouts,
            unlimited,
            step_prices,
        )

    def user_starts(self, search: InnerSearch) -> list[int] | None:
        """The first unit of each stage; None where the user did not cut the stages."""
        pipeline = self.options.pipeline
        if not pipeline or not pipeline.split_before:
            return None
        cuts = user_cut_nodes(search.analysis, pipeline.split_before)
        return [0, *(search.units.starts.index(n) for n in cuts)]


def _largest_tensor_bytes(search: InnerSearch) -> float:
    """Bytes of the largest result of a call, in the graph as it was captured."""
    calls = [n for n in search.nodes if n.op == "call_function"]
    tensors = [n.meta["val"] for n in calls if isinstance(n.meta["val"], torch.Tensor)]
    return max(float(t.numel() * t.element_size()) for t in tensors)
