"""One step of a program: a call, and the backward through what the call returns.

A step gathers the parameters, runs forwards and backwards in the order of :mod:`work_order` (each
timed, and the gradients synchronised, by :mod:`step_work`), and attaches the outputs to autograd
(:mod:`autograd_bridge`), so that a backward through them leaves gradients in the parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from autopar.errors import RunError
from autopar.ir.layout import P
from autopar.ir.precision import dtype_of
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.compilation.backends import Backend
from autopar.runtime.dtensors.sharding import as_dtensor
from autopar.runtime.parameters.gather import Gather
from autopar.runtime.parameters.gradient_handlers import GradientHandlers
from autopar.runtime.parameters.gradients import Gradients, GradientSync
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.model_state import ModelState
from autopar.runtime.parameters.weight import Weight
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.step.autograd_bridge import (
    AutogradBridge,
    BackwardWork,
    FinishedBackward,
    PendingBackward,
    detach_inputs,
    take_gradients,
)
from autopar.runtime.step.gradient_paths import GradientPaths
from autopar.runtime.step.loss import LossScale, LossSum
from autopar.runtime.step.matmul_precision import MatmulPrecision
from autopar.runtime.step.program_variants import ProgramVariant
from autopar.runtime.step.prologue import Prologue
from autopar.runtime.step.rank_stages import RankStages
from autopar.runtime.step.stage_gradients import StageGradients, state_in_order_of_use
from autopar.runtime.step.step_work import (
    DirectBackward,
    StepWork,
    Synchronisation,
)
from autopar.runtime.step.work_order import (
    Computed,
    MicrobatchLoop,
    PipelineSchedule,
    WholeBatch,
    WorkOrder,
)

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel


class StepRunner:
    """Runs the steps of ``lowered`` with the parameters and buffers in ``state``.

    Arguments: ``holders``, which pipeline ranks hold which tensors (None: there is no pipeline);
    ``loss``, its place among the outputs; ``names``, those of the inputs; ``on_backward``, a hook
    for the gradient of each loss; ``backend`` runs the programs.

    Attributes: ``stages``, those of this rank (None: there is no pipeline); ``weights``, the
    parameters that the program of this rank takes; ``remote_state``, the names of the tensors of
    the model's state that only other pipeline ranks hold; ``loss_scale``, the gradient of the loss
    with which a backward inside the call begins; ``gradient_handlers``, the user's functions that
    see the gradients; ``waits``, whether the gradients of the next calls wait for their sum.
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
        backend: Backend,
    ) -> None:
        self._plan, self._lowered, self._mesh, self._state = plan, lowered, mesh, state
        self._loss, self.loss_scale, self.waits = loss, LossScale(), False
        self.gradient_handlers = handlers = GradientHandlers()
        self.remote_state = _remote_state(captured, state)
        self.weights = _in_order_of_use(lowered, state)
        self._gather = Gather(self.weights, mesh)
        self._matmul_precision = MatmulPrecision(plan.precision == "tf32")
        self._prologue = Prologue(lowered, mesh, state, plan.microbatches, names)
        microbatches = Microbatches(plan, lowered) if plan.microbatches > 1 else None
        self.stages: RankStages | None = None
        if holders:
            by_stage = StageGradients(plan, lowered, mesh, state.weights, holders, handlers)
            sync: Synchronisation = by_stage
            begin, scale = by_stage.begin_stage, self.loss_scale
            self.stages = RankStages(plan, lowered, mesh, microbatches, loss, begin, scale)
        else:
            sync = GradientSync(self.weights, mesh, handlers, dtype=dtype_of(plan.reduce_dtype))
        self._work = StepWork(captured, lowered, mesh, state, microbatches, loss, sync, backend)
        self._order = self._work_order(captured, microbatches)
        self._loss_sum = LossSum(self._loss_group(), on_backward)
        self._bridge: AutogradBridge | None = None
        in_call = self.stages is not None or microbatches is not None
        if in_call or any(weight.leaf is not weight.parameter for weight in self.weights):
            self._bridge = AutogradBridge(self.weights, sync.deliver, handlers, mesh.device)
        # Without a bridge autograd accumulates into the parameters themselves.
        self._direct = DirectBackward(mesh.recorder, self._matmul_precision)

    def _work_order(self, captured: CapturedModel, microbatches: Microbatches | None) -> WorkOrder:
        if self.stages is not None:
            trained = {name for name, tensor in captured.state.items() if tensor.requires_grad}
            paths = GradientPaths(self._lowered, self._mesh, self._state.weights, trained)
            return PipelineSchedule(self._work, self.stages, paths, self._loss)
        if microbatches is not None:
            return MicrobatchLoop(self._work, microbatches, self._loss, self.loss_scale)
        return WholeBatch(self._work)

    def _loss_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that hold shares of the loss; None if each rank has all of it."""
        if self.stages is not None:
            return self.stages.loss_group
        layout = self._lowered.output_layouts[self._loss]
        axes = [axis for axis, t in enumerate(layout) if t is P and self._mesh.sizes[axis] > 1]
        return self._mesh.axes_group(axes) if axes else None

    def __call__(self, inputs: list[torch.Tensor], variant: ProgramVariant) -> list[torch.Tensor]:
        """The outputs of the program ``variant`` for the whole batch ``inputs``: the loss is that
        of the whole batch, and so are other scalars; other outputs are DTensors.
        """
        self.end_step()
        with self._matmul_precision:
            self._open_parameters()
            self.gradient_handlers.attach(self.weights)
            leaves, places = detach_inputs(inputs) if self._bridge is not None else (inputs, [])
            computed = self._compute(variant, self._arguments(inputs, leaves), places)
            if computed.gradients is not None or not any(computed.has_gradient):
                self._gather.close()
            outputs = self._attach(
                computed, [leaves[i] for i in places], [inputs[i] for i in places]
            )
            return [self._present(output, i) for i, output in enumerate(outputs)]

    def _compute(
        self, variant: ProgramVariant, arguments: Sequence[Any], places: Sequence[int]
    ) -> Computed:
        try:
            return self._order.run(variant, arguments, places)
        except BaseException:
            self._work.sync.clear()  # a step that failed leaves no gradients
            raise

    def _arguments(
        self, inputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> list[Any]:
        state = [
            None if name in self.remote_state else self._state.graph_argument(name)
            for name in self._lowered.state
        ]
        needs_prologue = self.stages is None or self.stages.needs_prologue
        return [*state, *leaves, *(self._prologue.run(inputs) if needs_prologue else ())]

    def _attach(
        self, computed: Computed, leaves: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The outputs as functions of the parameters and of ``inputs``, those that require a
        gradient; ``leaves`` took the inputs' place in the program.
        """
        outputs, has_gradient = computed.outputs, computed.has_gradient
        if not any(has_gradient):
            return outputs
        if self._bridge is None:
            for output in outputs:
                if output.requires_grad:
                    self._direct.watch(output)
            return outputs
        if computed.gradients is None:
            backward = partial(self._backward, self.waits)
            work: BackwardWork = PendingBackward(outputs, leaves, backward)
        else:
            of_inputs = take_gradients(leaves)
            if self.stages is not None:
                of_inputs = self.stages.sum_input_gradients(leaves, of_inputs)
            scale, how = self.loss_scale.value, self._how_it_runs()
            work = FinishedBackward(computed.gradients, of_inputs, self._loss, how, scale)
        return self._bridge(outputs, has_gradient, work, inputs)

    def _how_it_runs(self) -> str:
        """For an error message, how the program runs with its backward inside the call."""
        if self.stages is not None:
            return f"in a pipeline of {self._plan.pipeline} ranks"
        return f"in {self._plan.microbatches} microbatches"

    def _backward(
        self,
        waits: bool,
        roots: list[GradientEdge],
        gradients: list[torch.Tensor],
        retain_graph: bool,
        may_wait: bool,
    ) -> Gradients:
        """The backward of the whole batch, which the user asked for after the call; ``waits``,
        whether its gradients should wait for their sum.
        """
        sync = self._work.sync
        assert isinstance(sync, GradientSync)
        self._open_parameters()
        sync.clear()
        waits = waits and may_wait and sync.may_wait
        if may_wait and not waits:
            sync.take_waiting()
        self._work.backward(roots, gradients, last=not waits, retain_graph=retain_graph)
        found = sync.keep_waiting() if waits else sync.finish()
        self.end_step()
        return found

    def _present(self, output: torch.Tensor, i: int) -> torch.Tensor:
        """Output ``i`` as the user gets it."""
        if i == self._loss:
            return self._loss_sum(output)
        found = (
            self.stages.output_as_dtensor(output, i)
            if self.stages is not None
            else as_dtensor(output, self._lowered.output_layouts[i], self._mesh)
        )
        # ``item()`` of a DTensor that is a pending sum would return this rank's share.
        return found if found.ndim else found.full_tensor()

    def _open_parameters(self) -> None:
        """Before forwards and before a backward: leaves have the parameters' values."""
        self._matmul_precision.open()
        for weight in self.weights:
            weight.refresh()
        if not self._gather.is_open:
            self._gather.open()

    def end_step(self) -> None:
        """After a step, also one that failed: no collective is under way, and gathered parameters
        are freed.
        """
        self._matmul_precision.close()
        self._loss_sum.wait()
        self._gather.close()

    def trained_parameters(self) -> int:
        """A number that tells the sets of parameters apart that are not frozen; 0 under a
        pipeline, whose ranks have different parameters.
        """
        if self.stages is not None:
            return 0
        return zlib.crc32(bytes([weight.parameter.requires_grad for weight in self.weights]))

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises :class:`RunError`, on every rank, if an input would lose a gradient."""
        self._prologue.check_inputs(inputs)

    def check_stages(self) -> None:
        """Raises :class:`RunError` under a pipeline after a step that failed, and under autocast:
        stages receive tensors in the dtypes of the graph.
        """
        if self.stages is None:
            return
        self.stages.check()
        if torch.is_autocast_enabled(self._mesh.device.type):
            raise RunError(
                "the program is called under torch.autocast, and the stages of its pipeline send "
                "each other tensors in the dtypes of the graph that was captured: call it "
                'without, and compile with precision="bf16"'
            )


def _remote_state(captured: CapturedModel, state: ModelState) -> set[str]:
    tensors = (*captured.state, *captured.aliases)
    return {name for name in tensors if state.user_tensor(name, captured.aliases) is None}


def _in_order_of_use(lowered: LoweredModel, state: ModelState) -> list[Weight]:
    """The parameters of this rank: those that the program uses, in that order, then the others."""
    used = state_in_order_of_use(lowered.train.graph, dict(enumerate(lowered.state)))
    names = dict.fromkeys((*used, *lowered.state))
    return [state.weights[name] for name in names if name in state.weights]
