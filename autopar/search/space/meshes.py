"""The meshes of a pipeline stage that ``parallel`` asks for, as axes with a use each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.ir.hash_once import HashOnce
from autopar.search.space.modes.mode import Groups, Mode, grid
from autopar.search.space.modes.registry import make_mode, mode_names

# The number of ranks of a stage from which on the search tries only meshes whose axes have a use:
# one axis for samples, or two, and one for anything else.
MANY_RANKS = 16


@dataclass(frozen=True)
class Axis(HashOnce):
    """One mesh axis.

    Attributes:
        name: unique in its mesh.
        size: the number of ranks along the axis.
        use: what the axis may split: anything ("free"), the batch ("data"), or the factors that
            the ``mode`` allows ("tensor").
        is_required: whether the axis must split every operator that can be split along it.
        mode: the mode that the axis belongs to; None for an axis without a mode.
    """

    name: str
    size: int
    use: str = "free"
    is_required: bool = True
    mode: Mode | None = None
    __hash__ = HashOnce.__hash__


def data_and_tensor_mesh(data: int, tensor: int) -> tuple[Axis, ...]:
    """An axis that splits samples and an axis that splits anything else, which is not required
    to. An axis of size 1 is left out; the mesh has at least one axis.
    """
    axes = [Axis("data", data, "data")] if data > 1 or tensor == 1 else []
    if tensor > 1:
        axes.append(Axis("tensor", tensor, "tensor", False, make_mode("1d", tensor, {})))
    return tuple(axes)


def all_meshes(ranks: int, is_alone: bool) -> list[tuple[Axis, ...]]:
    """The meshes of a stage of which nothing is asked for; ``is_alone``: of the only stage, whose
    axes nobody orders by name.
    """
    sizes = [d for d in range(1, ranks + 1) if ranks % d == 0]
    if ranks < MANY_RANKS and is_alone:
        return [free_mesh(each) for each in [(ranks,), *((d, ranks // d) for d in sizes[1:-1])]]
    found = [data_and_tensor_mesh(d, ranks // d) for d in sizes]
    if is_alone:
        found += [mesh for d in sizes for mesh in hybrid_meshes(d, ranks // d)]
    return found


def hybrid_meshes(data: int, tensor: int) -> list[tuple[Axis, ...]]:
    """The meshes of :func:`data_and_tensor_mesh` with two axes that split samples, so that the
    state may be sharded along the second of them alone (hybrid sharding).
    """
    _, *rest = data_and_tensor_mesh(2, tensor)
    return [
        (Axis("data1", data // n, "data"), Axis("data2", n, "data"), *rest)
        for n in range(2, data)
        if data % n == 0
    ]


def free_mesh(sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Axes that may split anything."""
    return tuple(Axis(f"axis{i}", size) for i, size in enumerate(sizes))


def parallel_meshes(
    parallel: Mapping[str, Any], world_size: int, pipeline: int
) -> list[tuple[Axis, ...]]:
    """The meshes of a stage that the option ``parallel`` leaves: one for each alternative of its
    mode.

    Raises:
        PlanError: ``parallel`` has other keys than data, tensor and pipeline, or sizes that do
            not multiply to ``world_size``.
    """
    unknown = set(parallel) - {"data", "tensor", "pipeline"}
    if unknown:
        raise PlanError(
            f"parallel has {sorted(map(str, unknown))}: it takes data, tensor and pipeline"
        )
    mode = _tensor_mode(parallel["tensor"], world_size) if "tensor" in parallel else None
    data = _data_size(parallel, mode.size if mode is not None else 1, world_size, pipeline)
    if mode is None:
        return [data_and_tensor_mesh(data, 1)]
    return [mode_mesh(each, data, pipeline) for each in mode.alternatives()]


def _data_size(parallel: Mapping[str, Any], tensor: int, world_size: int, pipeline: int) -> int:
    """The data-parallel size that was given, or the size that the other sizes leave."""
    ranks = world_size // pipeline
    data = parallel_size(parallel["data"], "data") if "data" in parallel else None
    if data is None:
        data, rest = divmod(ranks, tensor)
        if rest:
            of = f" / pipeline {pipeline}" if pipeline > 1 else ""
            raise PlanError(
                f"parallel={parallel}: tensor size {tensor} does not divide world_size "
                f"{world_size}{of}"
            )
    if data * tensor != ranks:
        fix = (
            f"data={ranks // tensor}"
            if ranks % tensor == 0
            else f"a world_size of {data * tensor * pipeline}"
        )
        sizes = {"data": data, "tensor": tensor, "pipeline": pipeline}
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data 1"
        raise PlanError(
            f"parallel={parallel}: {shown} = {data * tensor * pipeline} ranks, world_size is "
            f"{world_size}; use {fix}"
        )
    return data


def parallel_size(value: Any, name: str) -> int:
    """The size that ``parallel[name]`` gives, as a number or as ``dict(size=...)``.

    Raises:
        PlanError: the size is no whole number of at least 1.
    """
    size = value.get("size") if isinstance(value, Mapping) else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"parallel[{name!r}]={value!r}: give a size of at least 1, for example {name}=2"
        )
    return size


def _tensor_mode(value: Any, world_size: int) -> Mode:
    """The mode that ``parallel["tensor"]`` asks for."""
    if isinstance(value, int) and value == 1:
        return make_mode("1d", 1, {})
    if not isinstance(value, Mapping) or "mode" not in value:
        size = value if isinstance(value, int) else 4
        if isinstance(value, Mapping):
            size = value.get("size", 4)
        raise PlanError(
            f'parallel["tensor"]={value!r} names no mode: write tensor=dict(size={size}, '
            f'mode="1d"), or another of {mode_names()}'
        )
    if (size := parallel_size(value, "tensor")) > world_size:
        raise PlanError(
            f'parallel["tensor"]={value!r:.100}: {size:.6g} ranks are more than the world_size of '
            f"{world_size}"
        )
    return make_mode(
        value["mode"], size, {k: v for k, v in value.items() if k not in ("size", "mode")}
    )


def mode_mesh(mode: Mode, data: int, pipeline: int) -> tuple[Axis, ...]:
    """The mesh of one stage that the groups of a mode and the data-parallel groups form. The axis
    with the longest strides comes first.

    Args:
        data: the number of data-parallel replicas.
        pipeline: the number of pipeline ranks.

    Raises:
        PlanError: the groups of the mode form no grid.
    """
    stage = data * mode.size

    def groups_of(rank: int) -> Groups:
        return mode.groups(rank, stage * pipeline, data, pipeline, mode.size)

    first = groups_of(0)
    sizes = {name: len(ranks) for name, ranks in first.items()}
    if math.prod(sizes.values()) != mode.size:
        found = ", ".join(f"{name} of {n}" for name, n in sizes.items())
        raise PlanError(
            f"mode {mode.name!r}: the groups of rank 0 ({found}) are no grid of {mode.size} ranks"
        )
    strides = {n: ranks[1] - ranks[0] if len(ranks) > 1 else 0 for n, ranks in first.items()}
    order = sorted(first, key=lambda name: -strides[name])
    sizes |= {"data": data}
    # The place of the data axis follows from the ranks that the groups of the mode leave out.
    for i in range(len(order) + 1 if data > 1 else 1):
        names = [*order[:i], "data", *order[i:]] if data > 1 else order
        expected = [grid(rank, {name: sizes[name] for name in names}) for rank in range(stage)]
        if all(
            _is_shifted(groups_of(rank), expected[rank % stage], rank // stage * stage, order)
            for rank in range(stage * pipeline)
        ):
            return _mode_axes(mode, names, sizes)
    raise PlanError(
        f"mode {mode.name!r}: its groups are no grid of a stage's {stage} ranks, in which those "
        "along an axis lie equally far apart in all groups, as autopar.Mode.groups makes them; "
        f"those of rank 0 are { {name: list(ranks) for name, ranks in first.items()} }"
    )


def _mode_axes(mode: Mode, names: Sequence[str], sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes of a mode and the data axis, in the order of ``names``, without axes of size 1. The
    mesh has at least one axis.
    """
    axes = [
        Axis("data", sizes[name], "data")
        if name == "data"
        else Axis(name, sizes[name], "tensor", True, mode)
        for name in names
        if sizes[name] > 1
    ]
    return tuple(axes) or (Axis("data", 1, "data"),)


def _is_shifted(groups: Groups, expected: Groups, first: int, names: Sequence[str]) -> bool:
    """Whether the groups along the axes ``names`` are the expected groups, counted from the rank
    ``first``.
    """
    return all(_equal(groups[name], expected[name], first) for name in names)


def _equal(ranks: Sequence[int], expected: Sequence[int], first: int) -> bool:
    """Whether ranks are the expected ones, counted from ``first``."""
    if isinstance(ranks, range) and isinstance(expected, range):  # of thousands of ranks, perhaps
        own = range(ranks.start - first, ranks.stop - first, ranks.step)
        return own == expected
    return list(ranks) == [first + rank for rank in expected]
