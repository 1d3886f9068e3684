"""The outer search: pipelines, meshes, microbatches, schedules and modes are enumerated, with
bounds that prune.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.errors import BudgetError, PlanError
from autopar.search.ilp.linear_program import UnsolvedError
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import failure, too_little, too_many_stages
from autopar.search.pricing.resize import resized
from autopar.search.result.fit import TOO_HIGH, fitted, proven
from autopar.search.result.least_memory import fullest, least_memory_plan
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.check_schedule import check_schedule
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import mode_mesh
from autopar.search.space.modes.registry import mode_names, modes_without_keywords

SIMPLER = 0.99  # a mesh of more axes must be faster by this much
MOST_STAGES = 64
PER_REPLICA = (1, 2, 4)  # samples of a microbatch that are tried in a pipeline
FITTED = 3  # drafts, the fastest first, of which one may fit in full
# an estimate of a step may be too high by so much: shapes that are slower even then are not worth a
# draft
HOPEFUL = 1.05
LOOPED = "interleaved-1f1b"
CHUNKS = (2, 4)  # stages a rank that are tried
NEAREST = 2  # shapes around which others are tried
# ranks along an axis of a mode that nobody asked for: its kernels go step by step, and so does
# pricing them
LONGEST = 16
MOST_LEAN = 12  # shapes whose least memory is worked out where nothing fits


_Priced = tuple[
    float, float, tuple[Configuration, ...]
]  # an estimate of a step, the least that it takes, and shapes to try in this order


def best(searches: InnerSearches) -> PricedPlan:
    """The best plan there is. Where none fits that recomputes what it may choose, one that
    recomputes all blocks, each of which is let go of before the next is made again: where what is
    made again is chosen piece by piece, nothing bounds how much of it is held at once.

    Raises:
        PlanError: no shape has a plan: of the one that comes nearest.
    """
    try:
        return OuterSearch(searches).run()
    except BudgetError as e:
        if searches.options.recompute != "auto":
            raise
        try:
            found = OuterSearch(searches.in_blocks()).run()
        except BudgetError as other:
            raise min(e, other, key=lambda e: e.least) from None
        return proven(searches, found)


class OuterSearch:
    """Finds the best plan over all shapes that the options leave."""

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.failures: list[PlanError] = []
        self._drafted: list[Candidate] = []
        self._short: list[
            tuple[float, Configuration]
        ] = []  # of memory: about the least that they need

    # What is enumerated

    def families(self) -> Iterator[tuple[Configuration, ...]]:
        """Every mesh with every number of microbatches, in one schedule. Of a device alone more
        microbatches only save memory: the fewest come first, and stand for the rest."""
        asked = self.options.pipeline
        world = self.options.world_size
        sizes = (
            [asked.size]
            if asked
            else [p for p in range(1, min(world, MOST_STAGES) + 1) if world % p == 0]
        )
        for pipeline in sizes:
            for axes in self.options.meshes(pipeline):
                chunks = (asked.chunks if asked else None) or (
                    2 if self.options.schedule == LOOPED and pipeline > 1 else 1
                )
                schedule = self.options.schedule or (LOOPED if chunks > 1 else "1f1b")
                shape = Configuration(pipeline, axes, 1, chunks, schedule)
                shapes = [replace(shape, microbatches=m) for m in self._microbatches(shape)]
                if (
                    shape.stages > 1
                    and self._may_run_whole
                    and not any(map(self.searches.divides, shapes))
                ):
                    shapes.append(
                        replace(shape, schedule="gpipe")
                    )  # the batch goes through the stages in one piece
                yield from (
                    [tuple(shapes)] if shape.stages == 1 and shapes else [(s,) for s in shapes]
                )

    def _looped(self, shape: Configuration) -> Iterator[Configuration]:
        """The same with several stages a rank, where that is free."""
        asked = self.options.pipeline.chunks if self.options.pipeline else None
        if shape.pipeline > 1 and asked is None and self.options.schedule is None:
            yield from (replace(shape, chunks=chunks, schedule=LOOPED) for chunks in CHUNKS)

    def _in_modes(self, near: Configuration) -> Iterator[tuple[Configuration, ...]]:
        """Meshes of modes over about as many ranks as cut what is no batch, in no more
        microbatches.
        """
        ranks, cut = math.prod(near.sizes), math.prod(a.size for a in near.axes if a.use != "data")
        free = any(a.use == "free" for a in near.axes)
        for size in (
            n for n in range(2, ranks + 1) if ranks % n == 0 and (free or cut <= 2 * n <= 4 * cut)
        ):
            for mode in (
                m
                for name in mode_names()
                for m in modes_without_keywords(name, size)
                if not m.plain
            ):
                if (
                    max(
                        map(
                            len,
                            mode.groups(
                                0, ranks * near.pipeline, ranks // size, near.pipeline, size
                            ).values(),
                        )
                    )
                    > LONGEST
                ):
                    continue
                try:
                    shape = replace(near, axes=mode_mesh(mode, ranks // size, near.pipeline))
                except PlanError as e:
                    self.failures.append(e)
                    continue
                fewer = (
                    [m for m in self._microbatches(shape) if m < near.microbatches]
                    if shape.stages == 1
                    else []
                )
                yield tuple(replace(shape, microbatches=m) for m in (*fewer, near.microbatches))

    def _microbatches(self, shape: Configuration) -> list[int]:
        """How many microbatches are tried."""
        world, size = math.prod(shape.sizes), self.options.micro_batch_size
        fixed = [a.size for a in shape.axes if a.use == "data"]
        degrees = (
            [math.prod(fixed)]
            if all(a.use != "free" for a in shape.axes)
            else [d for d in range(1, world + 1) if world % d == 0]
        )
        if size is not None:
            return sorted(
                {
                    self.searches.samples // (d * size)
                    for d in degrees
                    if self.searches.samples % (d * size) == 0
                }
            )
        samples = self.searches.samples
        # A microbatch of a single sample over all ranks can be priced where it is asked for, but
        # not run yet.
        divisors = [
            m
            for m in (2**i for i in range(samples.bit_length()))
            if samples % m == 0 and (m < samples or m == 1)
        ]
        if shape.stages == 1:
            return divisors
        least = [
            samples // (degrees[0] * b) for b in PER_REPLICA if samples % (degrees[0] * b) == 0
        ]
        return [m for m in least if min(2, samples) <= m < max(2, samples)] or divisors[-1:]

    @property
    def _may_run_whole(self) -> bool:
        return self.options.micro_batch_size is None and self.options.schedule is None

    # All of it

    def run(self) -> PricedPlan:
        """Raises PlanError where no shape has a plan: that of the shape that comes nearest."""
        best = self._best_of(self.families(), None)
        # Schedules with several stages a rank hold more, and wait less: they are tried for the
        # shapes that came near.
        piped = [d for d in self._drafted if d.shape.pipeline > 1]
        for draft in sorted(piped, key=lambda d: d.seconds)[:NEAREST]:
            best = self._better(best, self._drafts(self._possible(list(self._looped(draft.shape)))))
        if self._modes_are_free:
            near = (
                [best.shape]
                if best is not None
                else [shape for _, shape in sorted(self._short, key=lambda s: s[0])[:NEAREST]]
            )
            best = self._best_of(
                dict.fromkeys(shapes for shape in near for shapes in self._in_modes(shape)), best
            )
        if best is None:
            return self._leanest()
        others = sorted((d for d in self._drafted if d is not best), key=lambda d: d.seconds)
        for draft in (best, *others[: FITTED - 1]):  # drafts may turn out larger than they looked
            try:
                return fitted(self.searches, draft)
            except UnsolvedError:
                self.searches.unsolved.append(draft.shape)
            except BudgetError:
                pass
        shapes = self._possible(
            [replace(best.shape, microbatches=m) for m in self._microbatches(best.shape)]
        )
        tried = dict.fromkeys((*shapes, *(draft.shape for draft in self._drafted)))
        left = [
            shape
            for family in self.families()
            for shape in self._possible(family)
            if shape not in tried
        ]
        saving = self._saving_modes(
            replace(best.shape, microbatches=max(shape.microbatches for shape in tried))
        )
        self._short += [
            *((0.0, shape) for shape in tried),
            *((0.5, shape) for shape in saving),
            *((1.0, shape) for shape in left),
        ]
        return self._leanest(MOST_LEAN + len(saving))

    @property
    def _modes_are_free(self) -> bool:
        return self.options.parallel is None and self.options.mesh is None

    def _saving_modes(self, near: Configuration) -> list[Configuration]:
        """Those of which some microbatches may fit and that take least then, in up to as many."""
        found: list[tuple[float, tuple[Configuration, ...]]] = []
        for family in self._in_modes(near) if self._modes_are_free and near.stages == 1 else ():
            if possible := self._possible(family):
                with suppress(PlanError):
                    found.append((self._least_bytes(possible[-1]), possible))
        nearest = [family for _, family in sorted(found, key=lambda f: f[0])[:NEAREST]]
        return [shape for family in nearest for shape in family if self._may_fit(shape)]

    def _best_of(
        self, families: Iterable[Sequence[Configuration]], best: Candidate | None
    ) -> Candidate | None:
        """The best draft of these and the one there is."""
        waiting = sorted(self._floors(families), key=lambda w: w[0])
        while waiting:
            priced, waiting = self._price(waiting, best)
            if not priced:
                break
            for estimate, bound, shapes in sorted(priced, key=lambda p: p[:2]):
                if best is None or max(bound, estimate / HOPEFUL) < best.seconds * self._handicap(
                    shapes[0], best.shape
                ):
                    best = self._better(best, self._drafts(shapes))
        return best

    def _leanest(self, most: int = MOST_LEAN) -> PricedPlan:
        """The plan that takes least memory of the shapes that come nearest, if that fits."""
        if not self._short:
            raise failure(
                self.failures, self.searches.unsolved, self.options, self.searches.samples
            )
        errors: list[BudgetError] = []
        for least, shape in sorted(self._short, key=lambda short: short[0])[:most]:
            if errors and least >= min(e.least for e in errors):
                break
            self.searches.progress(f"saving memory, {shape}")
            if not self.searches.divides(shape):
                continue
            search, samples = self.searches.of(shape.microbatches), self.searches.part(shape)
            with resized(search.analysis, samples, search.analysis.rules):
                found = least_memory_plan(search, shape, samples, self.searches.by_hand(search))
                rank, kinds = fullest(found)
            if sum(kinds.values()) <= search.budget:
                return found
            errors.append(too_little(search, shape, samples, kinds, rank))
        if not errors:
            raise failure(
                self.failures, self.searches.unsolved, self.options, self.searches.samples
            )
        raise min(errors, key=lambda e: e.least)

    def _floors(
        self, families: Iterable[Sequence[Configuration]]
    ) -> Iterator[tuple[float, tuple[Configuration, ...]]]:
        for shapes in families:
            if possible := self._possible(shapes):
                yield (
                    self.searches.of(possible[0].microbatches).floor(
                        possible[0], self.searches.part(possible[0])
                    ),
                    possible,
                )

    def _price(
        self, waiting: list[tuple[float, tuple[Configuration, ...]]], best: Candidate | None
    ) -> tuple[list[_Priced], list]:
        """An estimate, the least seconds and the shapes of those that may be the best; and those
        left for later.
        """
        priced: list[_Priced] = []
        hopeless: dict[
            int, float
        ] = {}  # for samples of a replica: ranks over which to cut what is no batch
        limit = math.inf if best is None else best.seconds
        for i, (floor, shapes) in enumerate(waiting):
            if floor >= limit:
                return priced, waiting[i:] if best is None else []
            cut, share = self._cut(shapes[0])
            if cut >= hopeless.get(share, math.inf):
                continue
            self.searches.progress(str(shapes[0]))
            search, samples = (
                self.searches.of(shapes[0].microbatches),
                self.searches.part(shapes[0]),
            )
            offered = self.options.is_unrequested_mode(shapes[0].mode)
            try:
                if offered and best is None and not self._may_fit(shapes[-1]):
                    continue
                bound = search.least(shapes[0], samples)
                if best is None or bound < best.seconds * self._handicap(shapes[0], best.shape):
                    bound, estimate = search.bound(shapes[0], samples)
                    priced.append((estimate, bound, shapes))
                    limit = min(limit, estimate) if best is None else limit
            except PlanError as e:
                if not offered and not isinstance(e, UnsolvedError):
                    raise
                self._failed(shapes[0], e)
                continue
            # To cut the same samples' tensors over more ranks sends more and computes in smaller
            # pieces; modes differ.
            if bound > 2 * limit and shapes[0].mode is None:
                hopeless[share] = min(cut, hopeless.get(share, math.inf))
        return priced, []

    def _may_fit(self, shape: Configuration) -> bool:
        return self._least_bytes(shape) <= TOO_HIGH * self.searches.of(shape.microbatches).budget

    def _least_bytes(self, shape: Configuration) -> float:
        return self.searches.of(shape.microbatches).least_bytes(shape, self.searches.part(shape))

    def _cut(self, shape: Configuration) -> tuple[int, int]:
        """Over how many ranks a shape cuts what is no batch, and the samples that such ranks have
        together.
        """
        split = math.prod(a.size for a in shape.axes if a.use == "data")
        return math.prod(a.size for a in shape.axes if a.use == "tensor"), self.searches.part(
            shape
        ) // split

    def _drafts(self, shapes: Sequence[Configuration]) -> Iterator[Candidate]:
        """Of one shape after the other, until one needs no memory saved."""
        for shape in shapes:
            try:
                draft = self.searches.drafted(shape)
            except BudgetError as e:
                self._short.append((e.least, shape))
                continue
            except PlanError as e:
                self._failed(shape, e)
                continue
            self._drafted.append(draft)
            yield draft
            if len(draft.points) == 1:
                return

    def _failed(self, shape: Configuration, error: PlanError) -> None:
        """Remembers why a shape has no plan. Of modes that nobody asked for those count that are
        solved fast.
        """
        if not isinstance(error, UnsolvedError):
            self.failures.append(error)
        elif not self.options.is_unrequested_mode(shape.mode):
            self.searches.unsolved.append(shape)

    def _better(self, best: Candidate | None, drafts: Iterable[Candidate]) -> Candidate | None:
        for draft in drafts:
            if best is None or draft.seconds < best.seconds * self._handicap(
                draft.shape, best.shape
            ):
                best = draft
        return best

    def _possible(self, shapes: Sequence[Configuration]) -> tuple[Configuration, ...]:
        found = []
        for shape in shapes:
            try:
                check_schedule(shape.schedule, shape.pipeline, shape.chunks, shape.microbatches)
                self.searches.part(shape)
                # A device alone may never need the graph of a microbatch.
                if self.options.micro_batch_size is not None or shape.stages > 1:
                    self.searches.check_room(shape)
                if shape.stages > 1 and shape.stages > (
                    units := len(self.searches.of(shape.microbatches).units.nodes)
                ):
                    raise too_many_stages(shape, units)
                found.append(shape)
            except PlanError as e:
                self.failures.append(e)
        return tuple(found)

    def _handicap(self, shape: Configuration, best: Configuration) -> float:
        """What must be faster to count as better: the simpler one need only be about as fast."""
        differ = [a - b for a, b in zip(_complexity(shape), _complexity(best), strict=True)]
        return SIMPLER if max(differ) > 0 else 1 / SIMPLER if min(differ) < 0 else 1.0


def _complexity(shape: Configuration) -> tuple[int, ...]:
    return len(shape.axes), shape.pipeline, shape.chunks, shape.mode is not None
