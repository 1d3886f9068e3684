"""The peak memory of each device in a training step.

The step is a step of the usual loop (call, ``backward``, ``step``, ``zero_grad``) from the second
round on, when the optimizer has its state and gradients are allocated again.

The peak counts the bytes that tensors take from torch's allocator, which rounds each tensor up on a
GPU. It does not count workspaces of kernels (cuBLAS, collectives), the CUDA context, or the free
parts of the allocator's segments. It predicts ``torch.cuda.max_memory_allocated``. For
``max_memory_reserved``, the allocations and frees that are counted can be recorded.

A compiled program that recomputes, or in which ranks exchange activations, is counted as an eager
one: its compiler chooses when it computes results again and what it keeps of those exchanged, and
may hold more than a count of fused kernels would say.
"""

from __future__ import annotations

import math
from collections import Counter

from autopar.cost_model.memory import allocated_bytes
from autopar.ir.plan_data import PlanData
from autopar.ir.precision import dtype_of
from autopar.ir.schedules import BACKWARD, FORWARD, Action, stages_of_rank
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.folding import Folding, Program
from autopar.memory.fused_calls import divide_into_blocks, fuse_calls
from autopar.memory.gradient_memory import GradientMemory, gather_changes, gather_memory
from autopar.memory.live_memory import ACTIVATIONS, OUTPUTS, TRANSIENT, LiveMemory
from autopar.memory.local_parameters import LocalParameters
from autopar.memory.optimizer_step import optimizer_step
from autopar.memory.parameter_places import ParameterPlaces
from autopar.memory.recorded_step import RecordedStep
from autopar.memory.saved_activations import SavedActivations
from autopar.memory.schedule_walk import ActionMemory, ScheduleWalk
from autopar.memory.stage_calls import StageCalls
from autopar.memory.stage_logs import StageLogs
from autopar.memory.stage_memory import StageMemory
from autopar.memory.staged_calls import StagedCalls
from autopar.memory.steady_state import NotSteadyError
from autopar.memory.step_settings import StepSettings, is_fused
from autopar.rules.analysis import Analysis


class PeakMemory:
    """The peak memory of each pipeline rank of a program.

    Attributes:
        saved_bytes: by stage: the bytes that one microbatch keeps between its forward and its
            backward.
        by_kind: by stage: its part of its rank's peak, bytes by kind.
        folding: which calls were traced.
        recorded: what the rank allocates and frees, where that is recorded.

    Args:
        analysis: the analysis of the graph of one microbatch, cut into the plan's stages.
        program: the plan, or the fields of it that make the program.
        sizes: the mesh's axis sizes, inside one stage.
        settings: how the program runs.
        tracer: traces calls for the device type where the program will run.
        calls: the calls of the graph, with those that may stand for others; by default, every call
            is traced.
        records: whether to record it, for a program of one stage; then every call is traced.
    """

    def __init__(
        self,
        analysis: Analysis,
        program: Program,
        sizes: tuple[int, ...],
        settings: StepSettings,
        tracer: OperatorTracer,
        calls: StagedCalls | None = None,
        records: bool = False,
    ) -> None:
        self.recorded = RecordedStep() if records else None
        self._analysis, self._settings, self._tracer = analysis, settings, tracer
        self._program, self._sizes = program, sizes
        self._allocated = allocated_bytes if settings.device_type == "cuda" else int
        self._calls = calls or StagedCalls.of_single_nodes(analysis)
        self._local = LocalParameters(analysis, self._calls, program.parameters, sizes, settings)
        if records:
            self._count(Folding.of_every_call(self._calls))
            return
        try:
            self._count(Folding(self._calls, program))
        except NotSteadyError:
            self._count(Folding.of_every_call(self._calls))

    def _count(self, folding: Folding) -> None:
        """Counts the stages and then the ranks."""
        self.folding = folding
        logs, self._stages = self._traced_stages(folding), list[StageMemory]()
        for number in range(self._settings.stages):
            self._stages.append(self._stage(number, logs, folding))
        self.saved_bytes = [float(stage.saved_bytes) for stage in self._stages]
        self.by_kind: list[dict[str, float]] = [{} for _ in self._stages]
        settings, early = self._settings, self._settings.early_messages()
        for rank, order in enumerate(settings.orders()):
            own = stages_of_rank(rank, settings.stages, settings.pipeline)
            for stage, kinds in self._walk(own, order, early[rank]).items():
                self.by_kind[stage] = {kind: float(n) for kind, n in kinds.items() if n}

    # The stages

    def _traced_stages(self, folding: Folding) -> dict[int, StageLogs]:
        program, settings = self._program, self._settings
        trace = CallTrace(
            self._analysis,
            program,
            self._sizes,
            self._tracer,
            settings.reduction_dtype,
            folding,
        )
        saved = SavedActivations(trace)
        recomputed = saved.recomputed_calls(program.recomputed)
        offloaded = saved.offloaded_calls(program.offloaded)
        if settings.is_compiled:
            sent = (arrival.sent for arrival in trace.arrivals)
            lasting = {s for s in (*trace.outputs, *sent) if s is not None}
            if math.prod(self._sizes) > 1:
                divide_into_blocks(trace.calls, self._analysis.graph, folding)
            fuse_calls(trace.calls, lasting)
        found = {}
        for stage in sorted(set(folding.like)):
            picked = self._picked_bytes(stage)
            calls = StageCalls(trace, saved, stage, recomputed, offloaded, picked)
            places, records = ParameterPlaces(folding, stage), self.recorded is not None
            found[stage] = StageLogs(calls, settings, places, records)
        return found

    def _stage(self, number: int, logs: dict[int, StageLogs], folding: Folding) -> StageMemory:
        own = slice(number % self._settings.pipeline, None, self._settings.pipeline)
        trained = {
            name
            for stage in range(self._settings.stages)[own]
            for name in logs[folding.like[stage]].trained(stage)
        }
        owners = {name: g for stage in self._stages[own] for name, g in stage.owners.items()}
        parameters = [
            self._local.parameter(name, name in trained)
            for name in self._local.used(number)
            if self._local.is_parameter(name) and name not in owners
        ]
        is_direct = (
            math.prod(self._sizes) == self._settings.microbatches == self._settings.stages == 1
        )
        gradients = GradientMemory(parameters, is_direct, self._settings.reduction_dtype)
        owners |= {parameter.name: gradients for parameter in parameters}
        like = logs[folding.like[number]]
        return StageMemory(number, like, self._settings, folding, parameters, gradients, owners)

    def _picked_bytes(self, stage: int) -> int:
        """Bytes of the copies of a microbatch's samples of the batch.

        With data parallelism the samples of a microbatch are not contiguous in the batch, because
        each rank's part of the batch has some of them. Then the step copies them.
        """
        if self._settings.microbatches == 1 or self._settings.data_degree == 1:
            return 0
        nodes = {
            node
            for at, node in self._calls.inputs
            if at in (stage, None) and self._analysis.batch.dim(node) is not None
        }
        tensors = [node.meta["val"] for node in nodes]
        return sum(self._allocated(t.numel() * t.dtype.itemsize) for t in tensors)

    # The step of a rank

    def _walk(
        self, own: range, order: list[Action], early: list[list[Action]]
    ) -> dict[int, dict[str, int]]:
        """Walks through a rank's step. Returns the bytes at its peak, by stage and kind."""
        walk = ScheduleWalk(own, self._settings.is_looped, self.recorded)
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
        if self._settings.traits.runs_as == "1f1b" and before is not None and after is not None:
            kinds = before.kind, action.kind
            if not walk.has_held and kinds == (FORWARD, FORWARD) and after.kind == BACKWARD:
                walk.hold_sent(before.stage, before.microbatch)
            elif kinds == (BACKWARD, BACKWARD):
                walk.release_held()

    def _add_permanent(self, stage: int, own: range, walk: ScheduleWalk) -> None:
        """Adds parameters, buffers, the optimizer's state and the batch."""
        seen = {name for other in own if other < stage for name in self._local.used(other)}
        for name in self._local.used(stage):
            if name not in seen:
                memory = self._local.memory(name)
                walk.add_permanent(stage, "parameters", memory.parameters, name)
                if not self._local.is_offloaded(name):
                    walk.add_permanent(stage, "optimizer", memory.optimizer, name)
        if stage == own[0]:
            hoisted = (n for n in self._analysis.hoisted if n.meta["val"].ndim)
            for node in (*self._analysis.inputs, *hoisted):
                val, has_batch = node.meta["val"], self._analysis.batch.dim(node) is not None
                times = self._settings.microbatches if has_batch else 1
                nbytes = self._allocated(val.numel() * val.dtype.itemsize * times)
                walk.add_permanent(stage, "inputs", nbytes, node.name)

    def _gather(self, own: range, walk: ScheduleWalk) -> None:
        """The step starts: it casts and gathers the parameters."""
        parameters = {p.name: p for stage in own for p in self._stages[stage].parameters}
        copies, gathered, temporary = gather_memory(list(parameters.values()))
        made = {"compute copies": copies, "gathered parameters": gathered}
        at_peak = {**made, TRANSIENT: temporary}
        memory = ActionMemory(made, copies + gathered + temporary, at_peak)
        if self.recorded is not None:
            memory = memory.recorded(gather_changes(list(parameters.values())))
        walk.run_action(own[0], memory)
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
            live = LiveMemory(self.recorded is not None)
            stage.gradients.finish(live)
            walk.run_action(number, ActionMemory.of(live))
        parameters = [p for stage in stages.values() for p in stage.parameters]
        shared = sum(p.stored_bytes for p in parameters if self._local.is_shared(p.name))
        walk.run_action(own[0], ActionMemory.temporary(TRANSIENT, shared))
        walk.close()
        trained = [p for p in parameters if p.is_trainable]
        together = math.prod(self._sizes) > 1 or self._settings.device_type == "cuda"
        walk.run_action(own[0], optimizer_step(trained, self._local, self._settings, together))


def peak_memory_of_plan(
    analysis: Analysis,
    plan: PlanData,
    optimizer: str,
    tracer: OperatorTracer,
    calls: StagedCalls | None = None,
    records: bool = False,
) -> PeakMemory:
    """The peak memory of a plan.

    Args:
        analysis: the analysis of the graph of one microbatch, cut into the plan's stages.
        plan: the plan.
        optimizer: the optimizer's name.
        tracer: traces calls for the device type where the program will run.
        calls, records: as for :class:`PeakMemory`.
    """
    settings = StepSettings(
        plan.pipeline,
        len(plan.stages),
        plan.schedule,
        plan.microbatches,
        plan.data_degree,
        optimizer,
        dtype_of(plan.reduce_dtype),
        tracer.device_type,
        is_fused(plan.backend, plan, analysis.graph),
    )
    return PeakMemory(analysis, plan, plan.mesh_sizes, settings, tracer, calls, records)
