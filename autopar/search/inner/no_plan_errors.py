"""The errors of configurations that have no plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import BudgetError, PlanError
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.memory_advice import memory_advice
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options


def no_plan_error(
    failures: Sequence[PlanError], unsolved: Sequence[Configuration], options: Options, samples: int
) -> PlanError:
    """The error of a search in which no configuration has a plan.

    Args:
        failures: why configurations failed.
        unsolved: configurations for which the solver reached its limit.
        samples: of the batch.
    """
    size = options.micro_batch_size
    if unsolved:
        limit, more = "its limit of operations", ""
        if math.isfinite(options.search_seconds):
            limit += f" or time_limit={options.search_seconds:g} seconds"
            more = ", or more time"
        return PlanError(
            f"no plan was found: the solver reached {limit} for {unsolved[0]}, and for "
            f"{len(unsolved) - 1} other configurations. Give parallel= or mesh= sizes{more}"
        )
    if size is None and failures:
        # The user asked for no microbatch size, so an error about one helps least.
        return next((f for f in failures if not _is_about_size(f)), failures[0])
    if size is None:
        return PlanError(
            f"no plan was found for a batch of {samples} on {options.world_size} ranks: give "
            "other parallel= or mesh= sizes"
        )
    if failures and _is_about_size(failures[0]):
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


def _is_about_size(error: PlanError) -> bool:
    return str(error).startswith("micro_batch_size")


def too_many_stages_error(configuration: Configuration, units: int) -> PlanError:
    """The error of a configuration with more stages than the graph has units."""
    return PlanError(
        f"{configuration.stages} pipeline stages ({configuration.pipeline} ranks x "
        f"{configuration.chunks} chunks) are more than the {units} parts that the model can be cut "
        "into: use fewer"
    )


def no_parameter_error(rank: int, configuration: Configuration) -> PlanError:
    """The error of a configuration with a pipeline rank that has nothing to train."""
    return PlanError(
        f"pipeline rank {rank} of {configuration.pipeline} would have no parameter, so that no "
        "optimizer could be made there: cut the model elsewhere, or use fewer stages"
    )


def over_budget_error(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    kinds: dict[str, float],
    stage: int | None = None,
) -> BudgetError:
    """The error of a configuration whose least memory is above the budget.

    Args:
        samples: of one microbatch.
        kinds: the least memory of a device in bytes, by kind.
        stage: which stage needs it, where stages differ.
    """
    options, needed = search.options, sum(kinds.values())
    where = ", ".join(
        f"{kind} {nbytes:,.0f}" for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1])
    )
    pipeline, microbatches = configuration.pipeline, configuration.microbatches
    mesh = " x ".join(str(a.size) for a in configuration.axes)
    piped = f" of each of {pipeline} pipeline ranks" if pipeline > 1 else ""
    budgets = search.budgets(configuration)
    budget = budgets[stage % pipeline] if stage is not None else min(budgets)
    given = (
        "memory_budget"
        if options.memory_budget
        else f"memory of a device of {search.cluster.name!r}"
    )
    at = f" at stage {stage}" if stage is not None and configuration.stages > 1 else ""
    advice = memory_advice(kinds, options, configuration.axes)
    return BudgetError(
        f"no plan found fits the {given} of {budget:,.0f} bytes: the least found is "
        f"{needed:,.0f} bytes a device{at} ({where}), on a mesh of {mesh}{piped} in {microbatches} "
        f"microbatch{'es' * (microbatches > 1)} of {samples} sample{'s' * (samples > 1)}. "
        f"What would free most: {advice}",
        needed,
    )


def time_limit_error(error: BudgetError, options: Options) -> BudgetError:
    """The error of a search that its time limit ended before a plan was found that fits."""
    return BudgetError(
        f"{error}. The search ended at time_limit={options.search_seconds:g} seconds: with more it "
        "may find a plan that fits",
        error.least,
    )
