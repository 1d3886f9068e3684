"""The peak memory of each device in a training step.

The step is a step of the usual loop (call, ``backward``, ``step``, ``zero_grad``) from the second
round on, when the optimizer has its state and gradients are allocated again.

The peak counts the bytes that tensors take from torch's allocator, which rounds each tensor up on a
GPU. It does not count workspaces of kernels (cuBLAS, collectives), the CUDA context, or the free
parts of the allocator's segments. It predicts ``torch.cuda.max_memory_allocated``, not
``max_memory_reserved``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from autopar.cost_model.memory import allocated_bytes, optimizer_temporaries, parameter_memory
from autopar.cost_model.schedule import BACKWARD, FORWARD, Action
from autopar.ir.layout import local_shape
from autopar.ir.plan_data import ParameterPlan, PlanData
from autopar.ir.precision import dtype_of
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.gradient_memory import GradientMemory, LocalParameter, gather_memory
from autopar.memory.live_memory import ACTIVATIONS, OUTPUTS, TRANSIENT, LiveMemory
from autopar.memory.saved_activations import SavedActivations
from autopar.memory.schedule_walk import ActionMemory, ScheduleWalk
from autopar.memory.stage_calls import StageCalls
from autopar.memory.stage_memory import StageMemory
from autopar.memory.step_settings import StepSettings
from autopar.rules.analysis import Analysis


class PeakMemory:
    """The peak memory of each pipeline rank of a program.

    Args:
        analysis: the analysis of the graph of one microbatch, cut into the plan's stages.
        trace: the program of the plan on one rank.
        sizes: the mesh's axis sizes, inside one stage.
        parameters, recomputed: as in a plan.
        settings: how the program runs.
    """

    def __init__(
        self,
        analysis: Analysis,
        trace: CallTrace,
        sizes: tuple[int, ...],
        parameters: Mapping[str, ParameterPlan],
        recomputed: Collection[str],
        settings: StepSettings,
    ) -> None:
        self._analysis, self._trace, self._sizes = analysis, trace, sizes
        self._parameters, self._settings = parameters, settings
        self._allocated = allocated_bytes if settings.device_type == "cuda" else int
        self._is_direct = math.prod(sizes) == settings.microbatches == settings.stages == 1
        self._nodes = {state.target: node for node, state in analysis.state.items()}
        saved = SavedActivations(trace)
        calls = saved.recomputed_calls(recomputed)
        stages = [
            StageCalls(trace, saved, number, calls, self._picked_bytes(number))
            for number in range(settings.stages)
        ]
        self._stages: list[StageMemory] = []
        for number in range(settings.stages):
            self._stages.append(self._stage(number, stages))

    @property
    def saved_bytes(self) -> list[float]:
        """By stage: the bytes that one microbatch keeps between its forward and its backward."""
        return [float(stage.calls.saved_storages.nbytes) for stage in self._stages]

    def by_kind(self) -> list[dict[str, float]]:
        """By stage: its part of its rank's peak, bytes by kind."""
        found: list[dict[str, float]] = [{} for _ in self._stages]
        settings, early = self._settings, self._settings.early_messages()
        for rank, order in enumerate(settings.orders()):
            own = range(rank, settings.stages, settings.pipeline)
            for stage, kinds in self._walk(own, order, early[rank]).items():
                found[stage] = {kind: float(n) for kind, n in kinds.items() if n}
        return found

    # The step of a rank

    def _walk(
        self, own: range, order: list[Action], early: list[list[Action]]
    ) -> dict[int, dict[str, int]]:
        """Walks through a rank's step. Returns the bytes at its peak, by stage and kind."""
        walk = ScheduleWalk(own, keeps_messages=self._settings.is_looped)
        for number in own:
            self._add_permanent(number, own, walk)
        self._gather(own, walk)
        done: Counter[tuple[str, int]] = Counter()
        for i, (action, waiting) in enumerate(zip(order, early, strict=False)):
            before, after = (
                order[i - 1] if i else None,
                order[i + 1] if i + 1 < len(order) else None,
            )
            self._wait_for_messages(walk, before, action, after)
            done[action.kind, action.stage] += 1
            count, stage = done[action.kind, action.stage], self._stages[action.stage]
            is_held = action.kind == BACKWARD and walk.holds(action.microbatch)
            is_last = count == self._settings.microbatches
            buffers = sum(self._stages[a.stage].calls.receives(a.kind == FORWARD) for a in waiting)
            memory = stage.action(action.kind, count == 1, is_last, is_held)
            walk.run_action(action.stage, memory, buffers)
            if is_held:
                kept = sum(storage.nbytes for storage in stage.calls.sent_and_saved)
                walk.keep_for_held(ACTIVATIONS, kept)
        self._finish(own, walk)
        return walk.at_peak

    def _wait_for_messages(
        self, walk: ScheduleWalk, before: Action | None, action: Action, after: Action | None
    ) -> None:
        """Frees the messages that the schedule waits for before ``action``."""
        if before is None or before.kind != action.kind:
            walk.arrive()
        if self._settings.schedule == "1f1b" and before is not None and after is not None:
            kinds = before.kind, action.kind
            if not walk.has_held and kinds == (FORWARD, FORWARD) and after.kind == BACKWARD:
                walk.hold_sent(before.stage, before.microbatch)
            elif kinds == (BACKWARD, BACKWARD):
                walk.release_held()

    def _add_permanent(self, stage: int, own: range, walk: ScheduleWalk) -> None:
        """Adds parameters, buffers, the optimizer's state and the batch."""
        seen = {name for other in own if other < stage for name in self._used(other)}
        for name in self._used(stage):
            if name not in seen:
                node, plan = self._nodes[name], self._parameters[name]
                elements = math.prod(local_shape(node.meta["val"].shape, plan.stored, self._sizes))
                memory = parameter_memory(
                    elements,
                    self._stored(name).itemsize,
                    self._settings.optimizer,
                    node in self._analysis.differentiable,
                    self._allocated,
                )
                walk.add_permanent(stage, "parameters", memory.parameters)
                walk.add_permanent(stage, "optimizer", memory.optimizer)
        if stage == own[0]:
            hoisted = (n for n in self._analysis.hoisted if n.meta["val"].ndim)
            for node in (*self._analysis.inputs, *hoisted):
                val, has_batch = node.meta["val"], self._analysis.batch.dim(node) is not None
                times = self._settings.microbatches if has_batch else 1
                nbytes = self._allocated(val.numel() * val.dtype.itemsize * times)
                walk.add_permanent(stage, "inputs", nbytes)

    def _gather(self, own: range, walk: ScheduleWalk) -> None:
        """The step starts: it casts and gathers the parameters."""
        parameters = {p.name: p for stage in own for p in self._stages[stage].parameters}
        copies, gathered, temporary = gather_memory(list(parameters.values()))
        made = {"compute copies": copies, "gathered parameters": gathered}
        at_peak = {**made, TRANSIENT: temporary}
        walk.run_action(own[0], ActionMemory(made, copies + gathered + temporary, at_peak))
        walk.copies = own[0], made

    def _finish(self, own: range, walk: ScheduleWalk) -> None:
        """After the last backward: outputs, gradients and the optimizer's step."""
        walk.arrive(end=True)
        stages = {number: self._stages[number] for number in own}
        for number, stage in stages.items():
            if walk.now[number].get(OUTPUTS, 0):  # outputs are concatenated one after the other
                largest = max(storage.nbytes for storage in stage.calls.returned)
                nbytes = self._settings.microbatches * largest
                walk.run_action(number, ActionMemory.temporary(OUTPUTS, nbytes))
            live = LiveMemory()
            stage.gradients.finish(live)
            walk.run_action(number, ActionMemory.of(live))
        parameters = [p for stage in stages.values() for p in stage.parameters]
        shared = sum(p.stored_bytes for p in parameters if self._is_shared(p.name))
        walk.run_action(own[0], ActionMemory.temporary(TRANSIENT, shared))
        walk.close()
        sizes = [p.stored_bytes for p in parameters if p.is_trainable]
        together = math.prod(self._sizes) > 1 or self._settings.device_type == "cuda"
        nbytes = optimizer_temporaries(sizes, self._settings.optimizer, together)
        walk.run_action(own[0], ActionMemory.temporary("optimizer", nbytes))

    # The stages

    def _stage(self, number: int, stages: Sequence[StageCalls]) -> StageMemory:
        own = slice(number % self._settings.pipeline, None, self._settings.pipeline)
        slots = [slot for stage in stages[own] for slot in stage.gradient_counts]
        trained = {slot.parameter for slot in slots if slot.parameter}
        owners = {name: g for stage in self._stages[own] for name, g in stage.owners.items()}
        parameters = [
            self._local_parameter(name, name in trained)
            for name in self._used(number)
            if self._is_parameter(name) and name not in owners
        ]
        gradients = GradientMemory(parameters, self._is_direct, self._settings.reduction_dtype)
        owners |= {parameter.name: gradients for parameter in parameters}
        return StageMemory(stages[number], self._settings, parameters, gradients, owners)

    def _picked_bytes(self, stage: int) -> int:
        """Bytes of the copies of a microbatch's samples of the batch.

        With data parallelism the samples of a microbatch are not contiguous in the batch, because
        each rank's part of the batch has some of them. Then the step copies them.
        """
        if self._settings.microbatches == 1 or self._settings.data_degree == 1:
            return 0
        nodes = {
            node
            for at, node in self._trace.inputs
            if at in (stage, None) and self._analysis.batch.dim(node) is not None
        }
        tensors = [node.meta["val"] for node in nodes]
        return sum(self._allocated(t.numel() * t.dtype.itemsize) for t in tensors)

    def _used(self, stage: int) -> list[str]:
        """The names of the parameters and buffers of a stage, in the order of first use.

        The first stage also has those that no stage uses.
        """
        uses = self._trace.uses
        used = [name for at, name in uses if at == stage]
        shared = [name for at, name in uses if at is None and name not in used]
        elsewhere = {name for _, name in uses}
        unused = [name for name in self._nodes if name not in elsewhere] if stage == 0 else []
        return used + shared + unused

    def _is_shared(self, name: str) -> bool:
        """Whether several ranks of the pipeline have the parameter."""
        stages = [at for at, used in self._trace.uses if used == name and at is not None]
        return len({stage % self._settings.pipeline for stage in stages}) > 1

    def _is_parameter(self, name: str) -> bool:
        return self._analysis.state[self._nodes[name]].kind == "parameter"

    def _stored(self, name: str) -> torch.dtype:
        """The dtype of the parameter between steps."""
        node = self._nodes[name]
        dtype: torch.dtype = node.meta.get("stored", node.meta["val"].dtype)
        return dtype

    def _local_parameter(self, name: str, is_trainable: bool) -> LocalParameter:
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
    analysis: Analysis, plan: PlanData, optimizer: str, tracer: OperatorTracer
) -> PeakMemory:
    """The peak memory of a plan.

    Args:
        analysis: the analysis of the graph of one microbatch, cut into the plan's stages.
        plan: the plan.
        optimizer: the optimizer's name.
        tracer: traces calls for the device type where the program will run.
    """
    reduction_dtype = dtype_of(plan.reduce_dtype)
    trace = CallTrace(
        analysis, plan.nodes, plan.conversions, plan.mesh_sizes, tracer, reduction_dtype
    )
    numbers = plan.pipeline, len(plan.stages), plan.schedule, plan.microbatches, plan.data_degree
    settings = StepSettings(*numbers, optimizer, reduction_dtype, tracer.device_type)
    return PeakMemory(analysis, trace, plan.mesh_sizes, plan.parameters, plan.recomputed, settings)
