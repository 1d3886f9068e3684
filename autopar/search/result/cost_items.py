"""The parts that the seconds of a priced plan add up from: each kernel, each collective and each
copy, on each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.cost_model import Term
from autopar.search.pricing.kernel_seconds import RankShares
from autopar.search.pricing.node_sizes import result_dtype
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.recompute_policy import OFFLOADED, RECOMPUTED
from autopar.search.space.strategies import ParameterStrategy, Strategy

FORWARD, BACKWARD, RECOMPUTATION, STEP = "forward", "backward", "recomputation", "step"


@dataclass(frozen=True)
class CostItem:
    """One kernel of a node, or, where ``term`` is given, one collective or copy.

    Attributes:
        phase: FORWARD, BACKWARD or RECOMPUTATION (of one microbatch), or STEP.
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
        """The arguments of :meth:`Compute.seconds`, for a kernel."""
        return self.kind, self.dtype, self.flops, self.nbytes, self.product, self.operator


def cost_items(priced: PricedPlan) -> Iterator[CostItem]:
    """The items of a plan. The graph must have the shapes of the plan's microbatch
    (:func:`resized`).
    """
    problem, solution = priced.problem, priced.solution
    for vertex, k in zip(problem.vertices, solution.chosen, strict=True):
        node, choice, count = vertex.node, vertex.choices[k], tuple(map(float, vertex.count))
        if isinstance(choice, ParameterStrategy):
            yield from _parameter_items(priced, node, choice, count)
        elif isinstance(choice, Strategy) and node.op == "call_function":
            recomputed = bool(vertex.states[k] == RECOMPUTED)
            yield from _kernel_items(priced, node, choice, count, recomputed)
            for phase in (FORWARD, BACKWARD) if vertex.states[k] == OFFLOADED else ():
                nbytes, seconds = float(vertex.result[k]), float(vertex.copying[k]) / 2
                yield _collective(node, phase, count, Term("copy", -1, nbytes, seconds, phase))
    for number, tensor in enumerate(problem.tensors):
        node, count = problem.vertices[tensor.producer].node, tuple(map(float, tensor.count))
        source = problem.made(tensor, solution.chosen)[0]
        for target in problem.wanted(tensor, solution.chosen):
            conversions = priced.costs.of(node).conversions
            beside = float(tensor.beside[tensor.targets[target]])
            for term in conversions.terms_in_graph(node, source, target, beside=beside):
                yield _collective(node, term.phase, count, term)
            if (number, target) in solution.recomputed | priced.gathered_again:
                for term in conversions.terms_in_graph(node, source, target, again=True):
                    yield _collective(node, RECOMPUTATION, count, term)


def _parameter_items(
    priced: PricedPlan, node: fx.Node, strategy: ParameterStrategy, count: tuple[float, ...]
) -> Iterator[CostItem]:
    parameters = priced.costs.of(node).parameters
    for term in parameters.synchronisation_terms(node, strategy):
        yield _collective(node, STEP, count, term)
    if add := parameters.accumulation(node, strategy):
        yield CostItem(
            node, BACKWARD, count, add.kind, add.operator, add.dtype, add.flops, add.nbytes
        )


def _kernel_items(
    priced: PricedPlan,
    node: fx.Node,
    strategy: Strategy,
    count: tuple[float, ...],
    recomputed: bool,
) -> Iterator[CostItem]:
    costs, rule = priced.costs.of(node), priced.analysis.rules.get(node)
    trace = costs.kernels.composed_trace(node, rule, strategy)
    if trace is not None:
        # One rank's kernels were traced: they need no share.
        for phase, launches in ((FORWARD, trace.forward), (BACKWARD, trace.backward)):
            for n in (n for n in launches if not n.sends):
                dtype, nbytes = result_dtype(node), float(n.nbytes)
                for p in _phases(phase, recomputed):
                    yield CostItem(node, p, count, n.kind, n.operator, dtype, n.flops, nbytes)
    else:
        shares = RankShares(node, rule, [strategy], costs.sizes)
        for is_backward, n in costs.kernels.launches(node):
            sizes = shares.product_sizes(n, is_backward) if n.kind == "matmul" else None
            product = tuple(float(size[0]) for size in sizes) if sizes else None
            flops, nbytes = float(n.flops * shares.work[0]), float(shares.nbytes(n)[0])
            dtype = result_dtype(node)
            for p in _phases(BACKWARD if is_backward else FORWARD, recomputed):
                yield CostItem(node, p, count, n.kind, n.operator, dtype, flops, nbytes, product)
    for term in costs.kernels.terms(node, rule, strategy):
        for p in _phases(term.phase, recomputed):
            yield _collective(node, p, count, term)


def _phases(phase: str, recomputed: bool) -> list[str]:
    """The phases in which work of a forward or a backward runs."""
    return [FORWARD, RECOMPUTATION] if recomputed and phase == FORWARD else [phase]


def _collective(node: fx.Node, phase: str, count: tuple[float, ...], term: Term) -> CostItem:
    return CostItem(node, phase, count, term.kind, nbytes=term.nbytes, term=term)
