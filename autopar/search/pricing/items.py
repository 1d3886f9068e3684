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
from autopar.ir.nodes import results
from autopar.search.pricing.work import Shards
from autopar.search.result.found import Found
from autopar.search.space.recompute import AGAIN
from autopar.search.space.strategies import Storage, Strategy

FORWARD, BACKWARD, AGAIN_FORWARD, STEP = "forward", "backward", "recomputation", "step"


@dataclass(frozen=True)
class Item:
    """One kernel, or one collective or copy (then ``term`` is given), of a node.

    Attributes:
        phase: "forward", "backward", "recomputation" (of one microbatch) or "step".
        count: how often it runs, by stage.
        operator, kind, dtype, flops, nbytes, product: of a kernel, on one rank, as
            :meth:`Compute.seconds` takes them.
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
        """Of a kernel: the arguments of :meth:`Compute.seconds`."""
        return self.kind, self.dtype, self.flops, self.nbytes, self.product, self.operator


def items(found: Found) -> Iterator[Item]:
    """Of a plan in full; within ``resized`` to its microbatch."""
    problem = found.problem
    for v, k in zip(problem.vertices, found.solution.chosen, strict=True):
        choice, again = v.choices[k], v.states[k] == AGAIN
        count = tuple(float(n) for n in v.count)
        if isinstance(choice, Storage):
            yield from (
                Item(v.node, STEP, count, t.kind, nbytes=t.nbytes, term=t)
                for t in found.costs.synchronisation(v.node, choice)
            )
            if added := found.costs.added(v.node, choice):
                yield Item(
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
            yield from _kernels(found, v.node, choice, count, again)
    for g, group in enumerate(problem.groups):
        node, count = problem.vertices[group.producer].node, tuple(float(n) for n in group.count)
        source = problem.made(group, found.solution.chosen)[0]
        for target in problem.wanted(group, found.solution.chosen):
            for term in _terms(found, node, source, target):
                yield Item(node, term.phase, count, term.kind, nbytes=term.nbytes, term=term)
                if term.phase == FORWARD and (g, target) in found.solution.again:
                    yield Item(node, AGAIN_FORWARD, count, term.kind, nbytes=term.nbytes, term=term)


def _kernels(
    found: Found, node: fx.Node, choice: Strategy, count: tuple[float, ...], again: bool
) -> Iterator[Item]:
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
        for phase in [BACKWARD] if backward else [FORWARD, AGAIN_FORWARD] if again else [FORWARD]:
            yield Item(
                node,
                phase,
                count,
                launch.kind,
                launch.operator,
                str(results(node)[0].dtype),
                *amount,
                product,
            )
    for term in costs.sent_by_kernel(node, rule, choice):
        for phase in [FORWARD, AGAIN_FORWARD] if again and term.phase == FORWARD else [term.phase]:
            yield Item(node, phase, count, term.kind, nbytes=term.nbytes, term=term)


def _terms(found: Found, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
    value = node.meta["val"]
    if source == target or not isinstance(value, torch.Tensor):
        return []
    return found.costs.terms(node, source, target)
