"""Runs the stages of one pipeline rank: from the arguments of the whole program to its outputs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.ir.schedules import stages_of_rank
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import convert_for_dtensor
from autopar.runtime.compilation.block_parts import Run
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.pipeline.torch_pipelining import ScheduleRunner, StageBoundary
from autopar.runtime.step.loss import LossScale

if TYPE_CHECKING:
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.passes.lowering.split_stages import BoundaryTensor, StageProgram


class RankStages:
    """Runs the stages of this rank for one call of the program.

    Arguments: ``microbatches`` cuts the batch (None: there is one microbatch); ``loss``, its place
    among the outputs; ``on_last_backward(stage)`` is called before the last backward of each stage;
    ``loss_scale``, the gradient of the loss that backwards begin with.

    Attributes: ``loss_group``, the ranks that hold shares of the loss.
    """

    def __init__(
        self,
        plan: PlanData,
        lowered: LoweredModel,
        mesh: Mesh,
        microbatches: Microbatches | None,
        loss: int,
        on_last_backward: Callable[[int], None],
        loss_scale: LossScale,
    ) -> None:
        self._loss_scale = loss_scale
        self._mesh, self._lowered, self._loss = mesh, lowered, loss
        self._microbatches, self._count = microbatches, plan.microbatches
        self._own = stages_of_rank(mesh.pipeline_rank, len(plan.stages), mesh.pipeline)
        self._modules: dict[StageProgram, fx.GraphModule] = {}
        programs = [stage.train for stage in lowered.stages]
        # The pipeline rank that makes each output.
        self._makers = {
            result: stage % mesh.pipeline
            for stage, program in enumerate(programs)
            for result in program.results
        }
        self._schedule_runner = ScheduleRunner(
            plan.schedule,
            plan.microbatches,
            len(plan.stages),
            [StageBoundary(i, programs[i].received, programs[i].sent) for i in self._own],
            mesh,
            self._forward,
            on_last_backward,
        )
        layout = lowered.output_layouts[loss]
        axes = [axis for axis, t in enumerate(layout) if t.kind == "P" and mesh.sizes[axis] > 1]
        self.loss_group = mesh.pipeline_group(axes)
        self._call: _Call | None = None

    @property
    def needs_prologue(self) -> bool:
        """Whether a stage of this rank takes values of the prologue."""
        first = len(self._lowered.state) + len(self._lowered.input_time_types)
        return any(
            place >= first
            for stage in self._own
            for place in self._lowered.stages[stage].train.used_placeholders
        )

    def programs(self, stages: Sequence[StageProgram]) -> list[fx.GraphModule]:
        """The programs of this rank, given those of all ``stages``."""
        return [self._module(stages[i]) for i in self._own]

    def _module(self, graph: StageProgram) -> fx.GraphModule:
        if graph not in self._modules:
            self._modules[graph] = fx.GraphModule(nn.Module(), graph.graph, "Stage")
        return self._modules[graph]

    def check(self) -> None:
        """Raises :class:`RunError` after a step that failed."""
        self._schedule_runner.check()

    def run(
        self,
        compute: Run,
        values: Sequence[torch.Tensor | None],
        update: Callable[[int, torch.Tensor], None],
        stages: Sequence[StageProgram],
        backward: bool,
        returned: Collection[BoundaryTensor] = (),
    ) -> dict[int, list[torch.Tensor]]:
        """Runs one call. Returns the outputs that this rank's stages made, by their places, of each
        microbatch.

        Arguments: ``compute`` is :meth:`StepWork.compute`; ``values`` are the arguments of the
        whole program (None: this rank does not hold it); ``update(i, value)`` writes a buffer's new
        value; ``stages`` are those of all ranks, in their current modes; ``backward``, whether to
        run the backward, in which gradients come back for the tensors ``returned``.
        """
        self._call = _Call(compute, values, update, stages)
        try:
            with torch.set_grad_enabled(backward):
                self._schedule_runner.run(backward, returned)
            return self._call.made
        finally:
            self._call = None

    def sum_input_gradients(
        self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs ``leaves``: the sums of all stages' shares ``gradients``."""
        sums = [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
        ]
        for gradient in sums:
            dist.all_reduce(gradient, group=self._mesh.pipeline_group())
        return list(sums)

    def _forward(
        self, index: int, number: int, received: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The forward of one stage for one microbatch: the tensors that it sends, and the loss."""
        call = self._call
        assert call is not None
        graph = call.stages[index]
        self._mesh.random_streams.microbatch = number
        arguments = [self._argument(call, i, number) for i in graph.used_placeholders]
        flat = call.compute(self._module(graph), [*arguments, *received], self._roots(graph))
        sent, results = flat[: len(graph.sent)], flat[len(graph.sent) :]
        for i, value in zip(graph.updates, results[len(graph.results) :], strict=True):
            call.update(i, value)
        loss = None
        for i, value in zip(graph.results, results, strict=False):
            call.made[i].append(value.detach())
            loss = self._loss_scale.scaled(value) if i == self._loss else loss
        return list(sent), loss

    def _roots(self, graph: StageProgram) -> list[int]:
        """The places of the results of a stage at which its backward may begin."""
        places = enumerate(graph.results, len(graph.sent))
        return [
            *(i for i, tensor in enumerate(graph.sent) if tensor.sources),
            *(i for i, result in places if result == self._loss),
        ]

    def _argument(self, call: _Call, i: int, number: int) -> torch.Tensor:
        value = call.values[i]
        assert value is not None
        place = i - len(self._lowered.state)
        if self._microbatches is None or place < 0:
            return value
        return self._microbatches.select_input(value, place, number)

    def join(self, made: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs of the whole batch, from those of microbatches, which it removes from
        ``made``. The outputs of other ranks' stages are zeros that take no memory.
        """
        outputs = self._lowered.train.graph.output_node().args[0]
        results = []
        for i in range(len(self._lowered.output_layouts)):
            if i in made:
                tensors = made.pop(i)
                results.append(
                    self._microbatches.join_output(i, tensors)
                    if self._microbatches is not None
                    else tensors[0]
                )
                del tensors
                continue
            meta = outputs[i].meta  # type: ignore[index, union-attr]
            shape = list(meta["val"].shape if i == self._loss else meta["local"])
            if (t := self._lowered.output_time_types[i]).is_shard:
                shape[t.dim] *= self._count
            results.append(
                torch.zeros((), dtype=meta["val"].dtype, device=self._mesh.device).expand(shape)
            )
        return results

    def output_as_dtensor(self, output: torch.Tensor, i: int) -> DTensor:
        """Output ``i`` as a DTensor on all ranks: a pending sum over the pipeline, in which the
        shares of other ranks than its maker are zeros.
        """
        mesh = self._mesh
        output, placed = convert_for_dtensor(output, self._lowered.output_layouts[i], mesh)
        along: Partial | Replicate = Partial()
        if output.dtype == torch.bool:  # without a sum
            sent = output.to(torch.uint8).contiguous()
            source = mesh.rank_of_stage(self._makers[i])
            dist.broadcast(sent, source, group=mesh.pipeline_group())
            output, along = sent.bool(), Replicate()
        placements = mesh.with_pipeline(placed, along)
        return DTensor.from_local(output, mesh.world, placements, run_check=False)


@dataclasses.dataclass
class _Call:
    """The arguments of :meth:`RankStages.run`, and the outputs that its stages have made."""

    compute: Run
    values: Sequence[torch.Tensor | None]
    update: Callable[[int, torch.Tensor], None]
    stages: Sequence[StageProgram]
    made: dict[int, list[torch.Tensor]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
