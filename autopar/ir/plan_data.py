"""A plan as data: everything that was decided. The search hands nothing else to the passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.precision import COMPUTE_DTYPES, REDUCE_DTYPES

VERSION = 5
# on meshes of more axes, unless they are a mode's, the search is exact in neighbourhoods only
EXACT_AXES = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")

ConversionStep = tuple[int, str, str]  # one conversion along one axis: (axis, from, to)


@dataclass(frozen=True)
class NodePlan:
    """How one node runs: each operand's layout, the output's, and per axis the factor split and the
    kernel that takes.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...]
    kernels: tuple[str | None, ...]


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter or buffer is kept between steps, and as what the graph sees it."""

    stored: Layout
    used: Layout


@dataclass(frozen=True)
class StagePlan:
    """One part of the model: stage ``i`` of ``n`` runs on pipeline rank ``i % pipeline``.

    Attributes:
        start: the name of its first node; "" for the first stage.
        name: what people call it: "model.layers.0 to model.layers.7".
        seconds: predicted, of one microbatch: "forward", "backward" (which includes
            "recomputation", "conversions" both ways and, for the zero-bubble schedule, the weights'
            part "weight": half of the rest where it is not given), "send" (to the next stage, one
            way); of a step: "gradient synchronisation", "optimizer".
        nbytes: predicted, its part of what its device has where that is most, by kind.
        in_flight: microbatches whose activations it holds at most.
        kept: bytes that one microbatch keeps between its forward and its backward.
    """

    start: str
    name: str
    seconds: dict[str, float]
    nbytes: dict[str, float]
    in_flight: int = 1
    kept: float = 0.0


@dataclass(frozen=True)
class PlanData:
    """A distributed program for one model, sample input and cluster.

    Attributes:
        fingerprint: a hash of the captured graph; a plan compiles only the graph it was made for.
        mesh_sizes, mesh_names: the axes of one stage's mesh, slowest links first. Ranks count
            stages slowest: the first ``prod(mesh_sizes)`` ranks are pipeline rank 0.
        pipeline: ranks along the pipeline.
        schedule: how microbatches go through it: one of SCHEDULES.
        stages: the parts of the model, in its order: ``pipeline`` x chunks of them.
        recomputed: what is computed again in the backward instead of kept: names of nodes, and of
            conversions as "name -> layout".
        microbatches: parts that each data-parallel rank's share of the batch is run in, one after
            the other.
        data_degree: ways the batch is split over ranks.
        precision: the dtype that the graph computes in, by its name in ``autopar.ir.precision``;
            None for the model's own.
        reduce_dtype: that in which gradients of parameters are summed over ranks; None for the one
            in which they are made.
        nodes, parameters: by node name, and by the parameter's name in the model.
        conversions: for a tensor, by the layout wanted, the steps that convert it.
        seconds: the predicted step time by kind; their sum is :attr:`step_time`.
        gap: proven distance to the best plan of this search space, relative to the step time (0 is
            optimal); on a mesh of more than two free axes, to the best of the neighbourhood that
            was searched last.
        rows: what the report shows of each block and its collectives.
        notes: what a user should know: operators without a rule, statistics per microbatch, …
        timings: seconds that planning took, by phase.
        options: how it was asked for: the world size, the cluster and every option that was given,
            as JSON has them.
        modes: the names of the axes of each mode of tensor parallelism that was asked for or
            chosen.
    """

    fingerprint: str
    world_size: int
    cluster: str
    mesh_sizes: tuple[int, ...]
    mesh_names: tuple[str, ...]
    microbatches: int
    data_degree: int
    nodes: dict[str, NodePlan]
    parameters: dict[str, ParameterPlan]
    conversions: dict[str, dict[str, tuple[ConversionStep, ...]]]
    seconds: dict[str, float]
    stages: tuple[StagePlan, ...]
    gap: float
    pipeline: int = 1
    schedule: str = "1f1b"
    recomputed: tuple[str, ...] = ()
    precision: str | None = None
    reduce_dtype: str | None = None
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    modes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """PlanError where the parts do not fit together. That each is of its kind, a file's reader
        and ``compile`` look after.
        """
        try:
            found = next(self._misfits(), None)
        except (AttributeError, TypeError, KeyError) as e:
            raise PlanError(f"a part of the plan is not what a plan has there: {e!r}") from e
        if found is not None:
            raise PlanError(found)

    def _misfits(self) -> Iterator[str]:
        axes = len(self.mesh_sizes)
        if (
            self.pipeline * math.prod(self.mesh_sizes) != self.world_size
            or len(self.mesh_names) != axes
            or self.world_size < 1
        ):
            mesh = (
                f"a pipeline of {self.pipeline} with a mesh of sizes {self.mesh_sizes} named "
                f"{self.mesh_names}"
            )
            yield f"{mesh} is none of {self.world_size} ranks"
        if min(self.pipeline, *self.mesh_sizes, self.microbatches, self.data_degree) < 1:
            yield (
                f"a size below 1: pipeline {self.pipeline}, mesh {self.mesh_sizes}, "
                f"{self.microbatches} microbatches"
            )
        if (
            len(set(self.mesh_names)) != axes
            or "" in self.mesh_names
            or (self.pipeline > 1 and "pipeline" in self.mesh_names)
        ):
            yield f"mesh_names {self.mesh_names}: each axis needs a name of its own"
        if not self.stages or len(self.stages) % self.pipeline:
            yield (
                f"{len(self.stages)} stages are no multiple of the pipeline's {self.pipeline} ranks"
            )
        if self.schedule not in SCHEDULES:
            yield f"schedule {self.schedule!r} is none of {', '.join(SCHEDULES)}"
        for what, value, known in (
            ("precision", self.precision, COMPUTE_DTYPES),
            ("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES),
        ):
            if value is not None and value not in known:
                yield f"{what} {value!r} is none of {', '.join(known)}"
        for name, node in self.nodes.items():
            if any(
                len(layout) != axes for layout in (*node.ins, node.out, node.factors, node.kernels)
            ):
                yield f"node {name!r} has not one type for each of the {axes} mesh axes"
        for name, parameter in self.parameters.items():
            if len(parameter.stored) != axes or len(parameter.used) != axes:
                yield f"parameter {name!r} has not one type for each of the {axes} mesh axes"

    @property
    def step_time(self) -> float:
        """Predicted seconds of one training step."""
        return sum(self.seconds.values())

    @property
    def chunks(self) -> int:
        """Stages on each pipeline rank."""
        return len(self.stages) // self.pipeline

    @property
    def memory(self) -> tuple[dict[str, float], ...]:
        """Predicted peak bytes of a device by kind, for each pipeline rank."""
        devices: list[dict[str, float]] = [{} for _ in range(self.pipeline)]
        for i, stage in enumerate(self.stages):
            device = devices[i % self.pipeline]
            for kind, nbytes in stage.nbytes.items():
                device[kind] = device.get(kind, 0.0) + nbytes
        return tuple(devices)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Predicted bytes of a device, for each pipeline rank."""
        return tuple(sum(device.values()) for device in self.memory)

    @property
    def nbytes(self) -> dict[str, float]:
        """Predicted peak bytes by kind of the device that takes most."""
        return max(self.memory, key=lambda device: sum(device.values()))

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes by name, slowest links first."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))
