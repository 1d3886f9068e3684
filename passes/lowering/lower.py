"""Lowering: from a captured graph and a plan to the programs that one rank runs. The order of the
passes, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.fx as fx

from autopar.ir.batch_layouts import BatchLayouts
from autopar.ir.captured import BatchDivision
from autopar.ir.layout import Layout, R, Type
from autopar.ir.nodes import new_node, set_device, with_operands
from autopar.ir.plan_data import ParameterPlan, PlanData
from autopar.passes.lowering.admit_gradients import admit_gradients
from autopar.passes.lowering.await_parameters import await_parameters, gathered_parameters
from autopar.passes.lowering.bucket_gathers import bucket_gathers
from autopar.passes.lowering.check_functions import check_functions
from autopar.passes.lowering.choose_kernels import choose_kernels
from autopar.passes.lowering.evaluation_mode import (
    EvaluationMode,
    evaluation_graph,
    is_switched,
    mark_unswitched,
)
from autopar.passes.lowering.insert_conversions import insert_conversions
from autopar.passes.lowering.join_slices import join_slices
from autopar.passes.lowering.localise import localise
from autopar.passes.lowering.mark_recomputed import mark_recomputed
from autopar.passes.lowering.place_batch import place_batch
from autopar.passes.lowering.prefetch_gathers import prefetch_gathers
from autopar.passes.lowering.split_stages import StageProgram, split_stages
from autopar.passes.lowering.verify_lowered import verify_layouts, verify_shapes
from autopar.rules.analysis import Analysis
from autopar.runtime.pipeline.microbatches import chunks_per_rank

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweredModel:
    """The programs that one rank runs for one microbatch.

    Attributes:
        train, evaluate: the programs for ``train()`` and ``eval()``. Their arguments are the mesh,
            the local tensors of ``state`` in order, the user's inputs of the whole microbatch, and
            the results of ``prologue``, divided into microbatches like the inputs. They return the
            user's tensors, then the new values of buffers.
        prologue: the program that runs once a step on the whole batch; None if no value is hoisted.
        state: the names of the parameters, buffers and constants that the programs take.
        output_layouts: the layouts of the user's tensors.
        batch: the layouts of the inputs and of the hoisted values, as ranks pass them.
        input_time_types, hoisted_time_types, output_time_types: which part of each tensor of the
            whole batch a microbatch has, as types along time.
        update_time_types: the same for the new values of buffers; None for a buffer that each
            microbatch updates with its own statistics.
        parameters: how each parameter and buffer is stored and used, by its name in the model.
        division: how the batch is divided into microbatches; None for a single microbatch.
        stages: the programs of each pipeline stage; empty for a plan with one stage.
        evaluation_mode: how the model's evaluation differs from its training.
        notes: sentences for the user.
    """

    train: fx.GraphModule
    evaluate: fx.GraphModule
    prologue: fx.GraphModule | None
    state: tuple[str, ...]
    output_layouts: tuple[Layout, ...]
    batch: BatchLayouts
    input_time_types: tuple[Type, ...]
    hoisted_time_types: tuple[Type, ...]
    output_time_types: tuple[Type, ...]
    update_time_types: tuple[Type | None, ...]
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    division: BatchDivision | None = None
    stages: tuple[LoweredStage, ...] = ()
    evaluation_mode: EvaluationMode = field(default_factory=EvaluationMode)
    notes: tuple[str, ...] = ()

    @property
    def switched_modules(self) -> list[str]:
        """The paths of the modules that compute differently in ``eval()``."""
        nodes = filter(is_switched, self.train.graph.nodes)
        return list(dict.fromkeys(n.meta.get("module", "") for n in nodes))

    def partly_evaluating(
        self, evaluating: Collection[str]
    ) -> tuple[fx.GraphModule, tuple[StageProgram, ...]]:
        """The training program, whole and in stages, with the modules ``evaluating`` in
        ``eval()``.
        """

        def switch(graph: fx.Graph) -> fx.Graph:
            return evaluation_graph(
                graph,
                off=lambda node: is_switched(node) and node.meta.get("module", "") in evaluating,
            )

        stages = tuple(
            replace(stage.train, graph=switch(stage.train.graph)) for stage in self.stages
        )
        return _module(switch(self.train.graph), "PartlyTrain"), stages


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
    evaluation_mode: EvaluationMode | None = None,
) -> LoweredModel:
    """The local programs of ``plan``.

    Args:
        analysis: of the graph of one microbatch; with several stages, ``cut_stages`` has marked it.
        prologue: the graph that computes the hoisted values of the whole batch.
        device: where the programs run; by default the device of the captured graph.
        evaluation_mode: how ``eval()`` differs; by default all calls that know training switch.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    mode = evaluation_mode or EvaluationMode()
    # First: all passes below lower the plan with these types.
    plan = admit_gradients(analysis, plan)
    device = device or next(iter(analysis.graph.nodes)).meta["val"].device
    # Then the batch, which may change layouts: conversions need the last word on them.
    placed = place_batch(analysis, plan, prologue, device)
    plan = placed.plan
    captured, tensors = analysis.captured, _user_tensors(analysis)
    train, evaluate = _lower_graph(analysis, plan, device, mode)
    outputs = train.output_node().args[0][: len(tensors)]  # type: ignore[index]
    own = captured.division.per_microbatch_updates if captured.division else ()
    updates = _time_types(analysis.outputs[captured.out_spec.num_leaves :])
    return LoweredModel(
        train=_module(train, "Train"),
        evaluate=_module(evaluate, "Evaluate"),
        prologue=None if placed.prologue is None else _module(placed.prologue, "Prologue"),
        state=tuple(state.target for state in analysis.state.values()),
        output_layouts=tuple(n.meta["layout"] for n in outputs),  # type: ignore[union-attr]
        batch=placed.layouts,
        input_time_types=_time_types(analysis.inputs),
        hoisted_time_types=_time_types(analysis.hoisted),
        output_time_types=_time_types(tensors),
        update_time_types=tuple(None if i in own else t for i, t in enumerate(updates)),
        parameters=plan.parameters,
        division=captured.division,
        stages=_stages(analysis, plan, train, evaluate, mode) if len(plan.stages) > 1 else (),
        evaluation_mode=mode,
        notes=placed.notes,
    )


def _lower_graph(
    analysis: Analysis, plan: PlanData, device: torch.device, mode: EvaluationMode
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs for training and for evaluation: the order of the passes."""
    captured, rules = analysis.captured, {n.name: r for n, r in analysis.rules.items()}
    tensors = _user_tensors(analysis)
    graph, copies = _copy_graph(analysis)
    state = {i.target: copies[n] for n, i in analysis.state.items()}
    changing = [state[name] for name in captured.updates if name in state]
    mark_unswitched(graph, mode)  # before kernels replace the operators
    set_device(graph, device)  # a graph traced on meta makes its constants where the program runs
    # Conversions come first: they need the global graph, whose layouts are all that the plan speaks
    # of.
    gathered = _gathered(plan, captured.division, tensors)
    insert_conversions(graph, plan, tensors.index(analysis.loss), gathered)
    verify_layouts(graph)
    # Kernels next: they take the global arguments of the operators they replace.
    choose_kernels(graph)
    # Shapes become local last of all that changes operators, as kernels have none written in them.
    localise(graph, rules, plan.mesh_sizes)
    verify_shapes(graph, plan.mesh_sizes, device)
    check_functions(graph, plan.mesh_sizes)
    # Evaluation is copied here, because only training recomputes and keeps old values of buffers.
    old_values = [None if name in mode.updates else state.get(name) for name in captured.updates]
    evaluate = evaluation_graph(graph, old_values)
    # Marks come after the passes above, which know operators by their targets.
    mark_recomputed(graph, plan.recomputed, plan.offloaded, rules, changing)
    # Buckets come after the marks: what a plan recomputes has the names of single conversions.
    for each in (evaluate, graph):
        bucket_gathers(each, plan.zero_buckets)
        if plan.prefetch:
            prefetch_gathers(each)
    # Only a backward gains by it, and each slice had to have its own name, layout and mark.
    join_slices(graph)
    started = gathered_parameters(analysis, plan)
    for each in (evaluate, graph):
        await_parameters(each, started)
    outputs = graph.output_node().args[0][: len(tensors)]  # type: ignore[index]
    _keep_old_values(graph, changing, outputs)  # type: ignore[arg-type]
    return graph, evaluate


def _copy_graph(analysis: Analysis) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the captured graph that returns only tensors, and each node's copy."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(analysis.graph, copies))
    updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
    results = tuple(copies[n] for n in (*_user_tensors(analysis), *updates))
    graph.output_node().args = (results,)
    return graph, copies


def _user_tensors(analysis: Analysis) -> list[fx.Node]:
    """The user's outputs that are tensors; others are constants of Python."""
    outputs = analysis.outputs[: analysis.captured.out_spec.num_leaves]
    return [n for n in outputs if isinstance(n, fx.Node)]


def _gathered(
    plan: PlanData, division: BatchDivision | None, outputs: Sequence[fx.Node]
) -> dict[int, int]:
    """The outputs, by number, whose samples the ranks must gather, with the dim to gather.

    The chunks that a rank has of the microbatches of such an output do not make up the rank's part
    of the whole batch.
    """
    if division is None:
        return {}
    chunks = division.chunks_per_part(plan.microbatches, plan.data_degree)
    found: dict[int, int] = {}
    for i, node in enumerate(outputs):
        if node.name in plan.nodes:
            t, layout = node.meta["time"], plan.nodes[node.name].out
            if chunks_per_rank(t, layout, plan.mesh_sizes, chunks) is None:
                found[i] = t.dim
    return found


def _keep_old_values(
    graph: fx.Graph, changing: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> None:
    """Let the calls behind the outputs read copies of the buffers ``changing``.

    Autograd may save a buffer for the backward, and these buffers have new values by then.
    """
    reading = with_operands(outputs)
    for buffer in (n for n in changing if n in reading):
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            copy = new_node(
                graph, aten.clone.default, (buffer,), like=buffer, val=buffer.meta["val"]
            )
        buffer.replace_all_uses_with(copy, delete_user_cb=lambda user: user in reading)


def _time_types(nodes: Sequence[fx.Node]) -> tuple[Type, ...]:
    """The nodes' types along time; R in a graph of the whole batch."""
    return tuple(n.meta.get("time", R) for n in nodes)


def _stages(
    analysis: Analysis,
    plan: PlanData,
    train: fx.Graph,
    evaluate: fx.Graph,
    mode: EvaluationMode,
) -> tuple[LoweredStage, ...]:
    """The programs of each stage. This is the last pass: all others need the whole graph."""
    captured, tensors = analysis.captured, _user_tensors(analysis)
    names = {i.target: n.name for n, i in analysis.state.items()}
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
        split(evaluate, updates=updates if mode.updates else []),
        strict=True,
    )
    return tuple(LoweredStage(*pair) for pair in graphs)


def _module(graph: fx.Graph, name: str) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph, name)
