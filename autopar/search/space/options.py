"""The options of :func:`autopar.plan`, checked. An option that is not given is free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from autopar.cost_model.memory import optimizer_name, state_copies
from autopar.errors import PlanError
from autopar.ir.plan_data import BACKENDS, PIPELINE
from autopar.ir.precision import COMPUTE_DTYPES, REDUCE_DTYPES, reduction_dtype
from autopar.ir.schedules import schedule_names
from autopar.search.space.check_solver import check_solver
from autopar.search.space.meshes import (
    Axis,
    all_meshes,
    free_mesh,
    parallel_meshes,
)
from autopar.search.space.modes.mode import Mode
from autopar.search.space.option_checks import (
    check_choice,
    check_placement,
    check_positive,
    check_whole,
)
from autopar.search.space.pipeline_options import PipelineOptions, pipeline_options
from autopar.search.space.recompute_policy import RECOMPUTE_OPTIONS
from autopar.search.space.zero_options import zero_options

MAX_RANKS = 2**20

# The time limit of a search for more than so many ranks, where none is given.
UNLIMITED_RANKS, DEFAULT_SECONDS = 16, 60.0


@dataclass(frozen=True)
class Options:
    """The options of :func:`autopar.plan`, as given.

    Attributes:
        parallel: sizes by kind: ``dict(data=2, pipeline=2, tensor=dict(size=4, mode="2d"))``. The
            data size is inferred where it is left out; the other sizes are then 1. The modes are
            "1d", "2d", "2.5d" (``depth``: the number of squares of ranks), "3d", "sequence"
            (``ring``: the number of ranks in a ring; the ring's other axis cuts the heads of
            attention) and those of :func:`autopar.register_mode`. Depth and ring are free unless
            given. Where neither ``parallel`` nor ``mesh`` is given, all of this is free, modes
            included. ``pipeline=dict(size=2, chunks=2, split_before=["model.layers.8", ...])``
            gives each rank two stages and fixes the cuts.
        mesh: axis sizes inside a pipeline stage, slowest links first. The use of each axis is
            free.
        placement: the order of the axes and the pipeline in the rank numbering, slowest links
            first: ``("data", "pipeline", "tensor")``. "tensor" stands for all axes of a mode. With
            ``mesh`` the axes have the names "axis0", "axis1" and so on. Free unless given.
        memory_budget: bytes per device; the cluster's device memory unless given.
        micro_batch_size: samples per microbatch and data-parallel replica.
        schedule: the schedule of a pipeline: "gpipe", "1f1b", "interleaved-1f1b" (several stages
            a rank), "zero-bubble", or your own (:func:`autopar.register_schedule`).
        recompute: "none" saves all that the backward needs, "full" saves only what leaves each
            repeated block, "selective" saves besides attention and every second product of each
            block, as torchtitan does, "auto" saves what is worth its memory.
        offload: "none" keeps everything in the device's memory. "auto" may put saved results and
            optimizer state in the memory of the host until they are read, where the copies take
            less time than recomputation, or where nothing else fits.
        zero: 0 keeps parameters whole. 1 or 2 shards stored parameters, gradients and optimizer
            state over data-parallel ranks. 3 also gathers parameters where they are used, and
            again in the backward where the gathered parameters are not saved.
            ``dict(stage=3, offload="optimizer")`` also keeps the whole state of the optimizer in
            the memory of the host between steps; either may be left out.
        precision: the dtype that the graph computes in: "bf16", "fp16", "fp32", or "tf32" (float32
            whose matrix products may round their operands on tensor cores). Parameters, optimizer
            state and checkpoints keep the model's dtype; the loss is computed in float32. None
            computes in the model's dtypes.
        reduce_dtype: the dtype in which ranks sum gradients of parameters: "fp32" (the meaning of
            None under "bf16" and "fp16"), "bf16" or "fp16". Otherwise None sums each gradient in
            the dtype in which it was computed.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum", with torch's defaults, or
            "fused-adamw" and so on for ``fused=True``: for its memory and its time.
            ``torch.optim.AdamW``, ``Adam`` and ``SGD`` themselves mean their names.
        constraints: layouts by pattern of a parameter's name or a module's path:
            ``{"*.mlp.up_proj.weight": "I S0"}``.
        time_limit: seconds for the whole planning, with the capture of the model. The search then
            ends with the best plan so far, after the solve that has begun. If none fits by then,
            it tries a few plans more, which takes seconds, and of the largest models up to about a
            minute. None: no limit up to 16 ranks; for more, 60 s, and the search ends before where
            all configurations left are estimated to be clearly slower.
        solver: "highs", or "pulp:NAME" for any solver that PuLP knows: "pulp:CBC",
            "pulp:GUROBI". Limits of PuLP's solvers are seconds, so that plans may depend on the
            machine.
        profile_missing: whether to measure on this machine the kernels for which the cluster has
            no curve. Measured times are remembered.
        backend: what runs the program: "eager", or "inductor", torch's compiler. None: inductor on
            GPUs, unless a part of the program is not compiled; eager on CPUs.
    """

    world_size: int
    parallel: Mapping[str, Any] | None = None
    mesh: Sequence[int] | None = None
    placement: Sequence[str] | None = None
    memory_budget: float | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: str = "auto"
    offload: str = "none"
    zero: int | Mapping[str, Any] | None = None
    precision: str | None = None
    reduce_dtype: str | None = None
    optimizer: str = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    time_limit: float | None = None
    profile_missing: bool = False
    solver: str = "highs"
    backend: str | None = None

    def __post_init__(self) -> None:
        check_whole("world_size", self.world_size, "the number of ranks")
        if self.world_size > MAX_RANKS:
            raise PlanError(
                f"world_size={self.world_size}: plans are made for up to {MAX_RANKS:,} ranks"
            )
        self._check_choices()
        self._check_quantities()
        self._check_containers()
        self._normalise()

    def _check_choices(self) -> None:
        """Check the options that take one of a few values."""
        for name, known in (("precision", COMPUTE_DTYPES), ("reduce_dtype", REDUCE_DTYPES)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), known, ", or leave it out")
        check_choice("recompute", self.recompute, RECOMPUTE_OPTIONS)
        check_choice("offload", self.offload, ("none", "auto"))
        if self.schedule is not None:
            own = ", or your own: autopar.register_schedule"
            check_choice("schedule", self.schedule, schedule_names(), own)
        if self.backend is not None:
            check_choice("backend", self.backend, BACKENDS)
        if not isinstance(self.solver, str):
            raise PlanError(f'solver={self.solver!r}: give "highs" or "pulp:NAME"')
        check_solver(self.solver)
        if not isinstance(self.profile_missing, bool):
            raise PlanError(f"profile_missing={self.profile_missing!r}: give True or False")
        if zero_options(self.zero).offloads_optimizer and not state_copies(self.optimizer):
            raise PlanError(
                f"zero={self.zero!r}: optimizer {optimizer_name(self.optimizer)!r} has no state "
                'that the host could keep: leave offload="optimizer" out, or name the optimizer '
                "that you train with"
            )

    def _check_quantities(self) -> None:
        """Check the options that are numbers with a unit."""
        if self.memory_budget is not None:
            check_positive("memory_budget", self.memory_budget, "bytes per device")
        if self.time_limit is not None:
            check_positive("time_limit", self.time_limit, "seconds for the whole planning")
        if self.micro_batch_size is not None:
            what = "samples in a microbatch of one replica"
            check_whole("micro_batch_size", self.micro_batch_size, what)

    def _check_containers(self) -> None:
        """Check ``mesh``, ``parallel`` and ``constraints``, as far as no model is needed."""
        if not isinstance(self.mesh, (Sequence, NoneType)) or isinstance(self.mesh, str):
            raise PlanError(
                f"mesh={self.mesh!r}: give the axis sizes, slowest links first, for example "
                f"mesh=({self.world_size},)"
            )
        for size in self.mesh or ():
            check_whole("mesh", size, "the ranks along an axis")
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
        self._check_placement()
        for pattern, layout in (self.constraints or {}).items():
            if not isinstance(pattern, str) or not isinstance(layout, str):
                raise PlanError(
                    f"constraints={{{pattern!r}: {layout!r}}}: a pattern of names and a layout, "
                    'both as text, for example {"*.mlp.up_proj.weight": "I S0"}'
                )

    def _check_placement(self) -> None:
        """Check the names of ``placement``, as far as the sizes of axes need not be known."""
        if self.placement is None:
            return
        kinds: tuple[str, ...] = (PIPELINE, "data", "tensor")
        if self.mesh is not None:
            kinds = (PIPELINE, *(f"axis{i}" for i in range(len(self.mesh))))
        check_placement(self.placement, kinds, self.mesh is not None, self.parallel)

    def _normalise(self) -> None:
        """Replace other ways to write a value: the class of a torch optimizer, numbers of numpy."""
        same: dict[str, Any] = {
            "constraints": dict(self.constraints or {}),
            "optimizer": optimizer_name(self.optimizer),
            "zero": dict(self.zero) if isinstance(self.zero, Mapping) else self.zero_stage,
        }
        for kind, names in (
            (int, ("world_size", "micro_batch_size")),
            (float, ("memory_budget", "time_limit")),
        ):
            same |= {name: kind(n) for name in names if (n := getattr(self, name)) is not None}
        if self.mesh is not None:
            same["mesh"] = tuple(map(int, self.mesh))
        if self.placement is not None:
            same["placement"] = tuple(self.placement)
        for name, value in same.items():
            object.__setattr__(self, name, value)

    @property
    def zero_stage(self) -> int | None:
        """The stage of ZeRO that the user fixed; None where it is free."""
        return zero_options(self.zero).stage

    @property
    def state_on_host(self) -> tuple[bool, ...]:
        """The answers that the options leave to whether the state that the optimizer has of a
        parameter is in the memory of the host between steps.
        """
        if zero_options(self.zero).offloads_optimizer:
            return (True,)
        is_free = self.offload == "auto" and state_copies(self.optimizer)
        return (False, True) if is_free else (False,)

    @property
    def reduction_dtype(self) -> str | None:
        """The name of the dtype in which ranks sum gradients; None for the dtype in which each
        gradient is computed.
        """
        return reduction_dtype(self.precision, self.reduce_dtype)

    @property
    def is_exhaustive(self) -> bool:
        """Whether the search leaves out no configuration because of its estimate."""
        return self.time_limit is not None or self.world_size <= UNLIMITED_RANKS

    @property
    def search_seconds(self) -> float:
        """Seconds that the search may take."""
        if self.time_limit is not None:
            return self.time_limit
        return math.inf if self.world_size <= UNLIMITED_RANKS else DEFAULT_SECONDS

    @property
    def pipeline(self) -> PipelineOptions | None:
        """What the user fixed of the pipeline; None where it is free."""
        if self.parallel is not None:
            return pipeline_options(self.parallel.get("pipeline", 1), self.world_size)
        if self.mesh is None:
            return None
        ranks = math.prod(self.mesh)
        if self.world_size % ranks:
            raise PlanError(
                f"mesh={tuple(self.mesh)} has {ranks} ranks, which do not divide world_size "
                f"{self.world_size}"
            )
        return PipelineOptions(self.world_size // ranks)

    def is_unrequested_mode(self, mode: Mode | None) -> bool:
        """Whether a mesh has a mode that the user did not ask for."""
        return mode is not None and self.parallel is None

    def data_parallel_sizes(self, pipeline: int) -> list[int]:
        """The data-parallel sizes that the options leave in a pipeline of ``pipeline`` ranks, the
        largest first.
        """
        if self.parallel is not None:
            return [math.prod(a.size for a in self.meshes(pipeline)[0] if a.use == "data")]
        ranks = self.world_size // pipeline
        return [d for d in range(ranks, 0, -1) if ranks % d == 0]

    def meshes(self, pipeline: int) -> list[tuple[Axis, ...]]:
        """The meshes of a stage that the options leave in a pipeline of ``pipeline`` ranks. The
        axis with the slowest links comes first.
        """
        if self.mesh is not None:
            return [free_mesh(self.mesh)]
        if self.parallel is not None:
            return parallel_meshes(dict(self.parallel), self.world_size, pipeline)
        is_alone = pipeline == 1 and self.placement is None
        return all_meshes(self.world_size // pipeline, is_alone)
