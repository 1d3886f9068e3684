"""The outer search: which parallel configuration has the fastest plan that fits.

Configurations are compared by bounds first. A configuration whose bound is above the best candidate
cannot be better and is dropped. For the others the inner search makes a candidate: stage cuts, a
solution of each unit, an estimated step time. The fastest candidates are then counted in full,
until one fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import BudgetError, PlanError
from autopar.search.enumeration import Enumeration, Family
from autopar.search.ilp.linear_program import UnsolvedError
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import no_plan_error
from autopar.search.inner.step_bounds import compute_floor, solved_bound, unsolved_bound
from autopar.search.result.fit import fit_to_memory, with_proven_gap
from autopar.search.result.least_memory import first_that_fits
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

SIMPLER = 0.99  # a more complex configuration must take at most this part of the seconds
FITTED = 3  # candidates, the fastest first, that are counted until one fits
# An estimate of the step time may be too high by this factor. A configuration that is slower even
# then is not worth a candidate.
ESTIMATE_ERROR = 1.05
# A configuration is hopeless if its bound is above this many times the best estimate.
HOPELESS = 2
NEAREST = 2  # configurations around which others are tried
MOST_LEAST = 12  # configurations whose least memory is worked out, where nothing fits


class BoundedFamily(NamedTuple):
    """A family with the estimated seconds of a step, and a lower bound of the seconds."""

    estimate: float
    bound: float
    family: Family


def best_plan(searches: InnerSearches) -> PricedPlan:
    """The best plan of all configurations.

    If no plan fits that recomputes what the search chooses, the search runs again with every block
    recomputed. A recomputed block is freed before the next one is recomputed. Where single results
    are recomputed, no such bound exists for the memory that they hold together.

    Raises:
        BudgetError: no plan fits; with the least memory that was found.
        PlanError: no configuration has a plan; of the configuration that comes nearest.
    """
    try:
        return OuterSearch(searches).run()
    except BudgetError as e:
        if searches.options.recompute != "auto":
            raise
        try:
            priced = OuterSearch(searches.with_full_recomputation()).run()
        except BudgetError as other:
            raise min(e, other, key=lambda e: e.least) from None
        return with_proven_gap(searches, priced)


class OuterSearch:
    """Finds the best plan over all configurations that the options leave."""

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.enumeration = Enumeration(searches)
        self._candidates: list[Candidate] = []
        # Configurations that are over the budget, with about the least memory that they need.
        self._over_budget: list[tuple[float, Configuration]] = []

    def run(self) -> PricedPlan:
        """The best plan; PlanError as for :func:`best_plan`."""
        best = self._search(self.enumeration.families(), None)
        best = self._try_interleaved(best)
        if self._modes_are_free:
            best = self._try_tensor_modes(best)
        if best is None:
            return self._least_memory_plan(MOST_LEAST)
        others = sorted((c for c in self._candidates if c is not best), key=lambda c: c.seconds)
        for candidate in (best, *others[: FITTED - 1]):
            try:
                return fit_to_memory(self.searches, candidate)
            except UnsolvedError:
                self.searches.unsolved.append(candidate.configuration)
            except BudgetError:
                pass  # the candidate needs more memory than its estimate said
        return self._save_memory(best)

    def _try_interleaved(self, best: Candidate | None) -> Candidate | None:
        """Several chunks a rank hold more memory and shorten the bubble. They are tried for the
        fastest pipelines.
        """
        pipelines = [c for c in self._candidates if c.configuration.pipeline > 1]
        for candidate in sorted(pipelines, key=lambda c: c.seconds)[:NEAREST]:
            interleaved = list(self.enumeration.interleaved(candidate.configuration))
            best = self._better(best, self._make_candidates(self.enumeration.possible(interleaved)))
        return best

    @property
    def _modes_are_free(self) -> bool:
        return self.options.parallel is None and self.options.mesh is None

    def _try_tensor_modes(self, best: Candidate | None) -> Candidate | None:
        """Modes such as ``2d`` are tried around the best configuration, or where nothing fits
        around the configurations that need least memory.
        """
        if best is not None:
            near = [best.configuration]
        else:
            near = [c for _, c in sorted(self._over_budget, key=lambda o: o[0])[:NEAREST]]
        families = (f for c in near for f in self.enumeration.in_tensor_modes(c))
        return self._search(dict.fromkeys(families), best)

    # Bounds first, and candidates of the families that may be better

    def _search(
        self, families: Iterable[Sequence[Configuration]], best: Candidate | None
    ) -> Candidate | None:
        """The best candidate of ``families`` and ``best``."""
        waiting = sorted(self._with_floors(families), key=lambda w: w[0])
        while waiting:
            bounded, waiting = self._bound_families(waiting, best)
            if not bounded:
                break
            for estimate, bound, family in sorted(bounded, key=lambda b: b[:2]):
                least = max(bound, estimate / ESTIMATE_ERROR)
                if best is None or least < self._to_beat(family[0], best):
                    best = self._better(best, self._make_candidates(family))
        return best

    def _with_floors(
        self, families: Iterable[Sequence[Configuration]]
    ) -> Iterator[tuple[float, Family]]:
        """The possible configurations of each family, with the floor of their step time."""
        for family in families:
            if possible := self.enumeration.possible(family):
                search, samples = self.searches.of_configuration(possible[0])
                yield compute_floor(search, possible[0], samples), possible

    def _bound_families(
        self, waiting: list[tuple[float, Family]], best: Candidate | None
    ) -> tuple[list[BoundedFamily], list[tuple[float, Family]]]:
        """Bounds the families in the order of their floors, as long as the floor is below the best
        seconds. Returns the families that may be better than ``best``, and the families that wait
        until there is a candidate.
        """
        bounded: list[BoundedFamily] = []
        # For the samples of a replica: ranks over which it is hopeless to split other factors.
        hopeless: dict[int, float] = {}
        limit = math.inf if best is None else best.seconds
        for i, (floor, family) in enumerate(waiting):
            if floor >= limit:
                return bounded, waiting[i:] if best is None else []
            split, samples = self._split(family[0])
            if split >= hopeless.get(samples, math.inf):
                continue
            if (bounds := self._bounds(family, best)) is None:
                continue
            bound, estimate = bounds
            if estimate is not None:
                bounded.append(BoundedFamily(estimate, bound, family))
                limit = min(limit, estimate) if best is None else limit
            # More ranks that split the same samples' tensors send more, and compute in smaller
            # pieces. This does not hold for modes.
            if bound > HOPELESS * limit and family[0].mode is None:
                hopeless[samples] = min(split, hopeless.get(samples, math.inf))
        return bounded, []

    def _bounds(self, family: Family, best: Candidate | None) -> tuple[float, float | None] | None:
        """A lower bound of a family's step time and an estimate. The estimate is None where the
        bound shows that the family is not better than ``best``. None instead of both where the
        family has no plan.
        """
        first = family[0]
        self.searches.progress(str(first))
        search, samples = self.searches.of_configuration(first)
        is_unrequested = self.options.is_unrequested_mode(first.mode)
        try:
            if is_unrequested and best is None and not self.searches.may_fit(family[-1]):
                return None
            bound = unsolved_bound(search, first, samples)
            if best is None or bound < self._to_beat(first, best):
                return solved_bound(search, first, samples)
            return bound, None
        except PlanError as e:
            if not is_unrequested and not isinstance(e, UnsolvedError):
                raise
            self._remember_failure(first, e)
            return None

    def _split(self, configuration: Configuration) -> tuple[int, int]:
        """Over how many ranks a configuration splits other factors than the batch, and the samples
        that these ranks compute together.
        """
        axes, samples = configuration.axes, self.searches.microbatch_samples(configuration)
        replicas = math.prod(a.size for a in axes if a.use == "data")
        return math.prod(a.size for a in axes if a.use == "tensor"), samples // replicas

    def _make_candidates(self, family: Sequence[Configuration]) -> Iterator[Candidate]:
        """The candidates of a family, one after the other, until one needs no memory saved."""
        for configuration in family:
            try:
                candidate = self.searches.candidate(configuration)
            except BudgetError as e:
                self._over_budget.append((e.least, configuration))
                continue
            except PlanError as e:
                self._remember_failure(configuration, e)
                continue
            self._candidates.append(candidate)
            yield candidate
            if len(candidate.solutions) == 1:
                return

    def _better(self, best: Candidate | None, candidates: Iterable[Candidate]) -> Candidate | None:
        for candidate in candidates:
            if best is None or candidate.seconds < self._to_beat(candidate.configuration, best):
                best = candidate
        return best

    def _to_beat(self, configuration: Configuration, best: Candidate) -> float:
        """The seconds below which a configuration counts as better than ``best``. A simpler
        configuration need only be about as fast.
        """
        pairs = zip(_complexity(configuration), _complexity(best.configuration), strict=True)
        differences = [a - b for a, b in pairs]
        if max(differences) > 0:
            return best.seconds * SIMPLER
        return best.seconds * (1 / SIMPLER if min(differences) < 0 else 1.0)

    def _remember_failure(self, configuration: Configuration, error: PlanError) -> None:
        """Keeps the reason why a configuration has no plan. A mode that the user did not ask for
        has a short time limit, so that an unsolved one says nothing.
        """
        if not isinstance(error, UnsolvedError):
            self.enumeration.failures.append(error)
        elif not self.options.is_unrequested_mode(configuration.mode):
            self.searches.unsolved.append(configuration)

    # Least memory, where no candidate fits

    def _save_memory(self, best: Candidate) -> PricedPlan:
        """The first plan that fits among plans of least memory: of the best configuration in any
        number of microbatches, of all candidates, of modes, of all other configurations.
        """
        enumeration, near = self.enumeration, best.configuration
        counts = enumeration.microbatch_counts(near)
        first = enumeration.possible([replace(near, microbatches=m) for m in counts])
        tried = dict.fromkeys((*first, *(c.configuration for c in self._candidates)))
        rest = [
            configuration
            for family in enumeration.families()
            for configuration in enumeration.possible(family)
            if configuration not in tried
        ]
        most = max(configuration.microbatches for configuration in tried)
        modes = self._least_memory_modes(replace(near, microbatches=most))
        for order, configurations in ((0.0, tried), (0.5, modes), (1.0, rest)):
            self._over_budget += [(order, configuration) for configuration in configurations]
        return self._least_memory_plan(MOST_LEAST + len(modes))

    def _least_memory_plan(self, most: int) -> PricedPlan:
        """The first plan that fits, among the least-memory plans of up to ``most`` configurations
        that are over the budget.
        """
        nearest = sorted(self._over_budget, key=lambda o: o[0])[:most]
        if (plan := first_that_fits(self.searches, nearest)) is not None:
            return plan
        failures, unsolved = self.enumeration.failures, self.searches.unsolved
        raise no_plan_error(failures, unsolved, self.options, self.searches.samples)

    def _least_memory_modes(self, near: Configuration) -> list[Configuration]:
        """The configurations of modes that may fit, of the families with the least bound of their
        memory.
        """
        if not self._modes_are_free or near.stages > 1:
            return []
        found: list[tuple[float, Family]] = []
        for family in self.enumeration.in_tensor_modes(near):
            if possible := self.enumeration.possible(family):
                with suppress(PlanError):
                    found.append((self.searches.least_bytes(possible[-1]), possible))
        nearest = [family for _, family in sorted(found, key=lambda f: f[0])[:NEAREST]]
        return [c for family in nearest for c in family if self.searches.may_fit(c)]


def _complexity(configuration: Configuration) -> tuple[int, ...]:
    """Configurations that are simpler have smaller numbers."""
    axes, pipeline = len(configuration.axes), configuration.pipeline
    return axes, pipeline, configuration.chunks, configuration.mode is not None
