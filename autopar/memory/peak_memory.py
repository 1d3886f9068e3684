"""The most memory that a device has at once in a training step: of the usual loop (call,
``backward``, ``step``, ``zero_grad``), from its second round on, when the optimizer has its state
and gradients are made anew.

Counted are the bytes that tensors take from torch's allocator, which rounds each up on a GPU. Not
counted is what a kernel takes for itself while it runs (workspaces of cuBLAS and of collectives),
what the CUDA context takes, and the free parts of the segments in which the allocator reserves
memory: ``torch.cuda.max_memory_allocated`` is what is predicted, not ``max_memory_reserved``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.cost_model.memory import allocated_bytes, optimizer_temporaries, parameter_memory
from autopar.cost_model.schedule import (
    BACKWARD,
    FORWARD,
    LOOPED,
    WEIGHT,
    Action,
    actions,
    early_messages,
)
from autopar.ir.layout import local_shape
from autopar.ir.plan_data import ParameterPlan, PlanData
from autopar.ir.precision import dtype_of
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.backward_liveness import BackwardLiveness
from autopar.memory.call_trace import CallTrace, TracedStorage
from autopar.memory.forward_liveness import ACTIVATIONS, OUTPUTS, TRANSIENT, LiveMemory, StageCalls
from autopar.memory.gradient_memory import GradientMemory, LocalParameter, gather_memory
from autopar.memory.saved_activations import SavedActivations
from autopar.memory.schedule_walk import ActionMemory, ScheduleWalk
from autopar.rules.analysis import Analysis


@dataclass(frozen=True)
class StepSettings:
    """How a program is run.

    Attributes:
        pipeline, stages, schedule, microbatches, data_degree: as in a plan.
        optimizer: its name.
        summed_in: in which ranks sum gradients of parameters, None for that in which they are made.
        device_type: where.
    """

    pipeline: int
    stages: int
    schedule: str
    microbatches: int
    data_degree: int
    optimizer: str
    reduction_dtype: torch.dtype | None
    device_type: str

    def order(self) -> list[list[Action]]:
        """Of each pipeline rank."""
        if self.stages == 1:
            return [
                [
                    Action(kind, 0, m)
                    for m in range(self.microbatches)
                    for kind in (FORWARD, BACKWARD)
                ]
            ]
        return actions(
            self.schedule, self.pipeline, self.stages // self.pipeline, self.microbatches
        )


@dataclass
class _Stage:
    """One stage of a rank: its effects, by action, whether it is the first or the last, and whether
    what it sent is held.

    A weight belongs to the first stage of a rank that uses it, whose ``leaves`` take its gradients;
    ``owners`` has those of all it uses.
    """

    body: StageCalls
    leaves: GradientMemory
    weights: list[LocalParameter]
    owners: dict[str, GradientMemory]
    effects: dict[tuple[str, bool, bool, bool], ActionMemory] = field(default_factory=dict)


class PeakMemory:
    """The peak of each pipeline rank of a program.

    ``parameters`` and ``recomputed`` are those of a plan.
    """

    def __init__(
        self,
        analysis: Analysis,
        program: CallTrace,
        sizes: tuple[int, ...],
        parameters: Mapping[str, ParameterPlan],
        recomputed: Collection[str],
        run: StepSettings,
    ) -> None:
        self._analysis, self._program, self._sizes, self._parameters, self._run = (
            analysis,
            program,
            sizes,
            parameters,
            run,
        )
        self._allocated = allocated_bytes if run.device_type == "cuda" else int
        self._held = SavedActivations(program)
        self._again = self._held.again(recomputed)
        self._alone = math.prod(sizes) == run.microbatches == run.stages == 1
        self._nodes = {state.target: node for node, state in analysis.state.items()}
        self._stages: list[_Stage] = []
        bodies = [
            StageCalls(program, self._held, number, self._again, self._picked(number))
            for number in range(run.stages)
        ]
        for number in range(run.stages):
            self._stages.append(self._stage(number, bodies))

    @property
    def kept(self) -> list[float]:
        """By stage, what one microbatch keeps between its forward and its backward."""
        return [float(stage.body.saved_storages.nbytes) for stage in self._stages]

    def by_kind(self) -> list[dict[str, float]]:
        """By stage, its part of its device's peak: bytes by kind."""
        found: list[dict[str, float]] = [{} for _ in self._stages]
        run = self._run
        orders = run.order()
        early: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
        if self._looped:
            early = early_messages(
                run.schedule, run.pipeline, run.stages // run.pipeline, run.microbatches
            )
        for rank, order in enumerate(orders):
            for stage, kinds in self._rank(
                range(rank, run.stages, run.pipeline), order, early[rank]
            ).items():
                found[stage] = {kind: float(n) for kind, n in kinds.items() if n}
        return found

    @property
    def _looped(self) -> bool:
        return self._run.schedule in LOOPED and self._run.stages > 1

    @property
    def _collects(self) -> bool:
        """Whether outputs of several microbatches, or stages, are held until all are done."""
        return self._run.microbatches > 1 or self._run.stages > 1

    # A rank's step

    def _rank(
        self, own: range, order: list[Action], early: list[list[Action]]
    ) -> dict[int, dict[str, int]]:
        walk = ScheduleWalk(own, keeps_messages=self._looped)
        for stage in own:
            self._lasting(stage, own, walk)
        self._open(own, walk)
        done: Counter[tuple[str, int]] = Counter()
        for before, action, after, waiting in zip(
            [None, *order], order, [*order[1:], None], early, strict=False
        ):
            if before is None or before.kind != action.kind:
                walk.arrive()
            if self._run.schedule == "1f1b" and before is not None and after is not None:
                if (
                    walk.held is None
                    and action.kind == FORWARD
                    and before.kind == FORWARD
                    and after.kind == BACKWARD
                ):
                    walk.hold_sent(before.stage, before.microbatch)
                elif action.kind == before.kind == BACKWARD:
                    walk.release_held()
            done[action.kind, action.stage] += 1
            count = done[action.kind, action.stage]
            holds = action.kind == BACKWARD and walk.holds(action.microbatch)
            ahead = sum(self._stages[a.stage].body.receives(a.kind == FORWARD) for a in waiting)
            walk.run_action(
                action.stage,
                self._effect(action, count == 1, count == self._run.microbatches, holds),
                ahead,
            )
            if holds:
                walk.keep_only(
                    ACTIVATIONS,
                    sum(m.nbytes for m in self._stages[action.stage].body.sent_and_saved),
                )
        self._end(own, walk)
        return walk.at

    def _lasting(self, stage: int, own: range, walk: ScheduleWalk) -> None:
        """Parameters, buffers, the optimizer's state and the batch."""
        seen = {leaf for other in own if other < stage for leaf in self._used(other)}
        for name in self._used(stage):
            if name not in seen:
                node, is_trainable = (
                    self._nodes[name],
                    self._nodes[name] in self._analysis.differentiable,
                )
                plan, dtype = self._parameters[name], self._stored(name)
                elements = math.prod(local_shape(node.meta["val"].shape, plan.stored, self._sizes))
                held = parameter_memory(
                    elements, dtype.itemsize, self._run.optimizer, is_trainable, self._allocated
                )
                walk.add_permanent(stage, "parameters", held.parameters)
                walk.add_permanent(stage, "optimizer", held.optimizer)
        if stage == own[0]:
            for node in (
                *self._analysis.inputs,
                *(n for n in self._analysis.hoisted if n.meta["val"].ndim),
            ):
                val = node.meta["val"]
                times = self._run.microbatches if self._analysis.batch.dim(node) is not None else 1
                walk.add_permanent(
                    stage, "inputs", self._allocated(val.numel() * val.dtype.itemsize * times)
                )

    def _open(self, own: range, walk: ScheduleWalk) -> None:
        weights = list(
            {leaf.name: leaf for stage in own for leaf in self._stages[stage].weights}.values()
        )
        copies, gathered, more = gather_memory(weights)
        left = {"compute copies": copies, "gathered parameters": gathered}
        walk.run_action(
            own[0], ActionMemory(left, copies + gathered + more, {**left, TRANSIENT: more})
        )
        walk.copies = own[0], left

    def _end(self, own: range, walk: ScheduleWalk) -> None:
        """What comes after the last backward."""
        walk.arrive(end=True)
        for stage in own:
            if walk.now[stage].get(OUTPUTS, 0):  # put together one by one
                largest = self._run.microbatches * max(
                    m.nbytes for m in self._stages[stage].body.returned
                )
                walk.run_action(stage, ActionMemory({}, largest, {OUTPUTS: largest}))
            ledger = LiveMemory()
            self._stages[stage].leaves.finish(ledger)
            walk.run_action(stage, ActionMemory(dict(ledger.now), ledger.peak, ledger.at))
        shared = sum(
            leaf.stored_bytes
            for stage in own
            for leaf in self._stages[stage].weights
            if self._shared(leaf.name)
        )
        walk.run_action(own[0], ActionMemory({}, shared, {TRANSIENT: shared}))
        walk.close()
        sizes = [
            leaf.stored_bytes
            for stage in own
            for leaf in self._stages[stage].weights
            if leaf.is_trainable
        ]
        together = math.prod(self._sizes) > 1 or self._run.device_type == "cuda"
        more = optimizer_temporaries(sizes, self._run.optimizer, together)
        walk.run_action(own[0], ActionMemory({}, more, {"optimizer": more}))

    def _effect(self, action: Action, first: bool, last: bool, holds: bool) -> ActionMemory:
        """``holds``: what was sent of this microbatch is still held by who sent it."""
        stage = self._stages[action.stage]
        key = action.kind, first, last, holds
        if key not in stage.effects:
            ledger = LiveMemory()
            if action.kind == FORWARD:
                in_transit = self._forward(stage, ledger)
            else:
                in_transit = self._backward(
                    stage, action.kind, last, ledger, stage.body.sent_and_saved if holds else ()
                )
            stage.effects[key] = ActionMemory(dict(ledger.now), ledger.peak, ledger.at, in_transit)
        return stage.effects[key]

    def _backward(
        self,
        stage: _Stage,
        kind: str,
        last: bool,
        ledger: LiveMemory,
        held: Collection[TracedStorage],
    ) -> int:
        """Of a schedule that cuts backwards in two the one part or the other. A stage that sends
        nothing back has all in the second.
        """
        split = self._run.schedule == "zero-bubble" and self._looped
        whole = not split or not stage.body.path
        if last and kind == (WEIGHT if split else BACKWARD):
            stage.leaves.begin_last_backward()
        if split and whole and kind == BACKWARD:
            return 0
        first = LiveMemory() if kind == WEIGHT and not whole else ledger
        returned = (
            stage.body.returned & stage.body.saved_storages.kept
            if self._collects
            else set[TracedStorage]()
        )
        backward = BackwardLiveness(
            stage.body,
            first,
            lambda name, grad: stage.owners[name].arrive(name, grad, ledger),
            {*held, *returned},
        )
        in_transit = backward.run() if whole else backward.inputs()
        if kind == WEIGHT and not whole:
            backward.weights(ledger)
        in_transit = in_transit if kind == BACKWARD else 0
        if kind == (WEIGHT if split else BACKWARD):  # autograd lets go
            ledger.move(sum(m.nbytes for m in returned), ACTIVATIONS, OUTPUTS)
        if self._run.schedule in LOOPED and kind == (
            WEIGHT if split else BACKWARD
        ):  # autograd lets go, but not who sent it
            again = sum(m.nbytes for m in stage.body.sent_and_saved)
            ledger.add(TRANSIENT, again)
            in_transit += again
        return in_transit

    def _forward(self, stage: _Stage, ledger: LiveMemory) -> int:
        body = stage.body
        body.forward(ledger, keeps_outputs=self._collects)
        kept, returned = body.saved_storages.kept, body.returned if self._collects else set()
        ledger.move(sum(m.nbytes for m in returned - kept), TRANSIENT, OUTPUTS)
        return sum(m.nbytes for m in {*body.sent} - returned - kept)

    # What a stage is

    def _stage(self, number: int, bodies: Sequence[StageCalls]) -> _Stage:
        own = slice(number % self._run.pipeline, None, self._run.pipeline)
        reached = {slot.parameter for body in bodies[own] for slot in body.edges if slot.parameter}
        owners = {
            name: leaves for stage in self._stages[own] for name, leaves in stage.owners.items()
        }
        weights = [
            self._leaf(n, n in reached)
            for n in self._used(number)
            if self._is_parameter(n) and n not in owners
        ]
        leaves = GradientMemory(weights, self._alone, self._run.reduction_dtype)
        return _Stage(
            bodies[number], leaves, weights, owners | {leaf.name: leaves for leaf in weights}
        )

    def _picked(self, stage: int) -> int:
        """Bytes of a microbatch's samples where these do not lie together, because each
        data-parallel rank's part has some of them.
        """
        taken = {
            node
            for at, node in self._program.inputs
            if at in (stage, None) and self._analysis.batch.dim(node) is not None
        }
        apart = self._run.microbatches > 1 and self._run.data_degree > 1
        return (
            sum(
                self._allocated(n.meta["val"].numel() * n.meta["val"].dtype.itemsize) for n in taken
            )
            if apart
            else 0
        )

    def _used(self, stage: int) -> list[str]:
        """The names of the state that a stage takes, in the order of first use; what none takes is
        where the first is.
        """
        used = [name for at, name in self._program.uses if at == stage]
        shared = [name for at, name in self._program.uses if at is None and name not in used]
        elsewhere = {name for _, name in self._program.uses}
        return (
            used
            + shared
            + ([name for name in self._nodes if name not in elsewhere] if stage == 0 else [])
        )

    def _shared(self, name: str) -> bool:
        """Whether several ranks of the pipeline have it."""
        return (
            len(
                {
                    at % self._run.pipeline
                    for at, used in self._program.uses
                    if used == name and at is not None
                }
            )
            > 1
        )

    def _is_parameter(self, name: str) -> bool:
        return self._analysis.state[self._nodes[name]].kind == "parameter"

    def _stored(self, name: str) -> torch.dtype:
        node = self._nodes[name]
        dtype: torch.dtype = node.meta.get("stored", node.meta["val"].dtype)
        return dtype

    def _leaf(self, name: str, is_trainable: bool) -> LocalParameter:
        val, plan = self._nodes[name].meta["val"], self._parameters[name]
        return LocalParameter(
            name,
            tuple(val.shape),
            plan.stored,
            plan.used,
            self._sizes,
            self._stored(name),
            val.dtype,
            is_trainable,
        )


def peak_memory_of_plan(
    analysis: Analysis, plan: PlanData, optimizer: str, autograd: OperatorTracer
) -> PeakMemory:
    """That of a plan. ``analysis`` is of one microbatch, and cut into the plan's stages."""
    reduction_dtype = dtype_of(plan.reduce_dtype)
    program = CallTrace(
        analysis, plan.nodes, plan.conversions, plan.mesh_sizes, autograd, reduction_dtype
    )
    numbers = plan.pipeline, len(plan.stages), plan.schedule, plan.microbatches, plan.data_degree
    run = StepSettings(*numbers, optimizer, reduction_dtype, autograd.device_type)
    return PeakMemory(analysis, program, plan.mesh_sizes, plan.parameters, plan.recomputed, run)
