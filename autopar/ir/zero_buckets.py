"""ZeRO buckets: parameters whose conversions in the graph gather in step with each other, so that
one collective carries all of them, and one reduce-scatter their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from autopar.ir.layout import parse_type
from autopar.ir.plan_data import ConversionStep

# Gradients of fewer bytes are copied into one tensor, which takes less than a message of their own.
SMALL_BYTES = 64 << 10


def is_small(nbytes: float) -> bool:
    """Whether a gradient of ``nbytes`` on a rank is copied into one tensor with others."""
    return nbytes < SMALL_BYTES


@lru_cache(maxsize=4096)
def is_gather(step: ConversionStep) -> bool:
    """Whether a step of a conversion is an all-gather that a bucket can have: of chunks that lie in
    the order of their dim.
    """
    _, source, target = step
    return parse_type(source).pieces == 1 and parse_type(source).is_shard and target in ("I", "R")


def bucket_steps(steps: Iterable[ConversionStep]) -> tuple[ConversionStep, ...] | None:
    """The steps of a conversion without the dims that they gather: parameters may share a bucket
    where these are equal. None for a conversion without a gather, or with other steps than gathers
    and those from I to R, which communicate in the backward alone.
    """
    found = []
    for step in steps:
        axis, source, target = step
        if not is_gather(step) and (source, target) != ("I", "R"):
            return None
        found.append((axis, "S" if is_gather(step) else source, target))
    return tuple(found) if any(source == "S" for _, source, _ in found) else None


class BucketedProgram(Protocol):
    """The fields of a plan that say what its buckets are; see :class:`PlanData`."""

    @property
    def conversions(self) -> Mapping[str, Mapping[str, tuple[ConversionStep, ...]]]: ...
    @property
    def recomputed(self) -> Collection[str]: ...
    @property
    def zero_buckets(self) -> Collection[Sequence[str]]: ...


def gathered_together(program: BucketedProgram) -> list[list[str]]:
    """The parameters of each collective of a program's buckets. Parameters of a bucket that differ
    in their steps, or in whether the backward gathers them again, are gathered apart.
    """
    again, found = set(program.recomputed), list[list[str]]()
    for bucket in program.zero_buckets:
        alike: dict[Hashable, list[str]] = {}
        for name in bucket:
            converted = program.conversions.get(name, {})
            if len(converted) == 1:
                ((layout, steps),) = converted.items()
                if (kind := bucket_steps(steps)) is not None:
                    alike.setdefault((kind, f"{name} -> {layout}" in again), []).append(name)
        found += (names for names in alike.values() if len(names) > 1)
    return found
