"""Plans and programs without a search."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.nodes import operands
from autopar.ir.plan_data import NodePlan, ParameterPlan, StagePlan
from autopar.passes.lowering.lower import lower
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.module.compiled import Compiled

EMPTY = StagePlan("", "", {}, {})


def one_device(analysis: Analysis, **fields: Any) -> Plan:
    """The plan for one device; ``fields`` are further ones of the plan."""
    nodes = {
        n.name: NodePlan(((),) * len(operands(n)), (), (), ())
        for n in analysis.graph.nodes
        if n.op != "output"
    }
    parameters = {i.target: ParameterPlan((), ()) for i in analysis.state.values()}
    given: dict[str, Any] = dict(
        microbatches=1,
        nodes=nodes,
        parameters=parameters,
        conversions={},
        seconds={},
        stages=(EMPTY,),
        gap=0.0,
    )
    return Plan(
        analysis.captured.fingerprint, 1, "cpu", (), (), data_degree=1, **{**given, **fields}
    )


def compiled(
    analysis: Analysis, plan: Plan, model: nn.Module, mesh: Mesh | None = None, prologue: Any = None
) -> Compiled:
    """The program of ``plan``."""
    mesh = mesh or Mesh(plan.mesh_sizes, plan.mesh_names, "cpu")
    return Compiled(analysis.captured, plan, lower(analysis, plan, prologue), mesh, model=model)


def calls(analysis: Analysis) -> list[str]:
    """The names of a graph's calls."""
    return [n.name for n in analysis.graph.nodes if n.op == "call_function"]


def part_of(names: list[str], share: float, seed: int) -> tuple[str, ...]:
    """Each of ``names`` with probability ``share``."""
    numbers = random.Random(seed)
    return tuple(name for name in names if numbers.random() < share)


def loss_of(output: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss among what a model returns."""
    return output if isinstance(output, torch.Tensor) else output["loss"]
