"""What a user may fix, checked: each option is free unless given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any

from autopar.errors import PlanError

MODES = ("1d",)
LATER = {
    "schedule": "pipeline schedules",
    "precision": "mixed precision (convert the model itself: model.to(torch.bfloat16))",
}


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size and what it may do: anything ("free"), split the batch ("data") or anything else ("1d")."""

    name: str
    size: int
    use: str = "free"


@dataclass(frozen=True)
class Options:
    """The options of :func:`autopar.plan`, as given.

    Attributes:
        parallel: sizes by kind: ``dict(data=2, tensor=dict(size=4, mode="1d"))``; one left out is inferred.
        mesh: axis sizes, slowest links first, each axis's use left free.
        memory_budget: bytes per device; the cluster's device memory unless given.
        micro_batch_size: samples per microbatch and data-parallel replica; the fewest microbatches that fit unless given.
        zero: 0 keeps parameters whole, 1 or 2 shards storage, gradients and optimizer state over data-parallel ranks.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum", for its memory.
        constraints: layouts by pattern of a parameter's name or a module's path: ``{"*.mlp.up_proj.weight": "I S0"}``.
        time_limit: seconds for one solve.
    """

    world_size: int
    parallel: Mapping[str, Any] | None = None
    mesh: Sequence[int] | None = None
    memory_budget: float | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: str = "none"
    zero: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _whole("world_size", self.world_size, "the number of ranks")
        for name, what in LATER.items():
            if getattr(self, name) is not None:
                raise PlanError(f"{name}={getattr(self, name)!r}: {what} cannot be planned yet; leave {name} out")
        if self.recompute not in ("none", "auto"):
            raise PlanError(f"recompute={self.recompute!r}: recomputation cannot be planned yet; leave recompute out")
        if self.zero not in (None, 0, 1, 2):
            raise PlanError(f"zero={self.zero!r}: 0, 1 and 2 can be planned; gathering parameters again in the backward (3) cannot yet")
        _positive("memory_budget", 1 if self.memory_budget is None else self.memory_budget, "bytes per device")
        _positive("time_limit", self.time_limit, "seconds for one solve")
        _whole("micro_batch_size", 1 if self.micro_batch_size is None else self.micro_batch_size, "samples in a microbatch of one replica")
        if not isinstance(self.mesh, (Sequence, NoneType)) or isinstance(self.mesh, str):
            raise PlanError(f"mesh={self.mesh!r}: give the axis sizes, slowest links first, for example mesh=({self.world_size},)")
        for size in self.mesh or ():
            _whole("mesh", size, "the ranks along an axis")
        for name, example in (("parallel", "dict(data=2)"), ("constraints", '{"*.mlp.up_proj.weight": "I S0"}')):
            if not isinstance(getattr(self, name), (Mapping, NoneType)):
                raise PlanError(f"{name}={getattr(self, name)!r}: give a dict, for example {name}={example}")
        if self.parallel is not None and self.mesh is not None:
            raise PlanError("parallel= and mesh= both fix the mesh: give one of them")

    def data_degrees(self) -> list[int]:
        """In how many ways the options let ranks split the batch, the finest first."""
        if self.parallel is not None:
            return [math.prod(a.size for a in self.meshes()[0] if a.use == "data")]
        return [d for d in range(self.world_size, 0, -1) if self.world_size % d == 0]

    def meshes(self) -> list[tuple[Axis, ...]]:
        """The meshes that the options leave, slowest axis first."""
        if self.mesh is not None:
            if math.prod(self.mesh) != self.world_size:
                raise PlanError(f"mesh={tuple(self.mesh)} has {math.prod(self.mesh)} ranks, world_size is {self.world_size}")
            return [tuple(Axis(f"axis{i}", n) for i, n in enumerate(self.mesh))]
        if self.parallel is not None:
            return [_axes(dict(self.parallel), self.world_size)]
        n = self.world_size
        pairs = [(d, n // d) for d in range(2, n) if n % d == 0]
        return [tuple(Axis(f"axis{i}", size) for i, size in enumerate(sizes)) for sizes in [(n,), *pairs]]


def _axes(parallel: dict[str, Any], world_size: int) -> tuple[Axis, ...]:
    unknown = set(parallel) - {"data", "tensor", "pipeline"}
    if unknown:
        raise PlanError(f"parallel has {sorted(unknown)}: it takes data, tensor and pipeline")
    if (stages := _size(parallel.get("pipeline", 1), "pipeline")) != 1:
        raise PlanError(f"parallel asks for {stages} pipeline stages: pipelines cannot be planned yet; leave pipeline out")
    tensor = _tensor(parallel["tensor"]) if "tensor" in parallel else None
    data = _size(parallel["data"], "data") if "data" in parallel else None
    if data is None:
        data, rest = divmod(world_size, tensor or 1)
        if rest:
            raise PlanError(f"parallel={parallel}: tensor size {tensor} does not divide world_size {world_size}")
    if tensor is None:
        tensor = 1
    if data * tensor != world_size:
        fix = f"data={world_size // tensor}" if world_size % tensor == 0 else f"a world_size of {data * tensor}"
        raise PlanError(
            f"parallel={parallel}: data {data} x tensor {tensor} = {data * tensor} ranks, world_size is {world_size}; use {fix}"
        )
    axes = [Axis("data", data, "data")] * (data > 1) + [Axis("tensor", tensor, "1d")] * (tensor > 1)
    return tuple(axes) or (Axis("data", 1, "data"),)


def _whole(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: {what}, a whole number of at least 1")


def _positive(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
        raise PlanError(f"{name}={value!r}: {what}, a number above 0")


def _size(value: Any, name: str) -> int:
    size = value.get("size") if isinstance(value, Mapping) else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(f"parallel[{name!r}]={value!r}: give a size of at least 1, for example {name}=2")
    return size


def _tensor(value: Any) -> int:
    if isinstance(value, int) and value == 1:
        return 1
    if not isinstance(value, Mapping) or "mode" not in value:
        raise PlanError(
            f'parallel["tensor"]={value!r} names no mode: write tensor=dict(size={value if isinstance(value, int) else 4}, mode="1d")'
        )
    if value["mode"] not in MODES:
        raise PlanError(f"tensor mode {value['mode']!r} is not available: the modes are {', '.join(MODES)}")
    return _size(value, "tensor")
