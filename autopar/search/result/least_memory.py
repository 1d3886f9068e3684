"""Where nothing that was searched fits the memory: the plan that takes least, or the error that
says how much that is.

Prices of memory far above what any budget asks lead to lean plans; not the highest to the leanest,
as what is made again is held while it is used. So a few are tried, each cut so that the stage that
holds most holds as little as can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pipeline.unit_costs import UnitCosts, UnitCostTable
from autopar.search.result.assemble import assemble
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.write_plan import accounted
from autopar.search.space.configuration import Configuration

PRICES = (
    0.0,
    *(4.0**i for i in range(-2, 7)),
)  # of all bytes of a device, as multiples of the step


def least_memory_plan(
    search: InnerSearch, shape: Configuration, samples: int, starts: Sequence[int] | None = None
) -> PricedPlan:
    """The plan of one shape that takes least, of those at a few prices of memory; whatever the
    budget is, it is the same.

    ``starts``: the first unit of each stage, where the user cut by hand. The search's graph must be
        that of a microbatch of ``samples``.
    """
    prices = search.prices(shape, samples)
    fastest = prices.at(0.0)
    unit = prices.seconds(fastest) / prices.nbytes(fastest)
    tabulator = UnitCostTable(prices.problem, search.units, once=shape.stages == 1)
    best: PricedPlan | None = None
    tried = set()
    for price in PRICES:
        solution = prices.at(price * unit)
        if (key := (solution.chosen, solution.recomputed)) in tried:
            continue
        tried.add(key)
        cuts = tuple(starts) if starts is not None else even_memory(tabulator.of([solution]), shape)
        taken = (0,) * len(search.units.nodes)
        draft = Candidate(
            shape,
            prices.problem,
            (solution,),
            cuts,
            taken,
            prices.seconds(solution),
            prices.gap(solution, search.budget),
        )
        found = accounted(assemble(search, draft), search.autograd)
        if best is None or max(found.device_bytes()) < max(best.device_bytes()):
            best = found
    assert best is not None
    return best


def fullest(found: PricedPlan) -> tuple[int, dict[str, float]]:
    """The pipeline rank whose device holds most, and its bytes by kind."""
    devices = found.device_bytes()
    rank = devices.index(max(devices))
    kinds: Counter[str] = Counter()
    for stage in range(rank, found.shape.stages, found.shape.pipeline):
        kinds.update(found.nbytes_by_kind(stage))  # type: ignore[arg-type]
    return rank, dict(kinds)


def even_memory(tables: UnitCosts, shape: Configuration) -> tuple[int, ...]:
    """The first unit of each stage, so that the stage that takes most memory takes as little as can
    be; of the first solution.
    """
    units = tables.kept.shape[1]
    kept, state = (
        np.concatenate([[0.0], table[0].cumsum()]) for table in (tables.kept, tables.state)
    )
    least = np.full(units + 1, np.inf)
    least[0] = 0.0
    came: list[np.ndarray] = []
    for flight in shape.microbatches_in_flight():
        memory = kept * flight + state
        run = memory[None, :] - memory[:, None]  # [first unit, unit after the last]
        run[np.tril_indices(units + 1)] = np.inf
        worst = np.maximum(least[:, None], run)
        came.append(worst.argmin(axis=0))
        least = worst.min(axis=0)
    starts, end = [], units
    for before in reversed(came):
        end = int(before[end])
        starts.append(end)
    return tuple(reversed(starts))
