"""Lowering: from a captured graph and a plan to the programs that one rank runs. The order of the
passes, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.fx as fx

from autopar.ir.captured import BatchDivision
from autopar.ir.layout import Layout, R, Type
from autopar.ir.nodes import new_node, set_device
from autopar.ir.plan_data import ParameterPlan, PlanData
from autopar.passes.lowering.admit_gradients import admit_gradients
from autopar.passes.lowering.choose_kernels import choose_kernels
from autopar.passes.lowering.evaluation_mode import (
    EvaluationMode,
    evaluation,
    mark_always,
    switched,
)
from autopar.passes.lowering.insert_conversions import insert_conversions
from autopar.passes.lowering.join_slices import join_slices
from autopar.passes.lowering.localise import localise
from autopar.passes.lowering.mark_recomputed import mark_recomputed
from autopar.passes.lowering.split_stages import StageProgram, split_stages
from autopar.passes.lowering.verify_lowered import verify_layouts, verify_shapes
from autopar.rules.analysis import Analysis
from autopar.runtime.pipeline.microbatches import chunks_per_rank

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweredModel:
    """The programs of one rank, for one microbatch.

    ``train`` and ``evaluate`` are called with the mesh, the local tensors of ``state`` in order,
    the user's whole microbatch, and what ``prologue`` returned of the whole batch, cut like it;
    they return the user's tensors, then the buffers' new values. ``parameters`` says how these take
    the state. ``stages`` has the same cut into the plan's stages, where there are several. The
    ``times`` are types along time: what a microbatch has of inputs, of what was hoisted, of outputs
    and of updates (None: each microbatch makes its own); ``division`` says how the batch is
    divided; ``evaluating`` what of a model the evaluation knows.
    """

    train: fx.GraphModule
    evaluate: fx.GraphModule
    prologue: fx.GraphModule | None
    state: tuple[str, ...]
    output_layouts: tuple[Layout, ...]
    input_time_types: tuple[Type, ...]
    hoisted_time_types: tuple[Type, ...]
    output_time_types: tuple[Type, ...]
    update_time_types: tuple[Type | None, ...]
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    division: BatchDivision | None = None
    stages: tuple[LoweredStage, ...] = ()
    evaluating: EvaluationMode = field(default_factory=EvaluationMode)

    @property
    def modules(self) -> list[str]:
        """Those that compute otherwise in ``eval()``."""
        return list(
            dict.fromkeys(n.meta.get("module", "") for n in self.train.graph.nodes if switched(n))
        )

    def partly_evaluating(
        self, off: Collection[str]
    ) -> tuple[fx.GraphModule, tuple[StageProgram, ...]]:
        """What trains, whole and in stages, with the modules ``off`` in ``eval()``."""

        def frozen(graph: fx.Graph) -> fx.Graph:
            return evaluation(
                graph, off=lambda node: switched(node) and node.meta.get("module", "") in off
            )

        stages = tuple(
            replace(stage.train, graph=frozen(stage.train.graph)) for stage in self.stages
        )
        return _module(frozen(self.train.graph), "PartlyTrain"), stages


@dataclass(frozen=True)
class LoweredStage:
    """The programs of one pipeline stage."""

    train: StageProgram
    evaluate: StageProgram


def lower(
    analysis: Analysis,
    plan: PlanData,
    prologue: fx.Graph | None = None,
    device: torch.device | None = None,
    evaluating: EvaluationMode | None = None,
) -> LoweredModel:
    """The local programs of ``plan``, to run on ``device`` (the one it was captured on, unless
    given).

    ``evaluating`` says what ``eval()`` changes; without it, all that trains otherwise.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    evaluating = evaluating or EvaluationMode()
    plan = admit_gradients(analysis, plan)  # of the plan alone: what follows does as it says
    captured, rules = analysis.captured, {n.name: r for n, r in analysis.rules.items()}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(captured.graph, copies))
    tensors = [
        n for n in analysis.outputs[: captured.out_spec.num_leaves] if isinstance(n, fx.Node)
    ]
    updates = analysis.outputs[captured.out_spec.num_leaves :]
    next(iter(reversed(graph.nodes))).args = (tuple(copies[n] for n in (*tensors, *updates)),)
    device = device or _device(analysis)
    mark_always(graph, evaluating)  # before kernels take the operators' places
    set_device(graph, device)  # what was traced on meta makes its constants where the program runs
    # Conversions come first: they need the global graph, whose layouts are all that the plan speaks
    # of.
    insert_conversions(
        graph, plan, tensors.index(analysis.loss), _gathered(plan, captured.division, tensors)
    )
    verify_layouts(graph)
    # Kernels next: they take the global arguments of the operators they replace.
    choose_kernels(graph)
    # Shapes become local last of all that changes operators, as kernels have none written in them.
    localise(graph, rules, plan.mesh_sizes)
    verify_shapes(graph, plan.mesh_sizes, device)
    outputs = next(iter(reversed(graph.nodes))).args[0][: len(tensors)]  # type: ignore[index]
    state = {i.target: copies[n] for n, i in analysis.state.items()}
    evaluate = evaluation(
        graph,
        [None if name in evaluating.updates else state.get(name) for name in captured.updates],
    )
    # Only training recomputes; the passes above know operators by their targets.
    mark_recomputed(
        graph, plan.recomputed, rules, [state[name] for name in captured.updates if name in state]
    )
    # Only a backward gains by it, and each slice had to have its own name, layout and mark.
    join_slices(graph)
    _keep_old_values(graph, [state[name] for name in captured.updates if name in state], outputs)
    return LoweredModel(
        train=_module(graph, "Train"),
        evaluate=_module(evaluate, "Evaluate"),
        prologue=_module(_on_device(prologue, device), "Prologue")
        if prologue is not None
        else None,
        state=tuple(analysis.state[n].target for n in analysis.state),
        output_layouts=tuple(n.meta["layout"] for n in outputs),
        input_time_types=_times(analysis.inputs),
        hoisted_time_types=_times(analysis.hoisted),
        output_time_types=_times(tensors),
        update_time_types=tuple(
            None if captured.division and i in captured.division.per_microbatch_updates else t
            for i, t in enumerate(_times(updates))
        ),
        parameters=plan.parameters,
        division=captured.division,
        stages=_stages(analysis, plan, graph, evaluate, evaluating) if len(plan.stages) > 1 else (),
        evaluating=evaluating,
    )


def _gathered(
    plan: PlanData, division: BatchDivision | None, outputs: Sequence[fx.Node]
) -> dict[int, int]:
    """The outputs, by number, of which ranks' parts of the microbatches are no parts of the whole,
    and the dim that is cut.
    """
    if division is None:
        return {}
    chunks_per_part = division.chunks_per_part(plan.microbatches, plan.data_degree)
    cut = (
        (i, n.meta["time"], plan.nodes[n.name].out)
        for i, n in enumerate(outputs)
        if n.name in plan.nodes
    )
    return {
        i: t.dim
        for i, t, layout in cut
        if chunks_per_rank(t, layout, plan.mesh_sizes, chunks_per_part) is None
    }


def _keep_old_values(
    graph: fx.Graph, changing: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> None:
    """Let what leads to the outputs read copies of the buffers that have new values by the time of
    the backward: autograd may keep them.
    """
    reading, rest = set[fx.Node](), list(outputs)
    while rest:
        node = rest.pop()
        if node not in reading:
            reading.add(node)
            rest += node.all_input_nodes
    for buffer in (n for n in changing if n in reading):
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            copy = new_node(
                graph, aten.clone.default, (buffer,), like=buffer, val=buffer.meta["val"]
            )
        buffer.replace_all_uses_with(copy, delete_user_cb=lambda user: user in reading)


def _times(nodes: Sequence[fx.Node]) -> tuple[Type, ...]:
    """The nodes' types along time; R, where there is one microbatch."""
    return tuple(n.meta.get("time", R) for n in nodes)


def _stages(
    analysis: Analysis,
    plan: PlanData,
    train: fx.Graph,
    evaluate: fx.Graph,
    evaluating: EvaluationMode,
) -> tuple[LoweredStage, ...]:
    """The last pass of all: the graph is whole for all the others."""
    captured = analysis.captured
    names = {i.target: n.name for n, i in analysis.state.items()}
    tensors = [
        n for n in analysis.outputs[: captured.out_spec.num_leaves] if isinstance(n, fx.Node)
    ]
    trained = {n.name for n, i in analysis.state.items() if captured.state[i.target].requires_grad}
    may_train = {n.name for n in analysis.may_require_grad if n.op == "placeholder"} - trained
    split = partial(
        split_stages,
        stages=len(plan.stages),
        results=len(tensors),
        loss=tensors.index(analysis.loss),
        trained=trained,
        may_train=may_train,
    )
    updates = [names.get(name, "") for name in captured.updates]
    graphs = zip(
        split(train, updates=updates),
        split(evaluate, updates=updates if evaluating.updates else []),
        strict=True,
    )
    return tuple(LoweredStage(*pair) for pair in graphs)


def _module(graph: fx.Graph, name: str) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph, name)


def _device(analysis: Analysis) -> torch.device:
    return next(iter(analysis.graph.nodes)).meta["val"].device


def _on_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.placeholder("mesh")
    copy.output(copy.graph_copy(graph, copies))
    set_device(copy, device)
    return copy
