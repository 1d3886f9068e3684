"""What the option ``parallel["pipeline"]`` fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.search.space.meshes import parallel_size
from autopar.search.space.option_checks import check_whole


@dataclass(frozen=True)
class PipelineOptions:
    """What the user fixed of the pipeline.

    Attributes:
        size: the number of pipeline ranks.
        chunks: the number of stages that each of these ranks runs; None where that is free.
        split_before: the modules that begin a stage, all stages but the first; empty where the
            cuts are free.
    """

    size: int = 1
    chunks: int | None = None
    split_before: tuple[str, ...] = ()


def pipeline_options(value: Any, world_size: int) -> PipelineOptions:
    """What ``parallel["pipeline"]`` fixes: a number of ranks, or a dict.

    Raises:
        PlanError: the value is neither, or its sizes do not go together.
    """
    if isinstance(value, Mapping) and (unknown := set(value) - {"size", "chunks", "split_before"}):
        raise PlanError(
            f"parallel['pipeline'] has {sorted(map(str, unknown))}: it takes size, chunks and "
            "split_before"
        )
    given = dict(value) if isinstance(value, Mapping) else {"size": value}
    size = parallel_size(value, "pipeline")
    if world_size % size:
        raise PlanError(
            f"parallel asks for {size} pipeline ranks, which do not divide world_size {world_size}"
        )
    chunks = given.get("chunks")
    if chunks is not None:
        check_whole("parallel['pipeline']['chunks']", chunks, "stages on each pipeline rank")
    cuts = given.get("split_before", ())
    if (
        isinstance(cuts, str)
        or not isinstance(cuts, Sequence)
        or not all(isinstance(c, str) for c in cuts)
    ):
        raise PlanError(
            f"split_before={cuts!r}: give a list of module names, one for each stage but the first"
        )
    if cuts and len(cuts) + 1 != size * (chunks or 1):
        stages = size * (chunks or 1)
        raise PlanError(
            f"split_before names {len(cuts)} modules, {stages} stages ({size} ranks x "
            f"{chunks or 1} chunks) need {stages - 1}"
        )
    return PipelineOptions(size, chunks or (1 if cuts else None), tuple(cuts))
