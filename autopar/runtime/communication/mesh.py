"""The device mesh of a running program: its sizes, its process groups and this rank's place."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.ir.plan_data import PIPELINE
from autopar.runtime.communication.arrivals import Arrivals
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.communication.rank_device import device_type_of
from autopar.runtime.communication.world_mesh import lines_of, place_along, world_mesh
from autopar.runtime.measure.step_recorder import StepRecorder

Item = TypeVar("Item")


class Mesh:
    """A named grid of ranks over the default process group, the axis with the slowest links first.

    Arguments: ``sizes``, the ranks along each axis; ``names``, one for each axis; ``device``,
    ``"cpu"`` or ``"cuda"``, which is then the current GPU (by default as for a meta model);
    ``pipeline``, the ranks along a pipeline: the world is then that many meshes, and this is the
    mesh of this rank; ``pipeline_place``, how many axes cross slower links than the
    pipeline; ``pipeline_order``, for each pipeline rank the number of its block of ranks, if not
    that of the pipeline rank; ``modes``, the axes of each mode of tensor parallelism, by its name.
    Raises :class:`RunError` when the sizes do not multiply to the number of ranks.

    Attributes: ``world``, the torch mesh of all ranks, in which a pipeline is an axis at
        ``pipeline_place``; ``coordinate``, this rank's place along each axis; ``pipeline_rank``,
        its place along the pipeline; ``random_streams``, ``recorder`` and ``arrivals`` of the
        program that runs on the mesh.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        names: Sequence[str],
        device: torch.device | str | None = None,
        pipeline: int = 1,
        modes: Mapping[str, Sequence[str]] | None = None,
        pipeline_place: int = 0,
        pipeline_order: Sequence[int] = (),
    ) -> None:
        self.sizes, self.names = tuple(sizes), tuple(names)
        _check_names(self.sizes, self.names)
        self.pipeline, self.pipeline_rank, self.pipeline_place = pipeline, 0, pipeline_place
        self._modes = {name: tuple(axes) for name, axes in (modes or {}).items()}
        if pipeline > 1:
            self.world = world_mesh(
                self.with_pipeline(self.sizes, pipeline),
                self.with_pipeline(self.names, PIPELINE),
                device_type_of(device),
                tuple(pipeline_order),
            )
            self.pipeline_rank = place_along(self.world, PIPELINE)
            self.device_mesh = self.world[self.names]
        else:
            self.world = world_mesh(self.sizes, self.names, device_type_of(device))
            self.device_mesh = self.world
        self.device = _local_device(self.device_mesh.device_type)
        self.coordinate: tuple[int, ...] = tuple(
            self.device_mesh.get_local_rank(axis) for axis in range(len(self.sizes))
        )
        self.random_streams = RandomStreams(device=self.device)
        self.recorder = StepRecorder(self.device)
        self.arrivals = Arrivals()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if pipeline > 1:
            self.make_all_groups()

    def make_all_groups(self) -> None:
        """Makes the groups of all sets of axes. Stages need different groups, and all ranks must
        take part in making each of them.
        """
        for axes in _sets_of_several([axis for axis, n in enumerate(self.sizes) if n > 1]):
            self.axes_group(axes)

    def copy_for_program(self) -> Mesh:
        """A mesh of the same ranks and groups for another program: its random streams, its recorder
        and its arrivals are new.
        """
        other = copy.copy(self)
        other.random_streams = RandomStreams(device=self.device)
        other.recorder = StepRecorder(self.device)
        other.recorder.is_on = self.recorder.is_on
        other.arrivals = Arrivals()
        return other

    def __repr__(self) -> str:
        return (
            "Mesh("
            + ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
            + ")"
        )

    def with_pipeline(self, of_axes: Iterable[Item], of_pipeline: Item) -> tuple[Item, ...]:
        """A value for each axis of ``world``, from those of the mesh axes and of the pipeline."""
        items = list(of_axes)
        return (*items[: self.pipeline_place], of_pipeline, *items[self.pipeline_place :])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def group(self, axis: int | str) -> dist.ProcessGroup:
        """The ranks that differ from this one along ``axis`` only: the number of an axis, or a name
        as :meth:`ranks` takes.

        The first call for a mode of several axes makes a group, so all ranks must make that call.
        """
        if isinstance(axis, int):
            return self.axes_group((axis,))
        return (
            self.pipeline_group()
            if axis == PIPELINE and self.pipeline > 1
            else self.axes_group(self._axes_of(axis))
        )

    def ranks(self, name: str) -> list[int]:
        """The ranks of the world in this rank's group, in the group's order, along the axis
        ``name`` ("data", "row", "pipeline") or along all axes of a mode of tensor parallelism
        ("2d").

        Raises :class:`RunError` for a name that the mesh does not have.
        """
        return dist.get_process_group_ranks(self.group(name))

    def local_rank(self, name: str) -> int:
        """This rank's place in the group that :meth:`ranks` lists."""
        return (
            self.pipeline_rank
            if name == PIPELINE and self.pipeline > 1
            else self.index(self._axes_of(name))
        )

    def group_size(self, name: str) -> int:
        """The number of ranks in the group that :meth:`ranks` lists."""
        return (
            self.pipeline
            if name == PIPELINE and self.pipeline > 1
            else self.count(self._axes_of(name))
        )

    def _axes_of(self, name: str) -> tuple[int, ...]:
        names = self._modes.get(name, (name,))
        if not set(names) <= set(self.names):
            known = [*self.names, *self._modes, *[PIPELINE] * (self.pipeline > 1)]
            raise RunError(f"this mesh has no axis or mode {name!r}: it has {', '.join(known)}")
        return tuple(self.names.index(n) for n in names)

    def axes_group(self, axes: Iterable[int]) -> dist.ProcessGroup:
        """The ranks that differ from this one along ``axes`` only, in the order of :meth:`index`.

        The first call for several axes makes a group, so all ranks must make that call.
        """
        key = tuple(axes)
        if key not in self._groups:
            self._groups[key] = self._make_group(tuple(sorted(key)))
        return self._groups[key]

    def _make_group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        wide = tuple(axis for axis in axes if self.sizes[axis] > 1) or axes[:1]
        if not wide:
            raise RunError("a group needs at least one mesh axis")
        return self._world_group([self.names[axis] for axis in wide])

    def _world_group(self, names: Iterable[str]) -> dist.ProcessGroup:
        """The ranks that differ from this one along the axes ``names`` of the world only."""
        axes = tuple((self.world.mesh_dim_names or ()).index(name) for name in names)
        if len(axes) == 1:
            return self.world.get_group(axes[0])
        group = groups().own_of(lines_of(self.world.mesh, axes))
        assert group is not None
        return group

    @property
    def program_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the program; None where there is only one rank."""
        return groups().everyone() if self.size * self.pipeline > 1 else None

    def pipeline_group(self, axes: Iterable[int] = ()) -> dist.ProcessGroup:
        """The ranks that differ from this one along the pipeline and ``axes`` only. All ranks must
        make the same call.
        """
        wide = {self.names[axis] for axis in axes if self.sizes[axis] > 1}
        names = self.world.mesh_dim_names or ()
        return self._world_group([n for n in names if n in wide or n == PIPELINE])

    def rank_of_stage(self, stage: int) -> int:
        """The rank of the world that runs ``stage`` at this rank's place in the mesh; stages count
        on after the last, and before the first.
        """
        ranks: list[int] = self.world[PIPELINE].mesh.tolist()
        return ranks[stage % self.pipeline]

    def stage_replicas_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks at this rank's place in the meshes of the pipeline's ``ranks``; None if this
        rank's own mesh is not among them. They hold the same parts of a parameter that stages
        share. All ranks of the world must make the same call.
        """
        if len(ranks) == self.pipeline:
            return self.pipeline_group()
        of_stages = self.world.mesh.movedim(self.pipeline_place, 0).reshape(self.pipeline, -1)
        return groups().own_of(of_stages[list(ranks)].T.tolist())

    def index(self, axes: Iterable[int]) -> int:
        """This rank's place in ``axes_group(axes)``. It is the number of the chunk that the rank
        holds of a dim that ``axes`` cut; the earlier axis is major.
        """
        place = 0
        for axis in sorted(axes):
            place = place * self.sizes[axis] + self.coordinate[axis]
        return place

    def count(self, axes: Iterable[int]) -> int:
        """The number of ranks in ``axes_group(axes)``."""
        return math.prod(self.sizes[axis] for axis in axes)


def _sets_of_several(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of two or more of ``axes``."""
    return [found for count in range(2, len(axes) + 1) for found in combinations(axes, count)]


def _check_names(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    if len(sizes) != len(names):
        raise RunError(
            f"a mesh of sizes {sizes} needs {len(sizes)} axis names, not {len(names)}: {names}"
        )


def _local_device(device_type: str) -> torch.device:
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)
