"""Seconds and bytes of each choice: the rules say how much work there is, the cost model how long it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.cost_model import Axis, Compute, Conversions, Term, optimizer_traffic, parameter_memory, seconds
from autopar.graph import operands
from autopar.layout import Layout
from autopar.plan import BUCKET_BYTES
from autopar.rules import Rule
from autopar.search.strategies import Storage, Strategy, work_share

# Forward-only and backward work, as multiples of the forward's. Attention's backward recomputes its scores.
_BACKWARD_FLOPS = {"attention": 2.5}
_EXPOSED = 0.5  # of gradients' collectives, the part that the backward does not hide: an assumption until a timeline is simulated
_STATISTIC = 4  # bytes: kernels send their statistics as float32


class Costs:
    """Prices of nodes and conversions on one mesh.

    Seconds are those of a whole step: work in a microbatch counts ``microbatches`` times, parameters once. Bytes are one rank's:
    state with its gradient and optimizer state, and what the backward keeps.
    """

    def __init__(self, analysis: Analysis, conversions: Conversions, compute: Compute, optimizer: str, microbatches: int) -> None:
        self.analysis, self.conversion, self.compute = analysis, conversions, compute
        self.optimizer, self.microbatches = optimizer, microbatches
        self.sizes = conversions.sizes

    def differentiable(self, node: fx.Node) -> bool:
        return node in self.analysis.differentiable

    def local_bytes(self, node: fx.Node, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of one rank's part of ``node``'s tensor in each layout."""
        total = _bytes(node)
        return np.array([total / self._parts(layout) for layout in layouts])

    def conversions(self, node: fx.Node, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Seconds of converting ``node``'s tensor, [source, target]."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return np.zeros((len(sources), len(targets)))
        both = list(dict.fromkeys([*sources, *targets]))
        place = {layout: i for i, layout in enumerate(both)}
        matrix = self.conversion.matrix(tuple(value.shape), value.dtype.itemsize, self.differentiable(node), both)
        return self.microbatches * matrix[np.ix_([place[s] for s in sources], [place[t] for t in targets])]

    def of_node(self, node: fx.Node, rule: Rule | None, choices: Sequence[Strategy | Storage]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of each choice of one node."""
        if isinstance(choices[0], Storage):
            priced = [self._storage(node, c) for c in choices if isinstance(c, Storage)]
            return np.array([s for s, _ in priced]), np.array([b for _, b in priced])
        strategies = [c for c in choices if isinstance(c, Strategy)]
        return self._work(node, rule, strategies), self._kept(node, rule, strategies)

    def _parts(self, layout: Layout) -> int:
        return math.prod(n for t, n in zip(layout, self.sizes, strict=True) if t.is_shard)

    def _work(self, node: fx.Node, rule: Rule | None, strategies: list[Strategy]) -> np.ndarray:
        if node.op != "call_function" or (rule is not None and rule.kind == "view") or not isinstance(node.meta["val"], torch.Tensor):
            return np.zeros(len(strategies))
        tensors = [n for n, _ in operands(node)]
        out = self.local_bytes(node, [s.out for s in strategies])
        ins = [self.local_bytes(t, [s.ins[k] for s in strategies]) for k, t in enumerate(tensors)]
        share = np.array([work_share(s, self.sizes) for s in strategies])
        kind, dtype = (rule.kind if rule else "elementwise"), node.meta["val"].dtype
        flops = (rule.flops if rule else 0.0) * share
        traffic = sum(ins, out)
        total = self.compute.seconds(flops, traffic, kind, str(dtype))
        if self.differentiable(node):
            grads = [k for k, t in enumerate(tensors) if self.differentiable(t)]
            products = _BACKWARD_FLOPS.get(kind, float(len([k for k in grads if k < 2])))
            back = traffic + out + sum(ins[k] for k in grads)
            total = total + self.compute.seconds(flops * products, back, kind, str(dtype))
        if rule is not None and rule.communication:
            # Kernels that communicate are composed of several passes over memory, where the operator is one.
            composed = np.array([any(k and f in rule.communication for f, k in zip(s.factors, s.kernels, strict=True)) for s in strategies])
            total = total * (1 + composed) + np.array([sum(t.seconds for t in self.sent_by_kernel(node, rule, s)) for s in strategies])
        return self.microbatches * total

    def sent_by_kernel(self, node: fx.Node, rule: Rule | None, strategy: Strategy) -> list[Term]:
        """What a node's kernels communicate by themselves, in one microbatch."""
        terms = []
        for axis, factor in enumerate(strategy.factors if rule is not None and rule.communication else ()):
            for sent in rule.communication.get(factor, ()) if rule is not None and factor and strategy.kernels[axis] else ():
                parts = math.prod(n for f, n in zip(strategy.factors, self.sizes, strict=True) if f in sent.factors)
                nbytes = sent.elements * _STATISTIC / parts
                terms.append(Term(sent.collective, axis, nbytes, float(seconds(sent.collective, nbytes, self.axis(axis))), "kernel"))
        return terms

    def axis(self, axis: int) -> Axis:
        return self.conversion.axes[axis]

    def _kept(self, node: fx.Node, rule: Rule | None, strategies: list[Strategy]) -> np.ndarray:
        kept = np.zeros(len(strategies))
        if rule is None or not self.differentiable(node):
            return kept
        if -1 in rule.saves:
            kept = kept + self.local_bytes(node, [s.out for s in strategies])
        if rule.saved_bytes:
            kept = kept + rule.saved_bytes * np.array([work_share(s, self.sizes) for s in strategies])
        return kept

    def synchronisation(self, node: fx.Node, storage: Storage) -> list[Term]:
        """What gathers a parameter and sums its gradient, once a step, where the graph uses it otherwise than it is stored.

        They go in buckets: a collective costs its share of one that is full. Gradients go during the last backward, parameters before
        the forward, when there is nothing to hide behind.
        """
        value = node.meta["val"]
        terms = self.conversion.terms(tuple(value.shape), value.dtype.itemsize, self.differentiable(node), storage.stored, storage.used)
        return [replace(t, seconds=self._bucketed(t)) for t in terms]

    def _bucketed(self, term: Term) -> float:
        if term.kind == "copy":
            return term.seconds
        bucket = max(term.nbytes, BUCKET_BYTES)
        exposed = _EXPOSED if term.phase == "backward" else 1.0
        return exposed * float(seconds(term.kind, bucket, self.axis(term.axis))) * term.nbytes / bucket

    def update(self, node: fx.Node, storage: Storage) -> float:
        """Seconds of a parameter's optimizer step."""
        stored = _bytes(node) / self._parts(storage.stored)
        return float(self.compute.optimizer_seconds(optimizer_traffic(stored, self.optimizer))) if self.differentiable(node) else 0.0

    def state_bytes(self, node: fx.Node, storage: Storage) -> dict[str, float]:
        """One rank's bytes of a tensor of the state, by kind."""
        total, itemsize = float(_bytes(node)), node.meta["val"].dtype.itemsize
        elements = math.ceil(total / self._parts(storage.stored) / itemsize)
        kept = parameter_memory(elements, itemsize, self.optimizer, self.differentiable(node))
        gathered = any(s.is_shard and s is not u for s, u in zip(storage.stored, storage.used, strict=True))
        used = total / self._parts(storage.used)
        whole = (2 if self.differentiable(node) else 1) * used if gathered else 0.0
        return {"parameters": kept.parameters, "gradients": kept.gradients, "optimizer": kept.optimizer, "gathered parameters": whole}

    def _storage(self, node: fx.Node, storage: Storage) -> tuple[float, float]:
        sent = sum(t.seconds for t in self.synchronisation(node, storage))
        return sent + self.update(node, storage), sum(self.state_bytes(node, storage).values())


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0
