"""What to say of a shape that has no plan, and where none has."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import BudgetError, PlanError
from autopar.search.ilp.memory_prices import memory_advice
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options


def failure(
    failures: Sequence[PlanError], unsolved: Sequence[Configuration], options: Options, samples: int
) -> PlanError:
    """The error of a search over shapes that all failed or were left ``unsolved``, of a batch of
    ``samples``.
    """
    size = options.micro_batch_size
    if unsolved:
        return PlanError(
            f"no plan was found: {unsolved_notes(unsolved, options)[0]}. Give a higher one, or "
            "parallel= or mesh= sizes"
        )
    if size is None and failures:  # what was wrong with sizes that nobody asked for says least
        return next((f for f in failures if not str(f).startswith("micro_batch_size")), failures[0])
    if size is None:
        return PlanError(
            f"no plan was found for a batch of {samples} on {options.world_size} ranks: give "
            "other parallel= or mesh= sizes, or a higher "
            f"time_limit than {options.time_limit:g} s"
        )
    if failures and str(failures[0]).startswith("micro_batch_size"):
        return failures[0]
    ranks, pipeline = options.world_size, options.pipeline
    degrees = " or ".join(map(str, options.data_parallel_sizes(pipeline.size if pipeline else 1)))
    why = (
        failures[0]
        if failures
        else f"the batch must be a multiple of {size} x the data-parallel size, {degrees}"
    )
    asked = f"{size} sample{'s' * (size > 1)} a microbatch"
    return PlanError(
        f"micro_batch_size={size}: a batch of {samples} on {ranks} ranks has no plan with "
        f"{asked}: {why}"
    )


def unsolved_notes(shapes: Sequence[Configuration], options: Options) -> list[str]:
    """What to note of a plan beside which ``shapes`` could not be solved."""
    names = list(dict.fromkeys(map(str, shapes)))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    limit = f"the solver found no plan for them within time_limit={options.time_limit:g} s"
    return [f"not searched: {', '.join(names[:3])}{more}; {limit}"] if names else []


def too_many_stages(shape: Configuration, parts: int) -> PlanError:
    """The error of a shape with more stages than there are parts of the model."""
    return PlanError(
        f"{shape.stages} pipeline stages ({shape.pipeline} ranks x {shape.chunks} chunks) are "
        f"more than the {parts} parts "
        "that the model can be cut into: use fewer"
    )


def no_parameter(rank: int, shape: Configuration) -> PlanError:
    """The error of a shape with a pipeline rank that has nothing to train."""
    return PlanError(
        f"pipeline rank {rank} of {shape.pipeline} would have no parameter, so that no optimizer "
        "could be made there: "
        "cut the model elsewhere, or use fewer stages"
    )


def too_little(
    search: InnerSearch,
    shape: Configuration,
    samples: int,
    kinds: dict[str, float],
    stage: int | None = None,
) -> BudgetError:
    """The error of a shape whose least memory, by kind, is more than there is."""
    options, needed = search.options, sum(kinds.values())
    where = ", ".join(
        f"{kind} {nbytes:,.0f}" for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1])
    )
    mesh = " x ".join(str(a.size) for a in shape.axes)
    piped = f" of each of {shape.pipeline} pipeline ranks" if shape.pipeline > 1 else ""
    given = (
        "memory_budget"
        if options.memory_budget
        else f"memory of a device of {search.cluster.name!r}"
    )
    at = f" at stage {stage}" if stage is not None and shape.stages > 1 else ""
    return BudgetError(
        f"no plan fits the {given} of {search.budget:,.0f} bytes: the least that any needs is "
        f"{needed:,.0f} bytes a device{at} "
        f"({where}), on a mesh of {mesh}{piped} in {shape.microbatches} "
        f"microbatch{'es' * (shape.microbatches > 1)} of {samples} "
        f"sample{'s' * (samples > 1)}. What would free most: {memory_advice(kinds, options, shape.axes)}",
        needed,
    )
