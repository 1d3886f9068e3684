"""Lowering: from a captured graph and a plan to the programs that one rank runs. The order of the passes, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.graph import set_device
from autopar.layout import Layout
from autopar.passes.choose_kernels import choose_kernels
from autopar.passes.convert import insert_conversions
from autopar.passes.evaluation import evaluation
from autopar.passes.join_slices import join_slices
from autopar.passes.localise import localise
from autopar.passes.recompute import mark_recomputed
from autopar.passes.split_stages import StageGraph, split_stages
from autopar.passes.verify import verify_layouts, verify_shapes
from autopar.plan import Plan


@dataclass(frozen=True)
class Lowered:
    """The programs of one rank, for one microbatch.

    ``train`` and ``evaluate`` are called with the mesh, the local tensors of ``state`` in order, the user's whole microbatch, and what
    ``prologue`` returned (summed over microbatches); they return the user's tensors, then the buffers' new values. ``stages`` has the same
    cut into the plan's stages, where there are several.
    """

    train: fx.GraphModule
    evaluate: fx.GraphModule
    prologue: fx.GraphModule | None
    state: tuple[str, ...]
    output_layouts: tuple[Layout, ...]
    output_batch_dims: tuple[int | None, ...]
    input_batch_dims: tuple[int | None, ...]
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Stage:
    """The programs of one pipeline stage."""

    train: StageGraph
    evaluate: StageGraph


def lower(analysis: Analysis, plan: Plan, prologue: fx.Graph | None = None, device: torch.device | None = None) -> Lowered:
    """The local programs of ``plan``, to run on ``device`` (the one it was captured on, unless given).

    Raises:
        PlanError: the plan does not fit the graph.
    """
    captured, rules = analysis.captured, {n.name: r for n, r in analysis.rules.items()}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(captured.graph, copies))
    tensors = [n for n in analysis.outputs[: captured.out_spec.num_leaves] if isinstance(n, fx.Node)]
    updates = analysis.outputs[captured.out_spec.num_leaves :]
    next(iter(reversed(graph.nodes))).args = (tuple(copies[n] for n in (*tensors, *updates)),)
    device = device or _device(analysis)
    set_device(graph, device)  # what was traced on meta makes its constants where the program runs
    # Conversions come first: they need the global graph, whose layouts are all that the plan speaks of.
    insert_conversions(graph, plan, tensors.index(analysis.loss))
    verify_layouts(graph)
    # Kernels next: they take the global arguments of the operators they replace.
    choose_kernels(graph)
    # Shapes become local last of all that changes operators, as kernels have none written in them.
    localise(graph, rules, plan.mesh_sizes)
    verify_shapes(graph, plan.mesh_sizes, device)
    outputs = next(iter(reversed(graph.nodes))).args[0][: len(tensors)]  # type: ignore[index]
    state = {i.target: copies[n] for n, i in analysis.state.items()}
    evaluate = evaluation(graph, [state.get(name) for name in captured.updates])
    # Only training recomputes; the passes above know operators by their targets.
    mark_recomputed(graph, plan.recomputed, rules, [state[name] for name in captured.updates if name in state])
    # Only a backward gains by it, and each slice had to have its own name, layout and mark.
    join_slices(graph)
    return Lowered(
        train=_module(graph, "Train"),
        evaluate=_module(evaluate, "Evaluate"),
        prologue=_module(_on_device(prologue, device), "Prologue") if prologue is not None else None,
        state=tuple(analysis.state[n].target for n in analysis.state),
        output_layouts=tuple(n.meta["layout"] for n in outputs),
        output_batch_dims=tuple(analysis.batch.dim(n) for n in tensors),
        input_batch_dims=tuple(analysis.batch.dim(n) for n in analysis.inputs),
        stages=_stages(analysis, plan, graph, evaluate) if len(plan.stages) > 1 else (),
    )


def _stages(analysis: Analysis, plan: Plan, train: fx.Graph, evaluate: fx.Graph) -> tuple[Stage, ...]:
    """The last pass of all: the graph is whole for all the others."""
    captured = analysis.captured
    names = {i.target: n.name for n, i in analysis.state.items()}
    tensors = [n for n in analysis.outputs[: captured.out_spec.num_leaves] if isinstance(n, fx.Node)]
    trained = {n.name for n, i in analysis.state.items() if captured.state[i.target].requires_grad}
    split = partial(split_stages, stages=len(plan.stages), results=len(tensors), loss=tensors.index(analysis.loss), trained=trained)
    graphs = zip(split(train, updates=[names.get(name, "") for name in captured.updates]), split(evaluate, updates=[]), strict=True)
    return tuple(Stage(*pair) for pair in graphs)


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
