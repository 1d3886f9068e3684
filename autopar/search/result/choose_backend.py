"""What runs a plan's programs: eager PyTorch, or inductor."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.ir.nodes import describe_node
from autopar.ir.plan_data import NodePlan
from autopar.passes.lowering.choose_kernels import random_kernel
from autopar.search.result.chosen_program import ChosenProgram
from autopar.search.space.backend import is_eager
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Options


def choose_backend(
    options: Options,
    cluster: Cluster,
    graph: fx.Graph,
    program: ChosenProgram,
    configuration: Configuration,
) -> tuple[str, tuple[str, ...]]:
    """The backend of a plan, and a note where the plan would have another one but for a part that
    inductor does not compile, or that takes more memory there than the plan counts. It is the one
    that was asked for; otherwise inductor on GPUs, and eager on CPUs.

    Args:
        graph: of one microbatch.
        program: that of the plan.

    Raises:
        PlanError: inductor was asked for, and does not compile the plan.
    """
    if is_eager(options, cluster):
        return "eager", ()
    refused, costly = _found(graph, program.nodes)
    if options.backend == "inductor":
        if refused:
            raise PlanError(
                f'backend="inductor" does not compile {refused[0]}: plan with backend="eager", or '
                "for a model or a mode without it"
            )
        return "inductor", ()
    if configuration.pipeline > 1 and configuration.traits.has_split_backward:
        refused.append(f'the backward in two parts of schedule="{configuration.schedule}"')
    if program.offloaded:
        refused.append('results that the host keeps until the backward (offload="auto")')
    if reasons := refused or costly:
        how = "does not compile" if refused else "would hold all scores of"
        note = f"the program runs eagerly: inductor {how} {reasons[0]}"
        prices = "; its prices are those of joined kernels" if cluster.software.fuses else ""
        return "eager", (note + prices,)
    return "inductor", ()


def _found(graph: fx.Graph, nodes: Mapping[str, NodePlan]) -> tuple[list[str], list[str]]:
    """What inductor does not compile, and what it compiles into something that needs more memory:
    the first of each.
    """
    refused, costly = list[str](), list[str]()
    for node in graph.nodes:
        if node.op == "call_function" and "summa" in nodes[node.name].kernels:
            return [f"a product on a square of ranks (SUMMA), {describe_node(node)}"], []
        kernel = random_kernel(node, nodes[node.name]) if node.op == "call_function" else None
        if kernel in ("drawn", "ring"):
            what = "ring attention with dropout" if kernel == "ring" else "a random operator"
            return [f"{what}, {describe_node(node)}"], []
        if kernel == "attention" and not costly:
            costly.append(f"attention with dropout, {describe_node(node)}")
    return refused, costly
