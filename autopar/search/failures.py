"""What to say where no shape has a plan."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.search.options import Options


def failure(failures: Sequence[PlanError], options: Options, samples: int) -> PlanError:
    """The error of a search over shapes that all failed, of a batch of ``samples``."""
    size = options.micro_batch_size
    if size is None:  # what was wrong with sizes that nobody asked for says least
        return next((f for f in failures if not str(f).startswith("micro_batch_size")), failures[0])
    if failures and str(failures[0]).startswith("micro_batch_size"):
        return failures[0]
    ranks, pipeline = options.world_size, options.pipeline
    degrees = " or ".join(map(str, options.data_degrees(pipeline.size if pipeline else 1)))
    why = failures[0] if failures else f"the batch must be a multiple of {size} x the data-parallel size, {degrees}"
    asked = f"{size} sample{'s' * (size > 1)} a microbatch"
    return PlanError(f"micro_batch_size={size}: a batch of {samples} on {ranks} ranks has no plan with {asked}: {why}")
