"""Seconds of a node's kernels on one rank, for each way to shard it: torch said what they touch,
the strategy how much of it is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch.fx as fx

from autopar.cost_model import ComputeCosts
from autopar.ir.layout import Layout, local_shape
from autopar.ir.nodes import operands, result_tensors
from autopar.kernel_trace.kernel_launches import TEMPORARY, KernelLaunch
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec, with_operands
from autopar.rules import Rule
from autopar.search.space.strategies import Strategy, work_share

Product = tuple[
    frozenset[str], frozenset[str], frozenset[str], frozenset[str]
]  # factors: how many, rows, columns, summands


class Shards:
    """How much of a node's tensors and of its products one rank has, under each of
    ``strategies``.
    """

    def __init__(
        self,
        node: fx.Node,
        rule: Rule | None,
        strategies: Sequence[Strategy],
        sizes: Sequence[int],
        autograd: OperatorTracer | None = None,
    ) -> None:
        self.rule, self.sizes = rule, sizes
        self.work = np.array([work_share(s, sizes) for s in strategies])
        tensors = [n for n, _ in operands(node)]
        self._shares = {k: self._share([s.ins[k] for s in strategies]) for k in range(len(tensors))}
        self._result = self._share([s.out for s in strategies])
        largest = max(range(len(tensors)), key=lambda k: _elements(tensors[k]), default=-1)
        self._other = (
            self._shares[largest]
            if largest >= 0 and _elements(tensors[largest]) > _elements(node)
            else self._result
        )
        self._node, self._strategies, self._autograd = node, strategies, autograd

    def local(self, strategy: int, number: int, backward: bool) -> KernelLaunch | None:
        """A kernel of the node as it is on one rank; None where the call does not take a part of
        its operands as they are.
        """
        if self._autograd is None:
            return None
        inputs = []
        for (tensor, _), layout in zip(
            operands(self._node), self._strategies[strategy].ins, strict=True
        ):
            value = tensor.meta["val"]
            inputs.append(
                contiguous_spec(
                    local_shape(value.shape, layout, self.sizes),
                    value.dtype,
                    value.is_floating_point(),
                )
            )
        try:
            answer = self._autograd.trace(self._node.target, *with_operands(self._node, inputs))  # type: ignore[arg-type]
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        found = answer.backward if backward else answer.forward
        return found[number] if number < len(found) else None

    def _share(self, layouts: Iterable[Layout]) -> np.ndarray:
        return np.array(
            [
                1 / math.prod(n for t, n in zip(layout, self.sizes, strict=True) if t.is_shard)
                for layout in layouts
            ]
        )

    def nbytes(self, launch: KernelLaunch) -> np.ndarray:
        """Bytes that a kernel reads and writes."""
        total = np.zeros(len(self.work))
        for place, nbytes in launch.touched:
            total += nbytes * (
                self._other
                if place == TEMPORARY
                else self._result
                if place < 0
                else self._shares[place]
            )
        return total

    def product(self, launch: KernelLaunch, backward: bool) -> list[np.ndarray] | None:
        """Of a product of matrices: how many, rows, columns, summands."""
        if (
            self.rule is None
            or self.rule.kind != "matmul"
            or (factors := _product(self.rule)) is None
        ):
            return None
        first, second = next(
            sorted(term) for term in self.rule.terms if len(term) == 2
        )  # the operands that are multiplied
        count, rows, columns, inner = factors
        if backward and launch.writes == first:
            columns, inner = inner, columns
        elif backward and launch.writes == second:
            rows, inner = inner, rows
        return [self._size(f) for f in (count, rows, columns, inner)]

    def _size(self, factors: frozenset[str]) -> np.ndarray:
        assert self.rule is not None
        whole = math.prod(self.rule.sizes[f] for f in factors)
        ways = [
            math.prod(n for f, n in zip(s.factors, self.sizes, strict=True) if f in factors)
            for s in self._strategies
        ]
        return whole / np.array(ways, dtype=np.float64)


class KernelTimer(Protocol):
    """Measures kernels that the cluster has no curve of; None for one that does not run here."""

    def __contains__(self, launch: KernelLaunch) -> bool: ...
    def seconds(self, launch: KernelLaunch) -> float | None: ...


def seconds(
    compute: ComputeCosts,
    launches: Sequence[KernelLaunch],
    shards: Shards,
    dtype: str,
    backward: bool,
    kernel_timer: KernelTimer | None = None,
) -> np.ndarray:
    """Seconds of a node's kernels, for each strategy."""
    total = np.zeros(len(shards.work))
    for number, launch in enumerate(launches):
        product = shards.product(launch, backward) if launch.kind == "matmul" else None
        taken = compute.seconds(
            launch.kind,
            dtype,
            launch.flops * shards.work,
            shards.nbytes(launch),
            product,
            launch.operator,
        )
        if kernel_timer is not None and launch in kernel_timer:
            local = [shards.local(k, number, backward) for k in range(len(taken))]
            found = [kernel_timer.seconds(each) if each is not None else None for each in local]
            taken = np.array(
                [
                    t if measured is None else measured
                    for t, measured in zip(taken, found, strict=True)
                ]
            )
        total += taken
    return total


def _product(rule: Rule) -> Product | None:
    term = next((sorted(t) for t in rule.terms if len(t) == 2), None)
    if term is None:
        return None
    left, right = (frozenset(f for dim in rule.operands[k] for f in dim) for k in term)
    out = frozenset(f for dim in rule.output for f in dim)
    return left & right & out, (left & out) - right, (right & out) - left, (left & right) - out


def _elements(node: fx.Node) -> int:
    return sum(t.numel() for t in result_tensors(node))
