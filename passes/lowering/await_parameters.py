"""Await parameters: a parameter whose gather starts with the step (ZeRO-1 and 2) is waited for
where the program reads it first. So gathers go on while the forward runs, in the order of use.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from autopar.ir.parameter_collectives import parameter_collectives
from autopar.ir.plan_data import PlanData
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.arrivals import arrived


def gathered_parameters(analysis: Analysis, plan: PlanData) -> set[str]:
    """The names of the placeholders of parameters whose gather starts with the step."""
    layouts = {n.name: plan.parameters.get(info.target) for n, info in analysis.state.items()}
    return {
        name
        for name, kept in layouts.items()
        if kept and parameter_collectives(kept.stored, kept.used, plan.mesh_sizes).gathered
    }


def await_parameters(graph: fx.Graph, names: Collection[str]) -> None:
    """Let the calls of ``graph`` read the placeholders ``names`` after these have arrived."""
    mesh, *others = graph.find_nodes(op="placeholder")
    place = {node: i for i, node in enumerate(graph.nodes)}
    for parameter in others:
        readers = [*parameter.users]
        if parameter.name in names and readers:
            with graph.inserting_before(min(readers, key=place.__getitem__)):
                node = graph.call_function(arrived, (parameter, mesh))
            node.meta = dict(parameter.meta)
            for reader in readers:
                reader.replace_input_with(parameter, node)
