"""Which part of the global batch a rank passes to a call, as layouts of the inputs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.errors import PlanError
from autopar.ir.layout import I, Layout, Type, chunk_count
from autopar.ir.plan_data import PlanData

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
GLOBAL, LOCAL = "global", "local"  # the values of the option ``batch``
_DATA_AXIS = re.compile(r"data\d*")


@dataclass(frozen=True)
class BatchLayouts:
    """How the inputs of a program lie on the mesh.

    Attributes:
        axes: the mesh axes whose ranks pass different samples: the data-parallel axes; none where
            every rank passes the global batch.
        inputs, hoisted: the layouts of the user's inputs, and of the values that are computed once
            a step from the whole batch. Axes of ``inputs`` that are not in ``axes`` cut the samples
            that a rank passes.
    """

    axes: tuple[int, ...]
    inputs: tuple[Layout, ...]
    hoisted: tuple[Layout, ...]

    def local_chunks(self, place: int, t: Type, chunks: int, sizes: Sequence[int]) -> int:
        """How many of ``chunks`` equal chunks of the batch this rank has of input ``place``; the
        hoisted values count on after the inputs.

        Args:
            t: the type along time.
            sizes: the ranks along each mesh axis.
        """
        layout = (*self.inputs, *self.hoisted)[place]
        return chunks // chunk_count(layout, t.dim, sizes)

    def replicas(self, place: int, sizes: Sequence[int]) -> int:
        """The number of replicas that pass different samples of input ``place``."""
        layout = self.inputs[place]
        return math.prod(sizes[axis] for axis in self.axes if layout[axis].is_shard)


def global_batch(inputs: int, hoisted: int, axes: int) -> BatchLayouts:
    """The layouts where every rank passes the global batch to a mesh of so many ``axes``."""
    whole = (I,) * axes
    return BatchLayouts((), (whole,) * inputs, (whole,) * hoisted)


def with_batch(plan: AnyPlan, batch: str | None) -> AnyPlan:
    """``plan`` with the option ``batch`` among its options; None keeps what it has.

    Raises:
        PlanError: the option has another value than "global" or "local".
    """
    batch = plan.batch if batch is None else batch
    if batch not in (GLOBAL, LOCAL):
        raise PlanError(f'batch={batch!r}: give "global" or "local"')
    if batch == plan.batch:
        return plan
    return dataclasses.replace(plan, options={**plan.options, "batch": batch})


def data_axes(plan: PlanData) -> tuple[int, ...]:
    """The data-parallel axes of a plan's mesh, by number: those named ``data``, and ``data1`` and
    so on where there are several, which belong to no mode.
    """
    of_modes = {name for names in plan.modes.values() for name in names}
    return tuple(
        axis
        for axis, (name, size) in enumerate(plan.mesh.items())
        if size > 1 and _DATA_AXIS.fullmatch(name) and name not in of_modes
    )
