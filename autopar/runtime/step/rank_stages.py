"""One rank's stages of a pipelined program: what they take, what they make, and what ranks of the
pipeline share.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.ir.precision import dtype_of
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import convert_for_dtensor
from autopar.runtime.parameters.gradients import Gradients, GradientSync
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.shared_parameters import SharedParameters
from autopar.runtime.parameters.weight import Weight
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.pipeline.torch_pipelining import ScheduleRunner, StageBoundary
from autopar.runtime.step.autograd_bridge import take_gradients

if TYPE_CHECKING:
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.passes.lowering.split_stages import BoundaryTensor, StageProgram


class RankStages:
    """Runs the stages of this rank for one call of the program.

    ``weights`` are the parameters that this rank holds; ``parts`` cuts the batch (None: there is
    one microbatch); ``loss`` is its place among the outputs; ``trained`` are the parameters that
    were when it was compiled, of all stages.
    """

    def __init__(
        self,
        plan: PlanData,
        lowered: LoweredModel,
        mesh: Mesh,
        weights: Mapping[str, Weight],
        parts: Microbatches | None,
        loss: int,
        holders: Holders,
        trained: Collection[str],
    ) -> None:
        self._weights = weights
        self._mesh, self._lowered, self._parts, self._loss, self._microbatches = (
            mesh,
            lowered,
            parts,
            loss,
            plan.microbatches,
        )
        self._reduce_dtype = dtype_of(plan.reduce_dtype)
        self._own = range(mesh.pipeline_rank, len(plan.stages), mesh.pipeline)
        graphs = {i: (lowered.stages[i].train, lowered.stages[i].evaluate) for i in self._own}
        self._modules: dict[StageProgram, fx.GraphModule] = {}
        self._makers = {
            r: i % mesh.pipeline
            for i, stage in enumerate(lowered.stages)
            for r in stage.train.results
        }
        self._syncs = self._divide(weights)
        reached = {
            lowered.state[i]
            for stage in lowered.stages
            for i in stage.train.trained
            if i < len(lowered.state)
        }
        self._shared = SharedParameters(
            {name: weight for name, weight in weights.items() if name in reached},
            mesh,
            holders,
            self._reduce_dtype,
        )
        pieces = [StageBoundary(i, graphs[i][0].received, graphs[i][0].sent) for i in self._own]
        self._schedule_runner = ScheduleRunner(
            plan.schedule,
            plan.microbatches,
            len(plan.stages),
            pieces,
            mesh,
            self._forward,
            lambda i: self._syncs[i].begin(),
        )
        shares = [
            axis
            for axis, t in enumerate(lowered.output_layouts[loss])
            if t.kind == "P" and mesh.sizes[axis] > 1
        ]
        self.loss_group = mesh.pipeline_group(shares)
        self._call: _Call | None = None
        sources = [c.sources for stage in lowered.stages for c in stage.train.received]
        self._sources = dict(
            pair
            for stage in lowered.stages
            for pair in zip(stage.train.results, stage.train.sources, strict=True)
        )
        known = {i for i, name in enumerate(lowered.state) if name in trained}
        # Through these no gradient flows unless an input requires one, or something is unfrozen
        # that another rank may hold.
        self._idle = {s for s in (*sources, *self._sources.values()) if s.isdisjoint(known)}
        self._doubtful = sorted(
            (s for s in self._idle if any(i < len(lowered.state) for i in s)), key=sorted
        )

    @property
    def counts(self) -> bool:
        """Whether a stage of this rank must know what is counted over all microbatches."""
        first = len(self._lowered.state) + len(self._lowered.input_time_types)
        return any(
            i >= first
            for stage in self._own
            for i in self._lowered.stages[stage].train.used_placeholders
        )

    def programs(self, stages: Sequence[StageProgram]) -> list[fx.GraphModule]:
        """Those of ``stages``, the whole program's, that this rank runs."""
        return [self._module(stages[i]) for i in self._own]

    def _module(self, graph: StageProgram) -> fx.GraphModule:
        if graph not in self._modules:
            self._modules[graph] = fx.GraphModule(nn.Module(), graph.graph, "Stage")
        return self._modules[graph]

    def _divide(self, weights: Mapping[str, Weight]) -> dict[int, GradientSync]:
        """Each stage synchronises its weights when its last backward runs; one that several stages
        of the rank use, the last of these.
        """
        syncs, taken = {}, set[str]()
        for i in self._own:
            graph = self._lowered.stages[i].train
            state = self._lowered.state
            used = state_in_order_of_use(
                graph.graph,
                {
                    place: state[i]
                    for place, i in enumerate(graph.used_placeholders)
                    if i < len(state)
                },
            )
            names = [n for n in used if n in weights and n not in taken]
            taken.update(names)
            syncs[i] = GradientSync(
                [weights[name] for name in names], self._mesh, dtype=self._reduce_dtype
            )
        return syncs

    def differ(self, inputs: Collection[int]) -> tuple[list[bool], set[BoundaryTensor]]:
        """The outputs that have a gradient in a call where the inputs numbered ``inputs`` require
        one, and the crossings through which one goes back; the same on all ranks of the pipeline,
        which must all come here."""
        first = len(self._lowered.state)
        live = {
            i
            for i, name in enumerate(self._lowered.state)
            if name in self._weights and self._weights[name].parameter.requires_grad
        }
        live.update(first + i for i in inputs)
        idle = {s for s in self._idle if s.isdisjoint(live)}
        if self._doubtful:
            flags = torch.tensor(
                [s not in idle for s in self._doubtful], dtype=torch.uint8, device=self._mesh.device
            )
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.pipeline_group())
            idle -= {s for s, flag in zip(self._doubtful, flags.tolist(), strict=True) if flag}
        crossings = {
            c
            for stage in self._lowered.stages
            for c in stage.train.received
            if c.sources not in idle
        }
        return [
            self._sources[i] not in idle for i in range(len(self._lowered.output_layouts))
        ], crossings

    def check(self) -> None:
        """Raises :class:`RunError` after a step that failed."""
        self._schedule_runner.check()

    def run(
        self,
        run: Callable[[fx.GraphModule, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        values: Sequence[torch.Tensor | None],
        update: Callable[[int, torch.Tensor], None],
        stages: Sequence[StageProgram],
        backward: bool,
        crossings: Collection[BoundaryTensor] = (),
    ) -> tuple[list[torch.Tensor], Gradients]:
        """One call: the local outputs of the whole batch (of other stages', zeros) and the
        gradients, if ``backward``, which go back through ``crossings``.

        ``run`` calls a stage's program; ``values`` are the whole program's arguments; ``update(i,
        value)`` gives a buffer its new value; ``stages`` are those of the whole program, in the
        modes that it is in.
        """
        for sync in self._syncs.values():
            sync.clear()
        self._call = _Call(run, values, update, stages)
        try:
            with torch.set_grad_enabled(backward):
                self._schedule_runner.run(backward, crossings)
            made = self._call.made
        except BaseException:
            for sync in self._syncs.values():
                sync.clear()
            raise
        finally:
            self._call = None
        gradients = (
            [pair for sync in self._syncs.values() for pair in sync.finish()] if backward else []
        )
        since = self._mesh.recorder.mark()
        gradients = self._shared.add_up(gradients) if backward else []
        self._mesh.recorder.add("gradient synchronisation", since)
        return self._results(made), gradients

    def whole(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of inputs, of which each stage has its share; takes them from
        ``leaves``.
        """
        found = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(leaves, take_gradients(leaves), strict=True)
        ]
        for gradient in found:
            dist.all_reduce(gradient, group=self._mesh.pipeline_group())
        return list(found)

    def _forward(
        self, index: int, number: int, received: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        call = self._call
        assert call is not None
        graph = call.stages[index]
        self._mesh.random_streams.microbatch = number
        arguments = [self._argument(call, i, number) for i in graph.used_placeholders]
        flat = call.run(self._module(graph), [*arguments, *received])
        sent, results = flat[: len(graph.sent)], flat[len(graph.sent) :]
        for i, value in zip(graph.updates, results[len(graph.results) :], strict=True):
            call.update(i, value)
        loss = None
        for i, value in zip(graph.results, results, strict=False):
            call.made[i].append(value.detach())
            loss = value if i == self._loss else loss
        return list(sent), loss

    def _argument(self, call: _Call, i: int, number: int) -> torch.Tensor:
        value = call.values[i]
        assert value is not None
        place = i - len(self._lowered.state)
        if self._parts is None or place < 0:
            return value
        return self._parts.select_input(value, place, number)

    def _results(self, made: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        """The whole batch's outputs; those of other stages take no memory. Lets go of the
        microbatches' in ``made``.
        """
        outputs = self._lowered.train.graph.output_node().args[0]
        results = []
        for i in range(len(self._lowered.output_layouts)):
            if i in made:
                tensors = made.pop(i)
                results.append(
                    self._parts.join_output(i, tensors) if self._parts is not None else tensors[0]
                )
                del tensors
                continue
            meta = outputs[i].meta  # type: ignore[index, union-attr]
            shape = list(meta["val"].shape if i == self._loss else meta["local"])
            if (t := self._lowered.output_time_types[i]).is_shard:
                shape[t.dim] *= self._microbatches
            results.append(
                torch.zeros((), dtype=meta["val"].dtype, device=self._mesh.device).expand(shape)
            )
        return results

    def output_as_dtensor(self, output: torch.Tensor, i: int) -> torch.Tensor:
        """Output ``i`` as a DTensor on all ranks: a sum along the pipeline, where only one stage
        has more than zeros.
        """
        mesh = self._mesh
        output, placed = convert_for_dtensor(output, self._lowered.output_layouts[i], mesh)
        along: Partial | Replicate = Partial()
        if output.dtype == torch.bool:  # which cannot be summed
            sent = output.to(torch.uint8).contiguous()
            dist.broadcast(sent, group=mesh.pipeline_group(), group_src=self._makers[i])
            output, along = sent.bool(), Replicate()
        return DTensor.from_local(output, mesh.world, [along, *placed], run_check=False)


@dataclasses.dataclass
class _Call:
    run: Callable[[fx.GraphModule, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    values: Sequence[torch.Tensor | None]
    update: Callable[[int, torch.Tensor], None]
    stages: Sequence[StageProgram]
    made: dict[int, list[torch.Tensor]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )


def state_in_order_of_use(graph: fx.Graph, state: Mapping[int, str]) -> list[str]:
    """The names of the state that a program takes, by place among its arguments, in the order in
    which it uses them.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"][1:]
    names = {n: state[i] for i, n in enumerate(placeholders) if i in state}
    order: dict[str, None] = {}
    for node in graph.nodes:
        order.update((names[n], None) for n in node.all_input_nodes if n in names)
    return list(order)
