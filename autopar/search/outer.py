"""The outer search: pipelines, meshes, microbatches and schedules are enumerated, with bounds that prune."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.analysis import Analysis
from autopar.cost_model import Cluster
from autopar.errors import BudgetError, PlanError
from autopar.search.assemble import assemble
from autopar.search.decide import accounted
from autopar.search.exact import exact
from autopar.search.failures import failure
from autopar.search.found import Found
from autopar.search.handmade import cut_before
from autopar.search.least import fullest, leanest
from autopar.search.options import Options
from autopar.search.resize import resized
from autopar.search.schedules import check_schedule
from autopar.search.search import Draft, Search
from autopar.search.shape import Shape

Progress = Callable[[str], None]
SIMPLER = 0.99  # a mesh of more axes must be faster by this much
MOST_STAGES = 64
PER_REPLICA = (1, 2, 4)  # samples of a microbatch that are tried in a pipeline
REFITS = 6
FITTED = 3  # drafts, the fastest first, of which one may fit in full
EXACT_TRIES = 3
HOPEFUL = 1.05  # an estimate of a step may be too high by so much: shapes that are slower even then are not worth a draft
EXACT_SECONDS = 2.0  # for small problems to be solved to the end
LOOPED = "interleaved-1f1b"
CHUNKS = (2, 4)  # stages a rank that are tried
NEAREST = 2
MOST_LEAN = 12  # shapes whose least memory is worked out where nothing fits


_Priced = tuple[float, float, tuple[Shape, ...]]  # an estimate of a step, the least that it takes, and shapes to try in this order


class Outer:
    """Finds the best plan over all shapes that the options leave.

    Args:
        graph_of: the captured graph of a batch in so many microbatches; a BudgetError or PlanError where there is none.
        samples: of the whole batch.
    """

    def __init__(self, graph_of: Callable[[int], Analysis], samples: int, cluster: Cluster, options: Options, progress: Progress) -> None:
        self.graph_of, self.samples, self.cluster, self.options, self.progress = graph_of, samples, cluster, options, progress
        self.timings: dict[str, float] = {}
        self._searches: dict[bool, Search | PlanError] = {}
        self.failures: list[PlanError] = []
        self._short: list[tuple[float, Shape]] = []  # of memory: about the least that they need
        self.tried = 0

    # What is enumerated

    def families(self) -> Iterator[tuple[Shape, ...]]:
        """Every mesh with every number of microbatches, in one schedule. Of a device alone more microbatches only save memory: the fewest
        come first, and stand for the rest."""
        asked = self.options.pipeline
        world = self.options.world_size
        sizes = [asked.size] if asked else [p for p in range(1, min(world, MOST_STAGES) + 1) if world % p == 0]
        for pipeline in sizes:
            for axes in self.options.meshes(pipeline):
                chunks = (asked.chunks if asked else None) or (2 if self.options.schedule == LOOPED and pipeline > 1 else 1)
                schedule = self.options.schedule or (LOOPED if chunks > 1 else "1f1b")
                shape = Shape(pipeline, axes, 1, chunks, schedule)
                shapes = [replace(shape, microbatches=m) for m in self._microbatches(shape)]
                yield from [tuple(shapes)] if shape.stages == 1 and shapes else [(s,) for s in shapes]

    def _looped(self, shape: Shape) -> Iterator[Shape]:
        """The same with several stages a rank, where that is free."""
        asked = self.options.pipeline.chunks if self.options.pipeline else None
        if shape.pipeline > 1 and asked is None and self.options.schedule is None:
            yield from (replace(shape, chunks=chunks, schedule=LOOPED) for chunks in CHUNKS)

    def _microbatches(self, shape: Shape) -> list[int]:
        """How many microbatches are tried."""
        world, size = math.prod(shape.sizes), self.options.micro_batch_size
        fixed = [a.size for a in shape.axes if a.use == "data"]
        degrees = [math.prod(fixed)] if all(a.use != "free" for a in shape.axes) else [d for d in range(1, world + 1) if world % d == 0]
        if size is not None:
            return sorted({self.samples // (d * size) for d in degrees if self.samples % (d * size) == 0})
        divisors = [m for m in (2**i for i in range(self.samples.bit_length())) if self.samples % m == 0]
        if shape.stages == 1:
            return divisors
        least = [self.samples // (degrees[0] * b) for b in PER_REPLICA if self.samples % (degrees[0] * b) == 0]
        return [m for m in least if m >= min(2, self.samples)] or divisors[-1:]

    # Searching one shape

    def search_of(self, microbatches: int) -> Search:
        """The search on the graph of a microbatch, of any size; that of a whole batch is another one, without counts."""
        parts = microbatches > 1
        if parts not in self._searches:
            # A dim of one sample is none that rules see: the graph is that of a larger microbatch.
            while self.samples // microbatches == 1 and microbatches % 2 == 0 and microbatches > 2:
                microbatches //= 2
            try:
                analysis = self.graph_of(microbatches)
                cuts = cut_before(analysis, self.options.pipeline.split_before) if self.options.pipeline else ()
                self._searches[parts] = Search(analysis, self.cluster, self.options, cuts, self.timings)
            except PlanError as e:
                self._searches[parts] = e
        found = self._searches[parts]
        if isinstance(found, PlanError):
            raise found
        return found

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
        if samples == 1 and shape.microbatches > 1:
            raise PlanError(
                f"micro_batch_size: a microbatch of a single sample over all ranks cannot be run yet ({shape.microbatches} microbatches); "
                "use micro_batch_size=2, or split the batch over ranks too"
            )
        return samples

    def drafted(self, shape: Shape, reserve: Sequence[float] | None = None, alike: bool = False) -> Draft:
        search = self.search_of(shape.microbatches)
        self.tried += 1
        return search.draft(shape, self.part(shape), reserve, self._by_hand(search), alike)

    def _by_hand(self, search: Search) -> list[int] | None:
        """The first unit of each stage, where the user cut."""
        if not self.options.pipeline or not self.options.pipeline.split_before:
            return None
        cuts = cut_before(search.analysis, self.options.pipeline.split_before)
        return [0, *(search.units.starts.index(n) for n in cuts)]

    # All of it

    def run(self) -> Found:
        """Raises PlanError where no shape has a plan: that of the shape that comes nearest."""
        best: Draft | None = None
        waiting = sorted(self._floors(), key=lambda w: w[0])
        drafted: list[Draft] = []
        while waiting:
            priced, waiting = self._price(waiting, best)
            if not priced:
                break
            for estimate, bound, shapes in sorted(priced, key=lambda p: p[:2]):
                if best is None or max(bound, estimate / HOPEFUL) < best.seconds * self._handicap(shapes[0], best.shape):
                    drafts = list(self._drafts(shapes))
                    drafted += drafts
                    best = self._better(best, drafts)
        # Schedules with several stages a rank hold more, and wait less: they are tried for the shapes that came near.
        piped = [d for d in drafted if d.shape.pipeline > 1]
        for draft in sorted(piped, key=lambda d: d.seconds)[:NEAREST]:
            looped = list(self._drafts(self._possible(list(self._looped(draft.shape)))))
            drafted += looped
            best = self._better(best, looped)
        if best is None:
            return self._leanest()
        others = sorted((d for d in drafted if d is not best), key=lambda d: d.seconds)
        for draft in (best, *others[: FITTED - 1]):  # drafts may turn out larger than they looked
            with suppress(BudgetError):
                return self.fitted(draft)
        shapes = self._possible([replace(best.shape, microbatches=m) for m in self._microbatches(best.shape)])
        tried = dict.fromkeys((*shapes, *(draft.shape for draft in drafted)))
        left = [shape for family in self.families() for shape in self._possible(family) if shape not in tried]
        self._short += [*((0.0, shape) for shape in tried), *((1.0, shape) for shape in left)]
        return self._leanest()

    def _leanest(self) -> Found:
        """The plan that takes least memory of the shapes that come nearest, if that fits."""
        if not self._short:
            raise failure(self.failures, self.options, self.samples)
        errors: list[BudgetError] = []
        for least, shape in sorted(self._short, key=lambda short: short[0])[:MOST_LEAN]:
            if errors and least >= min(e.least for e in errors):
                break
            self.progress(f"saving memory, {shape}")
            search, samples = self.search_of(shape.microbatches), self.part(shape)
            with resized(search.analysis, samples, search.analysis.rules):
                found = leanest(search, shape, samples, self._by_hand(search))
                rank, kinds = fullest(found)
            if sum(kinds.values()) <= search.budget:
                return found
            errors.append(search.too_little(shape, samples, kinds, rank))
        raise min(errors, key=lambda e: e.least)

    def _floors(self) -> Iterator[tuple[float, tuple[Shape, ...]]]:
        for shapes in self.families():
            if possible := self._possible(shapes):
                yield self.search_of(possible[0].microbatches).floor(possible[0], self.part(possible[0])), possible

    def _price(self, waiting: list[tuple[float, tuple[Shape, ...]]], best: Draft | None) -> tuple[list[_Priced], list]:
        """An estimate, the least seconds and the shapes of those that may be the best; and those left for later."""
        priced: list[_Priced] = []
        hopeless: dict[int, float] = {}  # for samples of a replica: ranks over which to cut what is no batch
        limit = math.inf if best is None else best.seconds
        for i, (floor, shapes) in enumerate(waiting):
            if floor >= limit:
                return priced, waiting[i:] if best is None else []
            cut, share = self._cut(shapes[0])
            if cut >= hopeless.get(share, math.inf):
                continue
            self.progress(str(shapes[0]))
            bound, estimate = self.search_of(shapes[0].microbatches).bound(shapes[0], self.part(shapes[0]))
            priced.append((estimate, bound, shapes))
            if bound > 2 * limit:  # to cut the same samples' tensors over more ranks sends more and computes in smaller pieces
                hopeless[share] = min(cut, hopeless.get(share, math.inf))
            limit = min(limit, estimate) if best is None else limit
        return priced, []

    def _cut(self, shape: Shape) -> tuple[int, int]:
        """Over how many ranks a shape cuts what is no batch, and the samples that such ranks have together."""
        split = math.prod(a.size for a in shape.axes if a.use == "data")
        return math.prod(a.size for a in shape.axes if a.use == "1d"), self.part(shape) // split

    def _drafts(self, shapes: Sequence[Shape]) -> Iterator[Draft]:
        """Of one shape after the other, until one needs no memory saved."""
        for shape in shapes:
            try:
                draft = self.drafted(shape)
            except BudgetError as e:
                self._short.append((e.least, shape))
                continue
            except PlanError as e:
                self.failures.append(e)
                continue
            yield draft
            if len(draft.points) == 1:
                return

    def _better(self, best: Draft | None, drafts: Iterable[Draft]) -> Draft | None:
        for draft in drafts:
            if best is None or draft.seconds < best.seconds * self._handicap(draft.shape, best.shape):
                best = draft
        return best

    def _possible(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        found = []
        for shape in shapes:
            try:
                check_schedule(shape.schedule, shape.pipeline, shape.chunks, shape.microbatches)
                self.part(shape)
                if shape.stages > 1 and shape.stages > (units := len(self.search_of(shape.microbatches).units.nodes)):
                    raise PlanError(
                        f"{shape.stages} pipeline stages ({shape.pipeline} ranks x {shape.chunks} chunks) are more than the {units} parts "
                        "that the model can be cut into: use fewer"
                    )
                found.append(shape)
            except PlanError as e:
                self.failures.append(e)
        return tuple(found)

    def _handicap(self, shape: Shape, best: Shape) -> float:
        """What must be faster to count as better: the simpler one need only be about as fast."""
        differ = [a - b for a, b in zip(_complexity(shape), _complexity(best), strict=True)]
        return SIMPLER if max(differ) > 0 else 1 / SIMPLER if min(differ) < 0 else 1.0

    def fitted(self, draft: Draft) -> Found:
        """The draft in full. Where its units may be sharded differently, which has a price at their borders that drafts do not see, also
        with all of them as in the fastest solution; the faster of the two."""
        reserve = [0.0] * draft.shape.pipeline
        found: list[Found] = []
        failures: list[BudgetError] = []
        for alike in (False, True)[: len(draft.points)]:
            try:
                found.append(self._refitted(self.drafted(draft.shape, reserve, alike) if alike else draft, reserve, alike))
            except BudgetError as e:
                failures.append(e)
        if not found:
            raise failures[0]
        return self._to_the_end(draft, self._proven(min(found, key=lambda f: f.seconds)))

    def _refitted(self, draft: Draft, reserve: list[float], alike: bool = False) -> Found:
        """The draft in full; where it turns out larger than drafted, drafted again with so much less room, which ``reserve`` notes."""
        shape = draft.shape
        self.progress(f"writing down {shape}")
        search = self.search_of(shape.microbatches)
        for refit in range(REFITS):
            with resized(search.analysis, self.part(shape), search.analysis.rules):
                found = accounted(assemble(search, draft), search.autograd)
            over = [nbytes - search.budget for nbytes in found.device_bytes()]
            if max(over) <= 0:
                return found
            reserve[:] = [r + max(0.0, o) * (1 + refit / 8) for r, o in zip(reserve, over, strict=True)]
            draft = self.drafted(shape, reserve, alike)
        if (fits := self._exact(draft, reserve, None)) is not None:
            return fits
        raise search.too_little(shape, self.part(shape), found.nbytes_by_kind(max(range(len(over)), key=over.__getitem__)))

    def _proven(self, found: Found) -> Found:
        """With the gap to what no plan of its shape can beat; of a device alone the draft's gap is that."""
        if found.shape.stages == 1:
            return found
        bound, _ = self.search_of(found.microbatches).bound(found.shape, self.part(found.shape))
        return replace(found, gap=max(0.0, 1 - bound / found.seconds))

    def _to_the_end(self, draft: Draft, found: Found) -> Found:
        """A small problem is solved exactly, where one without a price of memory was not that already."""
        if draft.shape.stages == 1 and len(draft.points) == 1:
            return found
        return self._exact(draft, [0.0] * draft.shape.pipeline, found) or found

    def _exact(self, draft: Draft, reserve: list[float], known: Found | None) -> Found | None:
        """The exact solution that fits with all that is counted, if it is found and better than what is known."""
        shape, search = draft.shape, self.search_of(draft.shape.microbatches)
        by_hand = draft.starts if self.options.pipeline and self.options.pipeline.split_before else None
        seconds = min(EXACT_SECONDS, self.options.time_limit)
        least = 0.0  # proven, with all the memory there is
        for attempt in range(EXACT_TRIES):
            found = exact(search, shape, self.part(shape), seconds, known, reserve, by_hand)
            if found is None or found is known:
                return found
            least = least if attempt else found.seconds * (1 - found.gap)
            with resized(search.analysis, self.part(shape), search.analysis.rules):
                found = accounted(replace(found, gap=max(0.0, 1 - least / found.seconds)), search.autograd)
            over = [nbytes - search.budget for nbytes in found.device_bytes()]
            if max(over) <= 0:
                return found if known is None or found.seconds < known.seconds else known
            reserve = [r + max(0.0, o) for r, o in zip(reserve, over, strict=True)]
        return known


def _complexity(shape: Shape) -> tuple[int, ...]:
    return len(shape.axes), shape.pipeline, shape.chunks
