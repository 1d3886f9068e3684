"""Place the batch: decide in which layouts a program takes its inputs, and lower the prologue for
these layouts.

Where every rank passes the global batch, inputs are whole. Where each rank passes a local batch,
an input that carries samples is cut along the data-parallel axes, and its other readers are typed
anew (``local_batch``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.batch_layouts import LOCAL, BatchLayouts, data_axes, global_batch
from autopar.ir.layout import I, Layout, R, S, Type, chunk_count, format_layout, is_legal, strided
from autopar.ir.nodes import operands, set_device
from autopar.ir.plan_data import NodePlan, PlanData
from autopar.passes.lowering.choose_kernels import choose_kernels
from autopar.passes.lowering.conversion_path import conversion_steps
from autopar.passes.lowering.insert_conversions import insert_conversions
from autopar.passes.lowering.local_batch import take_local_batch
from autopar.passes.lowering.localise import localise
from autopar.passes.lowering.verify_lowered import verify_layouts, verify_shapes
from autopar.passes.microbatch.infer_time_types import infer_time_types
from autopar.rules.analysis import Analysis


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """A plan for the layouts in which a program takes its batch.

    Attributes:
        prologue: the graph from the inputs to the hoisted values, whose first argument is the mesh;
            None if no value is hoisted.
        notes: sentences for the user.
    """

    plan: PlanData
    prologue: fx.Graph | None
    layouts: BatchLayouts
    notes: tuple[str, ...] = ()


def place_batch(
    analysis: Analysis, plan: PlanData, prologue: fx.Graph | None, device: torch.device
) -> PlacedBatch:
    """``plan`` and ``prologue`` for the batch that a rank passes by ``plan.batch``.

    Args:
        analysis: of the graph of one microbatch.
        prologue: the graph that computes the hoisted values of the whole batch.
        device: where the prologue runs.

    Raises:
        PlanError: the plan cannot serve local batches.
    """
    hoisted = len(analysis.hoisted)
    if plan.batch != LOCAL:
        graph = None if prologue is None else _with_mesh(prologue, device)
        layouts = global_batch(len(analysis.inputs), hoisted, len(plan.mesh_sizes))
        return PlacedBatch(plan, graph, layouts)
    return _Placing(analysis, plan, device).run(prologue)


def _with_mesh(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """A copy of ``graph`` that takes the mesh first and makes its constants on ``device``."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.placeholder("mesh")
    copy.output(copy.graph_copy(graph, copies))
    set_device(copy, device)
    return copy


class _Placing:
    """Places local batches."""

    def __init__(self, analysis: Analysis, plan: PlanData, device: torch.device) -> None:
        self.analysis, self.plan, self.device = analysis, plan, device
        self.axes, self.sizes = data_axes(plan), plan.mesh_sizes
        self.types, self.notes = _batch_types(analysis, plan.microbatches), list[str]()
        cut = self._axes_that_cut_samples()
        if not self.axes and plan.data_degree > 1:
            names = ", ".join(plan.mesh_names[axis] for axis in sorted(cut))
            raise PlanError(
                f'batch="local": the plan splits the batch over {plan.data_degree} ranks along '
                f"{names}, where it also splits other things, and it has no data-parallel axis; "
                f"plan with parallel=dict(data={plan.data_degree}, …), or compile with "
                'batch="global"'
            )
        # A more major axis that cuts samples cuts them before a data axis does.
        last = max(self.axes, default=-1)
        self.cut = sorted({*self.axes, *(axis for axis in cut if axis < last)})

    def _axes_that_cut_samples(self) -> set[int]:
        batch, nodes = self.analysis.batch, self.plan.nodes
        return {
            axis
            for node in self.analysis.rules
            for axis, t in enumerate(nodes[node.name].out)
            if t.is_shard and self.sizes[axis] > 1 and batch.is_batch_dim(node, t.dim)
        }

    def run(self, prologue: fx.Graph | None) -> PlacedBatch:
        analysis, plan = self.analysis, self.plan
        inputs = {n: self._layout(self.types[n]) for n in analysis.inputs}
        graph, hoisted = None, dict[fx.Node, Layout]()
        if prologue is not None:
            graph, found = self._lower_prologue(prologue, tuple(inputs.values()))
            hoisted = dict(zip(analysis.hoisted, found, strict=True))
        for node, layout in (inputs | hoisted).items():
            self._check_divides(node, layout)
        outputs = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        updates = {n for n in outputs if isinstance(n, fx.Node)}
        new, notes = take_local_batch(
            analysis, plan, inputs | hoisted, analysis.may_require_grad, whole=updates
        )
        layouts = BatchLayouts(self.axes, tuple(inputs.values()), tuple(hoisted.values()))
        return PlacedBatch(new, graph, layouts, (*self.notes, *notes))

    def _layout(self, t: Type) -> Layout:
        """The layout of an input of which a sample's place is ``t`` along time."""
        return tuple(t if t.is_shard and a in self.cut else I for a in range(len(self.sizes)))

    def _check_divides(self, node: fx.Node, layout: Layout) -> None:
        """Raises an error where ranks do not have whole chunks of each microbatch."""
        plan, division = self.plan, self.analysis.captured.division
        shape, fix = tuple(node.meta["val"].shape), 'compile with batch="global"'
        if not is_legal(shape, layout, self.sizes):
            raise PlanError(
                f'batch="local": {node.name} of shape {shape} does not divide as '
                f"{format_layout(layout)} on a mesh of {self.sizes}: {fix}"
            )
        time = node.meta.get("time", R)
        if division is None or not time.is_shard:
            return
        replicas = chunk_count(layout, time.dim, self.sizes)
        chunks = division.chunks_per_part(plan.microbatches, plan.data_degree)
        if chunks % replicas:
            raise PlanError(
                f'batch="local": the model takes the batch apart in {division.parts} parts, and '
                f"{plan.microbatches} microbatches have {chunks} chunks of each, which do not "
                f"divide over {replicas} ranks: plan with micro_batch_size= a replica's whole "
                f"share of the batch, or {fix}"
            )

    def _lower_prologue(
        self, prologue: fx.Graph, inputs: tuple[Layout, ...]
    ) -> tuple[fx.Graph, list[Layout]]:
        """The prologue on the inputs of a rank, and the layouts of its results."""
        captured = self.analysis.captured
        given = tuple(i for i in captured.inputs if i.kind != "hoisted")
        new = dict[str, Any](graph=prologue, inputs=given, loss=0, updates=(), division=None)
        whole = Analysis(dataclasses.replace(captured, **new))
        layouts = dict(zip(whole.inputs, inputs, strict=True))
        plan, self.notes = take_local_batch(
            whole, self._unsplit_plan(prologue), layouts, frozenset()
        )
        plan, results = self._with_results(plan, whole)
        graph = fx.Graph()
        graph.output(graph.graph_copy(prologue, {}))
        insert_conversions(graph, plan, None, results=dict(enumerate(results)))
        set_device(graph, self.device)
        verify_layouts(graph)
        choose_kernels(graph)
        localise(graph, {n.name: r for n, r in whole.rules.items()}, self.sizes)
        verify_shapes(graph, self.sizes, self.device)
        return graph, results

    def _with_results(self, plan: PlanData, prologue: Analysis) -> tuple[PlanData, list[Layout]]:
        """``plan`` with the conversions of the prologue's results, and their layouts."""
        conversions = {name: dict(steps) for name, steps in plan.conversions.items()}
        results = []
        for node, hoisted in zip(prologue.outputs, self.analysis.hoisted, strict=True):
            made = plan.nodes[node.name].out
            kept = tuple(_kept_type(t, hoisted.meta["time"]) for t in made)
            if kept != made:
                steps = conversion_steps(node.meta["val"], made, kept, self.sizes)
                conversions.setdefault(node.name, {})[format_layout(kept)] = steps
            results.append(kept)
        return dataclasses.replace(plan, conversions=conversions), results

    def _unsplit_plan(self, graph: fx.Graph) -> PlanData:
        """A plan in which every rank computes the whole ``graph``."""
        axes = len(self.sizes)
        whole, nothing = (I,) * axes, (None,) * axes
        nodes = {
            n.name: NodePlan((whole,) * _reads(n), whole, nothing, nothing)
            for n in graph.nodes
            if n.op != "output"
        }
        return dataclasses.replace(
            self.plan, nodes=nodes, conversions={}, recomputed=(), offloaded=()
        )


def _reads(node: fx.Node) -> int:
    return len(operands(node)) if node.op == "call_function" else 0


def _kept_type(made: Type, time: Type) -> Type:
    """The type of a hoisted value that the prologue makes as ``made``: a pending sum becomes whole,
    and chunks stay, if microbatches cut them as they are cut.
    """
    fits = made.is_shard and (made.dim != time.dim or made.pieces == time.pieces)
    return made if fits else I


def _batch_types(analysis: Analysis, microbatches: int) -> dict[fx.Node, Type]:
    """Where each input and hoisted value carries the samples, as types along time; R where it
    carries none. An input whose dim 0 has the size of the batch carries samples, also where each
    microbatch reads all of them.
    """
    division = analysis.captured.division
    if division is None:
        found = analysis.cached(infer_time_types)
        parts = 1 if isinstance(found, PlanError) else found.parts
        dims = {n: analysis.batch.dim(n) for n in analysis.inputs}
        return {n: R if d is None else _cut(d, parts) for n, d in dims.items()}
    types: dict[fx.Node, Type] = {n: n.meta["time"] for n in (*analysis.inputs, *analysis.hoisted)}
    for n in analysis.inputs:
        if n.meta["val"].shape[:1] == (division.samples * microbatches,):
            types[n] = types[n] if types[n].is_shard else S(0)
    return types


def _cut(dim: int, parts: int) -> Type:
    return strided(dim, parts) if parts > 1 else S(dim)
