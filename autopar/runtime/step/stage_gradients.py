"""The gradients of a pipeline rank: synchronised stage by stage, then over the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost_model.schedule import stages_by_last_backward
from autopar.ir.precision import dtype_of
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.gradient_handlers import GradientHandlers
from autopar.runtime.parameters.gradients import Gradients, GradientSync
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.model_state import Weight
from autopar.runtime.parameters.shared_parameters import SharedParameters

if TYPE_CHECKING:
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel


class StageGradients:
    """Synchronises the gradients of ``weights``, the parameters of this rank.

    Each stage synchronises its own parameters during its last backward. A parameter that several
    stages of the rank use belongs to the one whose last backward is the latest. At the end,
    gradients of parameters that several pipeline ranks hold are summed over these ranks.
    """

    def __init__(
        self,
        plan: PlanData,
        lowered: LoweredModel,
        mesh: Mesh,
        weights: Mapping[str, Weight],
        holders: Holders,
        handlers: GradientHandlers,
    ) -> None:
        self._recorder, dtype = mesh.recorder, dtype_of(plan.reduce_dtype)
        self._syncs: dict[int, GradientSync] = {}
        taken: set[str] = set()
        numbers = plan.schedule, plan.pipeline, plan.chunks, plan.microbatches
        for stage in stages_by_last_backward(*numbers, mesh.pipeline_rank):
            names = [n for n in _used(lowered, stage) if n in weights and n not in taken]
            taken.update(names)
            own = [weights[n] for n in names]
            self._syncs[stage] = GradientSync(own, mesh, handlers, dtype=dtype)
        state = lowered.state
        places = {i for stage in lowered.stages for i in stage.train.trained if i < len(state)}
        trained = {state[i] for i in places}
        shared = {name: weight for name, weight in weights.items() if name in trained}
        self._shared = SharedParameters(shared, mesh, holders, dtype)

    def clear(self) -> None:
        """Drops all gradients that are not delivered."""
        for sync in self._syncs.values():
            sync.clear()

    def begin(self) -> None:
        """Nothing: the schedule calls :meth:`begin_stage` instead."""

    def begin_stage(self, stage: int) -> None:
        """The next backward of ``stage`` is its last one in this step."""
        self._syncs[stage].begin()

    def finish(self) -> Gradients:
        """Waits for all sums. Returns this rank's part of each gradient."""
        gradients = [pair for sync in self._syncs.values() for pair in sync.finish()]
        since = self._recorder.mark()
        gradients = self._shared.add_up(gradients)
        self._recorder.add("gradient synchronisation", since)
        return gradients

    def deliver(self, gradients: Gradients) -> None:
        """Adds ``gradients`` to ``parameter.grad``."""
        next(iter(self._syncs.values())).deliver(gradients)


def _used(lowered: LoweredModel, stage: int) -> list[str]:
    """The tensors of the state that a stage uses, in order of use."""
    program, state = lowered.stages[stage].train, lowered.state
    places = {at: state[i] for at, i in enumerate(program.used_placeholders) if i < len(state)}
    return state_in_order_of_use(program.graph, places)


def state_in_order_of_use(graph: fx.Graph, state: Mapping[int, str]) -> list[str]:
    """The names of the state that a program takes, in the order in which its nodes use them.
    ``state``: the names by place among the program's arguments.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"][1:]
    names = {n: state[i] for i, n in enumerate(placeholders) if i in state}
    order: dict[str, None] = {}
    for node in graph.nodes:
        order.update((names[n], None) for n in node.all_input_nodes if n in names)
    return list(order)
