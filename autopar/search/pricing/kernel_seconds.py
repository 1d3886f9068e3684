"""Seconds of a node's kernels on one rank, for each of the node's strategies.

A trace of the whole node says which tensors each kernel reads and writes. The strategy says which
share of each tensor one rank has.
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
from autopar.search.pricing.node_sizes import chunk_count
from autopar.search.space.strategies import Strategy, work_share

# The factors of a matrix product: batch of products, rows, columns, summands.
ProductFactors = tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]


class RankShares:
    """The share of a node's tensors and of its work that one rank has, for each of
    ``strategies``.
    """

    def __init__(
        self,
        node: fx.Node,
        rule: Rule | None,
        strategies: Sequence[Strategy],
        sizes: Sequence[int],
        tracer: OperatorTracer | None = None,
    ) -> None:
        self.rule, self.sizes = rule, sizes
        self.work = np.array([work_share(s, sizes) for s in strategies])
        tensors = [n for n, _ in operands(node)]
        self._operands = [self._shares([s.ins[k] for s in strategies]) for k in range(len(tensors))]
        self._result = self._shares([s.out for s in strategies])
        largest = max(range(len(tensors)), key=lambda k: _elements(tensors[k]), default=-1)
        # A temporary tensor is taken to be split as the node's largest tensor is.
        self._temporary = (
            self._operands[largest]
            if largest >= 0 and _elements(tensors[largest]) > _elements(node)
            else self._result
        )
        self._node, self._strategies, self._tracer = node, strategies, tracer

    def local_launch(self, strategy: int, number: int, backward: bool) -> KernelLaunch | None:
        """Kernel ``number`` of the node's forward or backward, with the local shapes of a strategy.
        None where the operator does not take operands of these shapes.
        """
        if self._tracer is None:
            return None
        inputs = []
        for (tensor, _), layout in zip(
            operands(self._node), self._strategies[strategy].ins, strict=True
        ):
            value = tensor.meta["val"]
            shape = local_shape(value.shape, layout, self.sizes)
            inputs.append(contiguous_spec(shape, value.dtype, value.is_floating_point()))
        try:
            arguments = with_operands(self._node, inputs)
            trace = self._tracer.trace(self._node.target, *arguments)  # type: ignore[arg-type]
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        launches = trace.backward if backward else trace.forward
        return launches[number] if number < len(launches) else None

    def _shares(self, layouts: Iterable[Layout]) -> np.ndarray:
        return np.array([1 / chunk_count(layout, self.sizes) for layout in layouts])

    def nbytes(self, launch: KernelLaunch) -> np.ndarray:
        """Bytes that a kernel reads and writes on one rank, for each strategy."""
        total = np.zeros(len(self.work))
        for place, nbytes in launch.touched:
            if place == TEMPORARY:
                share = self._temporary
            else:
                share = self._result if place < 0 else self._operands[place]
            total += nbytes * share
        return total

    def product_sizes(self, launch: KernelLaunch, backward: bool) -> list[np.ndarray] | None:
        """Number of matrix products in a kernel, and their rows, columns and summands on one rank,
        and what divides the rows of their matrices, for each strategy. None where the node is no
        matrix product.
        """
        if self.rule is None or self.rule.kind != "matmul":
            return None
        if (factors := _product_factors(self.rule)) is None:
            return None
        first, second = next(sorted(term) for term in self.rule.terms if len(term) == 2)
        count, rows, columns, summands = factors
        lengths = [self._local_size(f).astype(np.int64) for f in (columns, summands)]
        if backward and launch.writes == first:
            columns, summands = summands, columns
        elif backward and launch.writes == second:
            rows, summands = summands, rows
        sizes = [self._local_size(f) for f in (count, rows, columns, summands)]
        # A matrix and its gradient lie alike in memory: the forward's lengths are the backward's.
        return [*sizes, np.gcd(*lengths)]

    def _local_size(self, factors: frozenset[str]) -> np.ndarray:
        assert self.rule is not None
        whole = math.prod(self.rule.sizes[f] for f in factors)
        parts = [
            math.prod(n for f, n in zip(s.factors, self.sizes, strict=True) if f in factors)
            for s in self._strategies
        ]
        return whole / np.array(parts, dtype=np.float64)


class KernelTimer(Protocol):
    """Measures kernels for which the cluster has no efficiency curve."""

    def __contains__(self, launch: KernelLaunch) -> bool:
        """Whether the cluster has no curve for this kernel."""

    def seconds(self, launch: KernelLaunch) -> float | None:
        """Measured seconds of one run; None where the kernel does not run on this machine."""


def kernel_seconds(
    compute: ComputeCosts,
    launches: Sequence[KernelLaunch],
    shares: RankShares,
    dtype: str,
    backward: bool,
    kernel_timer: KernelTimer | None = None,
) -> np.ndarray:
    """Seconds of a node's forward or backward kernels on one rank, for each strategy."""
    total = np.zeros(len(shares.work))
    for number, launch in enumerate(launches):
        product = shares.product_sizes(launch, backward) if launch.kind == "matmul" else None
        flops, nbytes = launch.flops * shares.work, shares.nbytes(launch)
        taken = compute.seconds(launch.kind, dtype, flops, nbytes, product, launch.operator)
        if kernel_timer is not None and launch in kernel_timer:
            local = [shares.local_launch(k, number, backward) for k in range(len(taken))]
            measured = [kernel_timer.seconds(each) if each is not None else None for each in local]
            taken = np.array([t if m is None else m for t, m in zip(taken, measured, strict=True)])
        total += taken
    return total


def _product_factors(rule: Rule) -> ProductFactors | None:
    term = next((sorted(t) for t in rule.terms if len(t) == 2), None)
    if term is None:
        return None
    left, right = (frozenset(f for dim in rule.operands[k] for f in dim) for k in term)
    out = frozenset(f for dim in rule.output for f in dim)
    return left & right & out, (left & out) - right, (right & out) - left, (left & right) - out


def _elements(node: fx.Node) -> int:
    return sum(t.numel() for t in result_tensors(node))
