"""What the seconds of a plan add up from: each kernel and each collective of one microbatch, and of
a step's end, on each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from autopar.cost_model import Term
from autopar.ir.layout import Layout
from autopar.ir.nodes import result_tensors
from autopar.search.pricing.kernel_seconds import Shards
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.recompute_policy import RECOMPUTED
from autopar.search.space.strategies import ParameterStrategy, Strategy

FORWARD, BACKWARD, RECOMPUTATION, STEP = "forward", "backward", "recomputation", "step"


@dataclass(frozen=True)
class CostItem:
    """One kernel, or one collective or copy (then ``term`` is given), of a node.

    Attributes:
        phase: "forward", "backward", "recomputation" (of one microbatch) or "step".
        count: how often it runs, by stage.
        operator, kind, dtype, flops, nbytes, product: of a kernel, on one rank, as
            :meth:`ComputeCosts.seconds` takes them.
    """

    node: fx.Node
    phase: str
    count: tuple[float, ...]
    kind: str
    operator: str = ""
    dtype: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    product: tuple[float, ...] | None = None
    term: Term | None = None

    @property
    def work(self) -> tuple[Any, ...]:
        """Of a kernel: the arguments of :meth:`ComputeCosts.seconds`."""
        return self.kind, self.dtype, self.flops, self.nbytes, self.product, self.operator


def items(found: PricedPlan) -> Iterator[CostItem]:
    """Of a plan in full; within ``resized`` to its microbatch."""
    problem = found.problem
    for v, k in zip(problem.vertices, found.solution.chosen, strict=True):
        choice, recomputed = v.choices[k], v.states[k] == RECOMPUTED
        count = tuple(float(n) for n in v.count)
        if isinstance(choice, ParameterStrategy):
            yield from (
                CostItem(v.node, STEP, count, t.kind, nbytes=t.nbytes, term=t)
                for t in found.costs.synchronisation_terms(v.node, choice)
            )
            if added := found.costs.added(v.node, choice):
                yield CostItem(
                    v.node,
                    BACKWARD,
                    count,
                    added.kind,
                    added.operator,
                    added.dtype,
                    added.flops,
                    added.nbytes,
                )
        elif isinstance(choice, Strategy) and v.node.op == "call_function":
            yield from _kernels(found, v.node, choice, count, recomputed)
    for g, tensor in enumerate(problem.tensors):
        node, count = problem.vertices[tensor.producer].node, tuple(float(n) for n in tensor.count)
        source = problem.made(tensor, found.solution.chosen)[0]
        for target in problem.wanted(tensor, found.solution.chosen):
            for term in _terms(found, node, source, target):
                yield CostItem(node, term.phase, count, term.kind, nbytes=term.nbytes, term=term)
                if term.phase == FORWARD and (g, target) in found.solution.recomputed:
                    yield CostItem(
                        node, RECOMPUTATION, count, term.kind, nbytes=term.nbytes, term=term
                    )


def _kernels(
    found: PricedPlan, node: fx.Node, choice: Strategy, count: tuple[float, ...], recomputed: bool
) -> Iterator[CostItem]:
    costs, rule = found.costs, found.analysis.rules.get(node)
    shards, composed = Shards(node, rule, [choice], costs.sizes), costs.composed(node, rule, choice)
    launches = costs.launches(node)
    if composed is not None:
        parts = zip((False, True), (composed.forward, composed.backward), strict=True)
        launches = ((late, n) for late, part in parts for n in part if not n.sends)
    for backward, launch in launches:
        sizes = (
            shards.product(launch, backward)
            if launch.kind == "matmul" and composed is None
            else None
        )
        product = tuple(float(n[0]) for n in sizes) if sizes else None
        whole = launch.flops * shards.work[0], shards.nbytes(launch)[0]
        amount = (
            (launch.flops, float(launch.nbytes))
            if composed is not None
            else (float(whole[0]), float(whole[1]))
        )
        for phase in (
            [BACKWARD] if backward else [FORWARD, RECOMPUTATION] if recomputed else [FORWARD]
        ):
            yield CostItem(
                node,
                phase,
                count,
                launch.kind,
                launch.operator,
                str(result_tensors(node)[0].dtype),
                *amount,
                product,
            )
    for term in costs.kernel_terms(node, rule, choice):
        for phase in (
            [FORWARD, RECOMPUTATION] if recomputed and term.phase == FORWARD else [term.phase]
        ):
            yield CostItem(node, phase, count, term.kind, nbytes=term.nbytes, term=term)


def _terms(found: PricedPlan, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
    value = node.meta["val"]
    if source == target or not isinstance(value, torch.Tensor):
        return []
    return found.costs.terms(node, source, target)
