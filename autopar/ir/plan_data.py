"""A plan as data: everything that was decided. The passes get nothing else from the search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.precision import COMPUTE_DTYPES, REDUCE_DTYPES
from autopar.ir.schedules import unknown_schedule

VERSION = 7
PIPELINE = "pipeline"  # the name of the pipeline beside the names of mesh axes
# With more free axes, which those of a mode are not, the search is exact only in neighbourhoods.
EXACT_AXES = 2
BACKENDS = ("eager", "inductor")
HOST_COPIES = "host copies"  # the kind of seconds of copies to the memory of the host and back

ConversionStep = tuple[int, str, str]  # a conversion along one axis: (axis, type before, after)


@dataclass(frozen=True)
class NodePlan:
    """How one node runs.

    Attributes:
        ins: the layout of each operand.
        out: the layout of the result.
        factors: for each mesh axis, the factor of the rule that is split; None if none is.
        kernels: for each mesh axis, the kernel that replaces the operator; None if none does.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...]
    kernels: tuple[str | None, ...]


@dataclass(frozen=True)
class ParameterPlan:
    """The layout of a parameter or buffer between steps (stored), and in the graph (used);
    ``offloaded`` says whether the state that the optimizer has of it is in the memory of the host
    between steps.
    """

    stored: Layout
    used: Layout
    offloaded: bool = False


@dataclass(frozen=True)
class StagePlan:
    """One part of the model: stage ``i`` of ``n`` runs on pipeline rank ``i % pipeline``.

    Attributes:
        start: the name of the stage's first node; "" for the first stage.
        name: the stage in the report: "model.layers.0 to model.layers.7".
        seconds: predicted seconds by kind. For one microbatch: "forward"; "backward", which
            includes "recomputation", "conversions" in both directions and, for the zero-bubble
            schedule, "weight", the gradients of weights (by default half of the rest); "send", to
            the next stage. For a step: "gradient synchronisation", "optimizer".
        nbytes: predicted bytes of the stage by kind, at the time when its device has most.
        in_flight: the largest number of microbatches whose activations the stage holds.
        kept: bytes that one microbatch saves between its forward and its backward.
        host: predicted bytes of a rank in the memory of the host, by kind; not in ``nbytes``.
    """

    start: str
    name: str
    seconds: dict[str, float]
    nbytes: dict[str, float]
    in_flight: int = 1
    kept: float = 0.0
    host: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanData:
    """A distributed program for one model, sample input and cluster.

    Attributes:
        fingerprint: a hash of the captured graph, the only graph that the plan compiles.
        mesh_sizes, mesh_names: the axes of one stage's mesh, slowest links first.
        pipeline: the number of ranks along the pipeline.
        pipeline_place: the number of mesh axes that cross slower links than the pipeline. Ranks are
            numbered row-major in the order of :attr:`placement`. At place 0 the first
            ``prod(mesh_sizes)`` ranks are pipeline rank 0.
        device_kinds: the cluster of each pipeline rank where devices are of several kinds.
        pipeline_order: where the kinds follow each other in another order than the ranks, for each
            pipeline rank the number of its block of ``prod(mesh_sizes)`` ranks; else empty.
        schedule: the name of the order of microbatches in the pipeline, built in or registered.
        schedule_order: for a registered schedule a digest of its order; else "".
        stages: the parts of the model, in its order: ``pipeline`` x chunks of them.
        recomputed: what the backward computes again instead of saving it: names of nodes, and of
            conversions as "name -> layout".
        offloaded: the names of the nodes whose results the host keeps until the backward.
        microbatches: the number of microbatches of a step.
        data_degree: the number of chunks into which ranks split the batch.
        precision: the dtype that the graph computes in, by its name in ``autopar.ir.precision``;
            None for the model's dtypes.
        reduce_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype of
            the gradients.
        nodes: by the node's name in the graph.
        parameters: by the parameter's name in the model.
        conversions: by the name of a tensor's node and by the wanted layout, the steps to it.
        zero_buckets: the parameters, by the names of their nodes, whose gathers share a collective.
        prefetch: how many ZeRO buckets the program gathers ahead, and sums behind: 0 or 1.
        seconds: the predicted step time by kind; the sum is :attr:`step_time`.
        gap: how far the step time may be from the best plan of all configurations compared, by
            their lower bounds; as a part of the step time.
        configuration_gap: the same for the best plan of this plan's configuration. On a mesh of
            more than two free axes, for the best plan of the neighbourhood searched last.
        compared: how many configurations were compared.
        not_searched: what the search left out, as sentences for the user.
        rows: what the report shows of each block and its collectives.
        notes: sentences for the user, about operators without a rule or statistics of microbatches.
        timings: seconds that planning took, by phase.
        options: the world size, the cluster and every option that was given, as JSON has them; of a
            compiled program also its ``batch``.
        modes: the names of the axes of each mode of tensor parallelism that was asked for or
            chosen.
        backend: what runs the programs, one of BACKENDS: "eager", operator after operator, or
            "inductor", torch's compiler.
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
    configuration_gap: float = 0.0
    compared: int = 1
    not_searched: tuple[str, ...] = ()
    pipeline: int = 1
    pipeline_place: int = 0
    device_kinds: tuple[str, ...] = ()
    pipeline_order: tuple[int, ...] = ()
    schedule: str = "1f1b"
    schedule_order: str = ""
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    zero_buckets: tuple[tuple[str, ...], ...] = ()
    prefetch: int = 0
    precision: str | None = None
    reduce_dtype: str | None = None
    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict, compare=False)
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    modes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backend: str = "eager"

    def __post_init__(self) -> None:
        """Raise PlanError if the parts do not fit together. ``plan_json`` checks that each part has
        its type.
        """
        try:
            found = next(self._misfits(), None)
        except (AttributeError, TypeError, KeyError) as e:
            raise PlanError(f"a part of the plan is not what a plan has there: {e!r}") from e
        if found is not None:
            raise PlanError(found)

    def _misfits(self) -> Iterator[str]:
        """What does not fit together, as sentences for the user."""
        yield from self._misfits_of_mesh()
        if not self.stages or len(self.stages) % self.pipeline:
            yield f"{len(self.stages)} stages are no multiple of a pipeline's {self.pipeline} ranks"
        if (unknown := unknown_schedule(self.schedule)) is not None:
            yield unknown
        if self.backend not in BACKENDS:
            yield f"backend {self.backend!r} is none of {', '.join(BACKENDS)}"
        if self.backend == "inductor" and self.offloaded:
            yield f"the plan offloads {self.offloaded[0]!r}, which inductor does not do"
        if self.prefetch not in (0, 1):
            yield f"prefetch {self.prefetch!r}: give 0 or 1"
        for what, value, known in (
            ("precision", self.precision, COMPUTE_DTYPES),
            ("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES),
        ):
            if value is not None and value not in known:
                yield f"{what} {value!r} is none of {', '.join(known)}"
        yield from self._misfits_of_layouts()

    def _misfits_of_mesh(self) -> Iterator[str]:
        axes = len(self.mesh_sizes)
        if (
            self.pipeline * math.prod(self.mesh_sizes) != self.world_size
            or len(self.mesh_names) != axes
            or self.world_size < 1
        ):
            yield (
                f"a pipeline of {self.pipeline} with a mesh of sizes {self.mesh_sizes} named "
                f"{self.mesh_names} is none of {self.world_size} ranks"
            )
        if min(self.pipeline, *self.mesh_sizes, self.microbatches, self.data_degree) < 1:
            yield (
                f"a size below 1: pipeline {self.pipeline}, mesh {self.mesh_sizes}, "
                f"{self.microbatches} microbatches"
            )
        blocks = list(range(self.pipeline))
        if self.pipeline_order and (self.pipeline_place or sorted(self.pipeline_order) != blocks):
            yield (
                f"pipeline_order {self.pipeline_order} with pipeline_place {self.pipeline_place} "
                f"is no order of {self.pipeline} pipeline ranks"
            )
        if self.device_kinds and len(self.device_kinds) != self.pipeline:
            yield f"device_kinds {self.device_kinds}: give one for each of {self.pipeline} ranks"
        if self.pipeline_place > (axes if self.pipeline > 1 else 0):
            yield (
                f"pipeline_place {self.pipeline_place} is none of a pipeline of {self.pipeline} "
                f"with {axes} mesh axes"
            )
        if (
            len(set(self.mesh_names)) != axes
            or "" in self.mesh_names
            or (self.pipeline > 1 and PIPELINE in self.mesh_names)
        ):
            yield f"mesh_names {self.mesh_names}: each axis needs a name of its own"

    def _misfits_of_layouts(self) -> Iterator[str]:
        axes = len(self.mesh_sizes)
        different = {id(node): (name, node) for name, node in self.nodes.items()}
        each: list[tuple[str, tuple[Sized, ...]]] = [
            (f"node {name!r}", (*node.ins, node.out, node.factors, node.kernels))
            for name, node in different.values()
        ]
        each += [(f"parameter {name!r}", (p.stored, p.used)) for name, p in self.parameters.items()]
        for what, layouts in each:
            if any(len(layout) != axes for layout in layouts):
                yield f"{what} has not one type for each of the {axes} mesh axes"

    @property
    def step_time(self) -> float:
        """Predicted seconds of one training step."""
        return sum(self.seconds.values())

    @property
    def batch(self) -> str:
        """What a rank passes to a call: the "global" batch, or the "local" batch of its replica."""
        return str(self.options.get("batch", "global"))

    def backend_on(self, device: str) -> str:
        """What runs the programs on a type of device, such as "cpu". A plan for GPUs whose backend
        was left free runs eagerly on CPUs.
        """
        is_asked = self.options.get("backend") is not None
        return "eager" if device == "cpu" and not is_asked else self.backend

    @property
    def chunks(self) -> int:
        """Stages on each pipeline rank."""
        return len(self.stages) // self.pipeline

    @property
    def memory(self) -> tuple[dict[str, float], ...]:
        """Predicted peak bytes of a device, for each pipeline rank, by kind."""
        devices: list[Counter[str]] = [Counter() for _ in range(self.pipeline)]
        for i, stage in enumerate(self.stages):
            devices[i % self.pipeline].update(stage.nbytes)  # type: ignore[arg-type]
        return tuple(map(dict, devices))

    @property
    def host_memory(self) -> tuple[float, ...]:
        """Predicted bytes of a rank in the memory of the host, for each pipeline rank."""
        own = (self.stages[rank :: self.pipeline] for rank in range(self.pipeline))
        return tuple(sum(sum(stage.host.values()) for stage in stages) for stages in own)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Predicted peak bytes of a device, for each pipeline rank."""
        return tuple(sum(device.values()) for device in self.memory)

    @property
    def nbytes(self) -> dict[str, float]:
        """Predicted peak bytes by kind, for the device that needs most."""
        return max(self.memory, key=lambda device: sum(device.values()))

    @property
    def placement(self) -> tuple[str, ...]:
        """The names of the mesh axes, and of a pipeline, from the slowest links to the fastest."""
        names, place = self.mesh_names, self.pipeline_place
        return (*names[:place], *[PIPELINE] * (self.pipeline > 1), *names[place:])

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh axes by name, slowest links first."""
        return dict(zip(self.mesh_names, self.mesh_sizes, strict=True))
