"""What a user may fix, checked: each option is free unless given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any

from autopar.cost_model.memory import optimizer_name
from autopar.errors import PlanError
from autopar.ir.plan_data import SCHEDULES
from autopar.ir.plan_json import LARGEST
from autopar.ir.precision import COMPUTE_DTYPES, REDUCE_DTYPES, reduction_dtype
from autopar.search.space.modes import Mode, grid, make_mode, modes
from autopar.search.space.recompute_policy import MODES as MODES_OF_RECOMPUTING

# ranks of a stage from which on its mesh is searched with axes that split samples, and axes that
# split anything else
LARGE = 16

MOST_RANKS = 2**20


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size and what it may do: anything ("free"), split the batch ("data"), or
    what the ``mode`` says ("tensor").

    ``is_required``: that it shall do so wherever it can.
    """

    name: str
    size: int
    use: str = "free"
    is_required: bool = True
    mode: Mode | None = None


@dataclass(frozen=True)
class Pipeline:
    """What is asked of the pipeline; ``size`` ranks with ``chunks`` stages each, cut before the
    modules ``split_before``.
    """

    size: int = 1
    chunks: int | None = None
    split_before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The options of :func:`autopar.plan`, as given.

    Attributes:
        parallel: sizes by kind: ``dict(data=2, pipeline=2, tensor=dict(size=4, mode="2d"))``; the
            data size is inferred where it is left out, the others are then 1. The modes are "1d",
            "2d", "2.5d" (``depth``: how many squares of ranks), "3d", "sequence" (``ring``: how
            many of its ranks form rings, the others cut attention's heads) and those of
            :func:`autopar.register_mode`; depth and ring are free unless given. Where neither
            ``parallel`` nor ``mesh`` is given all of this is free: the modes, too.
            ``pipeline=dict(size=2, chunks=2, split_before=["model.layers.8", ...])`` gives each
            rank two stages, and cuts by hand.
        mesh: axis sizes inside a pipeline stage, slowest links first, each axis's use left free.
        memory_budget: bytes per device; the cluster's device memory unless given.
        micro_batch_size: samples per microbatch and data-parallel replica.
        schedule: "gpipe", "1f1b", "interleaved-1f1b" (several chunks a rank) or "zero-bubble", of a
            pipeline.
        recompute: "none" keeps all that the backward needs, "full" only what leaves each repeated
            block, "auto" what is worth its memory.
        zero: 0 keeps parameters whole, 1 or 2 shards storage, gradients and optimizer state over
            data-parallel ranks, 3 also gathers parameters where they are used, and again in the
            backward where they are not kept.
        precision: the dtype that the graph computes in: "bf16", "fp16", "fp32", or "tf32" (float32
            whose matrix products may round their operands on tensor cores). Parameters, optimizer
            state and checkpoints keep the model's dtype; the loss is computed in float32. None
            computes in the model's dtypes.
        reduce_dtype: in what gradients of parameters are summed over ranks: "fp32" (what None means
            under "bf16" and "fp16"), "bf16" or "fp16"; None otherwise sums them as they were
            computed.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum", as torch has them by default, or
            "fused-adamw" and so on for ``fused=True``: for its memory and its time.
            ``torch.optim.AdamW``, ``Adam`` and ``SGD`` themselves mean their names.
        constraints: layouts by pattern of a parameter's name or a module's path:
            ``{"*.mlp.up_proj.weight": "I S0"}``.
        time_limit: seconds for one solve.
        profile_missing: measure on this machine the kernels of which the cluster has no curve; what
            was measured is remembered.
    """

    world_size: int
    parallel: Mapping[str, Any] | None = None
    mesh: Sequence[int] | None = None
    memory_budget: float | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: str = "auto"
    zero: int | None = None
    precision: str | None = None
    reduce_dtype: str | None = None
    optimizer: str = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    time_limit: float = 60.0
    profile_missing: bool = False

    def __post_init__(self) -> None:
        _whole("world_size", self.world_size, "the number of ranks")
        if self.world_size > MOST_RANKS:
            raise PlanError(
                f"world_size={self.world_size}: plans are made for up to {MOST_RANKS:,} ranks"
            )
        for name, known in (("precision", COMPUTE_DTYPES), ("reduce_dtype", REDUCE_DTYPES)):
            if (value := getattr(self, name)) is not None and not (
                isinstance(value, str) and value in known
            ):
                raise PlanError(
                    f"{name}={value!r}: give one of {', '.join(known)}, or leave it out"
                )
        if not isinstance(self.recompute, str) or self.recompute not in MODES_OF_RECOMPUTING:
            raise PlanError(
                f"recompute={self.recompute!r}: give one of {', '.join(MODES_OF_RECOMPUTING)}"
            )
        if self.schedule is not None and not (
            isinstance(self.schedule, str) and self.schedule in SCHEDULES
        ):
            raise PlanError(f"schedule={self.schedule!r}: give one of {', '.join(SCHEDULES)}")
        if not isinstance(self.profile_missing, bool):
            raise PlanError(f"profile_missing={self.profile_missing!r}: give True or False")
        if self.zero is not None and not (
            isinstance(self.zero, Integral)
            and not isinstance(self.zero, bool)
            and 0 <= self.zero <= 3
        ):
            raise PlanError(f"zero={self.zero!r}: give 0, 1, 2 or 3")
        _positive(
            "memory_budget",
            1 if self.memory_budget is None else self.memory_budget,
            "bytes per device",
        )
        _positive("time_limit", self.time_limit, "seconds for one solve")
        _whole(
            "micro_batch_size",
            1 if self.micro_batch_size is None else self.micro_batch_size,
            "samples in a microbatch of one replica",
        )
        if not isinstance(self.mesh, (Sequence, NoneType)) or isinstance(self.mesh, str):
            raise PlanError(
                f"mesh={self.mesh!r}: give the axis sizes, slowest links first, for example "
                f"mesh=({self.world_size},)"
            )
        for size in self.mesh or ():
            _whole("mesh", size, "the ranks along an axis")
        for name, example in (
            ("parallel", "dict(data=2)"),
            ("constraints", '{"*.mlp.up_proj.weight": "I S0"}'),
        ):
            if not isinstance(getattr(self, name), (Mapping, NoneType)):
                raise PlanError(
                    f"{name}={getattr(self, name)!r}: give a dict, for example {name}={example}"
                )
        if self.parallel is not None and self.mesh is not None:
            raise PlanError("parallel= and mesh= both fix the mesh: give one of them")
        for pattern, layout in (self.constraints or {}).items():
            if not isinstance(pattern, str) or not isinstance(layout, str):
                raise PlanError(
                    f"constraints={{{pattern!r}: {layout!r}}}: a pattern of names and a layout, "
                    "both as text, "
                    'for example {"*.mlp.up_proj.weight": "I S0"}'
                )
        self._normalise()

    def _normalise(self) -> None:
        """Other ways to write the same: a torch optimizer's class, numpy's numbers."""
        same: dict[str, Any] = {
            "constraints": dict(self.constraints or {}),
            "optimizer": optimizer_name(self.optimizer),
        }
        same |= {
            name: int(n)
            for name in ("world_size", "micro_batch_size", "zero")
            if (n := getattr(self, name)) is not None
        }
        same |= {
            name: float(n)
            for name in ("memory_budget", "time_limit")
            if (n := getattr(self, name)) is not None
        }
        if self.mesh is not None:
            same["mesh"] = tuple(map(int, self.mesh))
        for name, value in same.items():
            object.__setattr__(self, name, value)

    @property
    def reduction_dtype(self) -> str | None:
        """The name of the dtype in which gradients are summed over ranks; None for that in which
        they are made.
        """
        return reduction_dtype(self.precision, self.reduce_dtype)

    @property
    def pipeline(self) -> Pipeline | None:
        """What is asked of the pipeline; None where it is free."""
        if self.parallel is not None:
            return _pipeline(self.parallel.get("pipeline", 1), self.world_size)
        if self.mesh is None:
            return None
        ranks = math.prod(self.mesh)
        if self.world_size % ranks:
            raise PlanError(
                f"mesh={tuple(self.mesh)} has {ranks} ranks, which do not divide world_size "
                f"{self.world_size}"
            )
        return Pipeline(self.world_size // ranks)

    def is_unrequested_mode(self, mode: Mode | None) -> bool:
        """Whether a mesh is one that nobody asked for: of a mode, where ``parallel`` names none."""
        return mode is not None and self.parallel is None

    def data_parallel_sizes(self, pipeline: int) -> list[int]:
        """In how many ways the options let the ranks of a stage split the batch, the finest
        first.
        """
        if self.parallel is not None:
            return [math.prod(a.size for a in self.meshes(pipeline)[0] if a.use == "data")]
        ranks = self.world_size // pipeline
        return [d for d in range(ranks, 0, -1) if ranks % d == 0]

    def meshes(self, pipeline: int) -> list[tuple[Axis, ...]]:
        """The meshes of a stage that the options leave, slowest axis first."""
        if self.mesh is not None:
            return [tuple(Axis(f"axis{i}", n) for i, n in enumerate(self.mesh))]
        if self.parallel is not None:
            return _asked_for(dict(self.parallel), self.world_size, pipeline)
        n = self.world_size // pipeline
        pairs = [(d, n // d) for d in range(2, n) if n % d == 0]
        if n < LARGE and pipeline == 1:
            return [
                tuple(Axis(f"axis{i}", size) for i, size in enumerate(sizes))
                for sizes in [(n,), *pairs]
            ]
        return [_typed(d, n // d) for d in range(1, n + 1) if n % d == 0]


def _typed(data: int, tensor: int) -> tuple[Axis, ...]:
    """Axes of which one splits samples and one anything else, without being asked to."""
    split = [Axis("data", data, "data")] if data > 1 or tensor == 1 else []
    return (
        *split,
        *(
            [Axis("tensor", tensor, "tensor", False, make_mode("1d", tensor, {}))]
            if tensor > 1
            else []
        ),
    )


def _asked_for(parallel: dict[str, Any], world_size: int, pipeline: int) -> list[tuple[Axis, ...]]:
    unknown = set(parallel) - {"data", "tensor", "pipeline"}
    if unknown:
        raise PlanError(
            f"parallel has {sorted(map(str, unknown))}: it takes data, tensor and pipeline"
        )
    ranks = world_size // pipeline
    of = f" / pipeline {pipeline}" if pipeline > 1 else ""
    mode = _tensor(parallel["tensor"], world_size) if "tensor" in parallel else None
    tensor = mode.size if mode is not None else 1
    data = _size(parallel["data"], "data") if "data" in parallel else None
    if data is None:
        data, rest = divmod(ranks, tensor)
        if rest:
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
    if mode is None:
        return [_typed(data, 1)]
    return [mode_mesh(each, data, pipeline) for each in mode.alternatives()]


def mode_mesh(mode: Mode, data: int, pipeline: int) -> tuple[Axis, ...]:
    """The mesh that a mode's groups and the data-parallel ones form, the axis with the longest
    strides first.

    Raises:
        PlanError: they are no grid.
    """
    world, stage = data * mode.size * pipeline, data * mode.size
    first = mode.groups(0, world, data, pipeline, mode.size)
    strides = {
        name: (ranks[1] - ranks[0] if len(ranks) > 1 else 0, len(ranks))
        for name, ranks in first.items()
    }
    if math.prod(n for _, n in strides.values()) != mode.size:
        found = ", ".join(f"{name} of {n}" for name, (_, n) in strides.items())
        raise PlanError(
            f"mode {mode.name!r}: the groups of rank 0 ({found}) are no grid of {mode.size} ranks"
        )
    # Data-parallel ranks take the place that is left.
    order = sorted(first, key=lambda name: -strides[name][0])
    places = (
        [[*order[:i], "data", *order[i:]] for i in range(len(order) + 1)] if data > 1 else [order]
    )
    sizes = {name: n for name, (_, n) in strides.items()} | {"data": data}
    for names in places:
        expected = [
            grid(rank % stage, {name: sizes[name] for name in names}) for rank in range(stage)
        ]
        if all(
            mode.groups(rank, world, data, pipeline, mode.size)[name]
            == [rank // stage * stage + r for r in expected[rank % stage][name]]
            for rank in range(world)
            for name in order
        ):
            axes = [
                Axis("data", data, "data")
                if n == "data"
                else Axis(n, sizes[n], "tensor", True, mode)
                for n in names
            ]
            return tuple(axis for axis in axes if axis.size > 1) or (Axis("data", 1, "data"),)
    raise PlanError(
        f"mode {mode.name!r}: its groups are no grid of a stage's {stage} ranks, in which those "
        "along an axis lie equally far apart in all "
        f"groups, as autopar.Mode.groups makes them; those of rank 0 are {first}"
    )


def _pipeline(value: Any, world_size: int) -> Pipeline:
    if isinstance(value, Mapping) and (unknown := set(value) - {"size", "chunks", "split_before"}):
        raise PlanError(
            f"parallel['pipeline'] has {sorted(map(str, unknown))}: it takes size, chunks and "
            "split_before"
        )
    given = dict(value) if isinstance(value, Mapping) else {"size": value}
    size = _size(value, "pipeline")
    if world_size % size:
        raise PlanError(
            f"parallel asks for {size} pipeline ranks, which do not divide world_size {world_size}"
        )
    chunks = given.get("chunks")
    if chunks is not None:
        _whole("parallel['pipeline']['chunks']", chunks, "stages on each pipeline rank")
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
    return Pipeline(size, chunks or (1 if cuts else None), tuple(cuts))


def _whole(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: {what}, a whole number of at least 1")


def _positive(name: str, value: Any, what: str) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value > 0 or LARGEST**2 < value < math.inf:
        raise PlanError(f"{name}={value!r}: {what}, a number above 0")


def _size(value: Any, name: str) -> int:
    size = value.get("size") if isinstance(value, Mapping) else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"parallel[{name!r}]={value!r}: give a size of at least 1, for example {name}=2"
        )
    return size


def _tensor(value: Any, world_size: int) -> Mode:
    if isinstance(value, int) and value == 1:
        return make_mode("1d", 1, {})
    if not isinstance(value, Mapping) or "mode" not in value:
        size = (
            value
            if isinstance(value, int)
            else value.get("size", 4)
            if isinstance(value, Mapping)
            else 4
        )
        raise PlanError(
            f'parallel["tensor"]={value!r} names no mode: write tensor=dict(size={size}, '
            f'mode="1d"), or another of {modes()}'
        )
    if (size := _size(value, "tensor")) > world_size:
        raise PlanError(
            f'parallel["tensor"]={value!r:.100}: {size:.6g} ranks are more than the world_size of '
            f"{world_size}"
        )
    return make_mode(
        value["mode"], size, {k: v for k, v in value.items() if k not in ("size", "mode")}
    )
