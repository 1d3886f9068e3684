"""How one call of a lowered program runs on this rank: whole, in microbatches, or as the stages of
a pipeline.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.ir.layout import P
from autopar.ir.precision import dtype_of
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.sharding import as_dtensor
from autopar.runtime.measure.autograd_engine import BackwardObserver
from autopar.runtime.measure.step_recorder import BackwardTimer, Mark
from autopar.runtime.parameters.gather import Gather
from autopar.runtime.parameters.gradients import GradientSync
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.model_state import ModelState
from autopar.runtime.pipeline import recompute
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.step.autograd_bridge import (
    AutogradBridge,
    FinishedBackward,
    PendingBackward,
    detach_inputs,
    take_gradients,
)
from autopar.runtime.step.loss import PendingLoss, finish, total
from autopar.runtime.step.matmul_precision import MatmulPrecision
from autopar.runtime.step.program_variants import ProgramVariant
from autopar.runtime.step.rank_stages import RankStages, state_in_order_of_use

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel


class StepRunner:
    """Runs calls of ``lowered`` with the parameters and buffers in ``state``.

    ``loss`` is the place of the loss among the outputs; ``names`` are those of the inputs;
    ``on_backward``, if given, is a hook for the gradient of each loss.

    Attributes: ``stages``, those of this rank, None without a pipeline; ``weights``, the parameters
    that the program of this rank takes; ``absent``, the names of the tensors of the model's state
    that only other ranks of the pipeline hold.
    """

    def __init__(
        self,
        captured: CapturedModel,
        plan: PlanData,
        lowered: LoweredModel,
        mesh: Mesh,
        state: ModelState,
        holders: Holders | None,
        *,
        loss: int,
        names: Sequence[str],
        on_backward: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._plan, self._lowered, self._mesh, self._state = plan, lowered, mesh, state
        self._loss_place, self._names, self._on_backward = loss, names, on_backward
        self._updates = captured.updates
        self._matmul_precision = MatmulPrecision(plan.precision == "tf32")
        self.absent = {
            name
            for name in (*captured.state, *captured.aliases)
            if state.user_tensor(name, captured.aliases) is None
        }
        shares = [
            axis
            for axis, t in enumerate(lowered.output_layouts[loss])
            if t is P and mesh.sizes[axis] > 1
        ]
        self._loss_group = mesh.axes_group(shares) if shares else None
        self._loss: torch.Tensor | None = (
            None  # the last one's sum, not itself: its graph leads here
        )
        used = state_in_order_of_use(lowered.train.graph, dict(enumerate(lowered.state)))
        self.weights = [
            state.weights[name]
            for name in dict.fromkeys((*used, *lowered.state))
            if name in state.weights
        ]
        self._gather = Gather(self.weights, mesh)
        own = () if holders else self.weights  # stages synchronise their own
        self._sync = GradientSync(own, mesh, dtype=dtype_of(plan.reduce_dtype))
        self._timed = BackwardTimer(mesh.recorder)
        self._around = (
            BackwardObserver(self._reopen, self.settle) if self._matmul_precision.wanted else None
        )
        self._release: AutogradBridge | None = (
            None  # where autograd accumulates into the parameters themselves there is nothing to do
        )
        if (
            holders
            or plan.microbatches > 1
            or any(weight.leaf is not weight.parameter for weight in self.weights)
        ):
            self._release = AutogradBridge(self.weights, self._sync, mesh.device)
        self._parts = Microbatches(plan, lowered) if plan.microbatches > 1 else None
        self.stages: RankStages | None = None
        if holders:
            trained = {name for name, tensor in captured.state.items() if tensor.requires_grad}
            self.stages = RankStages(
                plan, lowered, mesh, state.weights, self._parts, loss, holders, trained
            )
        self._variant: ProgramVariant | None = None  # of the call that runs

    def __call__(self, inputs: list[torch.Tensor], variant: ProgramVariant) -> list[torch.Tensor]:
        """The outputs of one call of the program ``variant`` with the whole batch ``inputs``, the
        loss that of the whole batch.
        """
        self._variant = variant
        self.settle()
        with self._matmul_precision:
            return self._call(inputs)

    def _call(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self._refresh()
        self._gather.open()
        if self.stages is not None:
            return self._staged(self.stages, inputs)
        state = [self._state.graph_argument(name) for name in self._lowered.state]
        extra = self._counted(inputs)
        outputs = (
            self._whole(state, inputs, extra)
            if self._parts is None
            else self._in_parts(self._parts, state, inputs, extra)
        )
        if not any(output.requires_grad for output in outputs):
            self._gather.close()
        return self._presented(outputs)

    def trains(self) -> int:
        """A number for the parameters that are not frozen; 0 under a pipeline, where ranks have
        different ones.
        """
        return (
            0
            if self.stages is not None
            else zlib.crc32(bytes([weight.parameter.requires_grad for weight in self.weights]))
        )

    def check(self) -> None:
        """Raises :class:`RunError` under a pipeline after a step that failed, and under autocast:
        stages expect the dtypes of the graph.
        """
        if self.stages is None:
            return
        self.stages.check()
        if torch.is_autocast_enabled(self._mesh.device.type):
            raise RunError(
                "the program is called under torch.autocast, and the stages of its pipeline send "
                "each other tensors in the dtypes of the "
                'graph that was captured: call it without, and compile with precision="bf16"'
            )

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises :class:`RunError`, on every rank, where an input would lose a gradient: what the
        prologue computes from it has none.
        """
        prologue = self._lowered.prologue
        if (
            prologue is None
            or not torch.is_grad_enabled()
            or not any(x.requires_grad for x in inputs)
        ):
            return
        placeholders = [n for n in prologue.graph.nodes if n.op == "placeholder"][
            1 + len(self._lowered.state) :
        ]
        for x, read, name in zip(inputs, placeholders, self._names, strict=True):
            if x.requires_grad and read.users:
                raise RunError(
                    f"{name} requires a gradient, and the program computes something of the whole "
                    "batch from it before its "
                    f"{self._plan.microbatches} microbatches, without gradient: compile with a "
                    f"sample in which {name} requires one, or "
                    "pass it detached"
                )

    def _counted(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is computed of the whole batch, once for all microbatches."""
        prologue = self._lowered.prologue
        if prologue is None:
            return []
        # It takes the whole batch on every rank, so it takes class weights whole, however the graph
        # cuts them.
        placeholders = [n for n in prologue.graph.nodes if n.op == "placeholder"][1:]
        state = [
            self._entire(name) if p.users else None
            for name, p in zip(self._lowered.state, placeholders, strict=False)
        ]
        with torch.no_grad():
            return list(prologue(self._mesh, *state, *inputs))

    def _entire(self, name: str) -> torch.Tensor:
        """A tensor of the state, whole, as the graph takes it."""
        if name in self._state.buffers:
            return self._state.buffers[name]
        weight = self._state.weights[name]
        parameter = weight.parameter.detach().to(weight.leaf.dtype)
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _run(
        self, state: list[torch.Tensor], inputs: list[torch.Tensor], extra: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        assert self._variant is not None
        flat = self._compute(self._variant.program, [*state, *inputs, *extra])
        size = len(self._lowered.output_layouts)
        for i, value in enumerate(flat[size:]):
            self._update(i, value)
        return list(flat[:size])

    def _compute(
        self, program: fx.GraphModule, arguments: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Calls a program of this rank, the whole or a stage."""
        return recompute.run(program, self._mesh, arguments)

    @torch.no_grad()
    def _update(self, i: int, value: torch.Tensor) -> None:
        """Gives a buffer the new value that the program returned as number ``i``; of microbatches,
        when the last one has.
        """
        if self._variant is not None and i in self._variant.kept:
            return
        if self._parts is not None:
            joined = self._parts.join_update(i, value, self._mesh.random_streams.microbatch)
            if joined is None:
                return
            value = joined
        self._state.buffers[self._updates[i]].copy_(value)

    def _whole(
        self, state: list[torch.Tensor], inputs: list[torch.Tensor], extra: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        leaves, places = detach_inputs(inputs) if self._release is not None else (inputs, [])
        since = self._mesh.recorder.begin_compute("forward")
        outputs = self._run(state, leaves, extra)
        self._mesh.recorder.end_compute(since)
        differ = [output.requires_grad for output in outputs]
        if self._release is not None and any(differ):
            started: list[Mark] = []

            def begins() -> None:
                started.append(self._mesh.recorder.begin_compute("backward"))
                self._reopen()

            work = PendingBackward(
                outputs,
                [leaves[i] for i in places],
                self._sync,
                begins,
                lambda: self._mesh.recorder.end_compute(started.pop()),
                self.settle,
            )
            return self._release(outputs, differ, work, [inputs[i] for i in places])
        for output in outputs:
            if output.requires_grad:
                self._timed.watch(output)
                if self._around is not None:
                    self._around.watch(output)
        return outputs

    def _in_parts(
        self,
        joining: Microbatches,
        state: list[torch.Tensor],
        inputs: list[torch.Tensor],
        extra: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Forward and backward of one microbatch after another; the gradients wait for the loss's
        backward.
        """
        assert self._release is not None
        done: list[list[torch.Tensor]] = []
        differ: list[bool] = []
        leaves, places = detach_inputs(inputs)
        self._sync.clear()
        for number in range(joining.count):
            self._mesh.random_streams.microbatch = number
            since = self._mesh.recorder.begin_compute("forward")
            outputs = self._run(state, joining.select([*leaves, *extra], number), [])
            self._mesh.recorder.end_compute(since)
            loss, differ = outputs[self._loss_place], [output.requires_grad for output in outputs]
            if loss.requires_grad:
                if number == joining.count - 1:
                    self._sync.begin()
                since = self._mesh.recorder.begin_compute("backward")
                loss.backward()
                self._mesh.recorder.end_compute(since)
            done.append([output.detach() for output in outputs])
            del outputs, loss
        results = joining.join(done)
        del done
        if not any(differ):
            return results
        gradients = self._sync.finish() if differ[self._loss_place] else []
        self._gather.close()
        work = FinishedBackward(
            gradients,
            take_gradients([leaves[i] for i in places]),
            self._loss_place,
            self._only_the_loss(),
        )
        return self._release(results, differ, work, [inputs[i] for i in places])

    def _only_the_loss(self) -> str:
        how = (
            f"in {self._plan.microbatches} microbatches"
            if self.stages is None
            else f"in a pipeline of {self._plan.pipeline} ranks"
        )
        return (
            "a gradient came back through an output that is not the loss: the program runs "
            f"{how}, forward and backward inside the "
            "call, so that only what is in its own loss can have gradients. Compute what you add "
            "in the model, or in "
            "loss_fn(output, batch); detach() an output that is only read; or compile without a "
            "pipeline and with micro_batch_size= a "
            "rank's whole share of the batch"
        )

    def _staged(self, stages: RankStages, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The whole schedule; the gradients wait for the loss's backward."""
        assert self._release is not None
        counted = self._lowered.prologue is not None and stages.counts
        extra = self._counted(inputs) if counted else []
        leaves, places = detach_inputs(inputs)
        state = [
            None if name in self.absent else self._state.graph_argument(name)
            for name in self._lowered.state
        ]
        differ, crossings = (
            stages.differ(places)
            if torch.is_grad_enabled()
            else ([False] * len(self._lowered.output_layouts), set())
        )
        backward = differ[self._loss_place]
        assert self._variant is not None
        values = [*state, *leaves, *extra]
        outputs, gradients = stages.run(
            self._compute, values, self._update, self._variant.stages, backward, crossings
        )
        self._gather.close()
        if any(differ):
            work = FinishedBackward(
                gradients,
                stages.whole([leaves[i] for i in places]),
                self._loss_place,
                self._only_the_loss(),
            )
            outputs = self._release(outputs, differ, work, [inputs[i] for i in places])
        return [
            self._summed(output, stages.loss_group)
            if i == self._loss_place
            else stages.output_as_dtensor(output, i)
            for i, output in enumerate(outputs)
        ]

    def _presented(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        layouts = self._lowered.output_layouts
        return [
            self._summed(output, self._loss_group)
            if i == self._loss_place
            else as_dtensor(output, layout, self._mesh)
            for i, (output, layout) in enumerate(zip(outputs, layouts, strict=True))
        ]

    def _summed(self, share: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if self._on_backward is not None and share.requires_grad:
            share.register_hook(self._on_backward)
        loss = share if group is None else total(share, group)
        self._loss = loss.pending if isinstance(loss, PendingLoss) else None
        return loss

    def settle(self) -> None:
        """After a step, also one that failed: nothing is under way, and gathered parameters are let
        go.
        """
        self._matmul_precision.close()
        if self._loss is not None:
            finish(self._loss)
            self._loss = None
        self._gather.close()

    def _refresh(self) -> None:
        for weight in self.weights:
            weight.refresh()

    def _reopen(self) -> None:
        """Before a backward."""
        self._matmul_precision.open()
        self._refresh()
        if not self._gather.is_open:
            self._gather.open()
