"""Seconds and bytes of each choice: the rules say how much work there is, the cost model how long
it takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.fx as fx

from autopar.cost_model import (
    AxisLinks,
    ComputeCosts,
    ConversionCosts,
    Term,
    collective_seconds,
    optimizer_traffic,
    parameter_memory,
    point_to_point,
)
from autopar.cost_model.conversion import Step
from autopar.ir.layout import Layout, local_shape
from autopar.ir.nodes import operands, result_tensors, slices_of
from autopar.ir.plan_data import BUCKET_BYTES, NodePlan
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.kernel_launches import (
    STREAMED_COLLECTIVES,
    KernelLaunch,
    collectives_of_launch,
)
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.memory.local_operator import trace_kernel
from autopar.memory.saved_tensors import SavedTensors
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.pricing.kernel_seconds import KernelTimer, Shards
from autopar.search.pricing.kernel_seconds import seconds as seconds_of
from autopar.search.space.strategies import ParameterStrategy, Strategy

_LEAST_EXPOSED = 0.05  # of gradients' collectives: what is sent is never for nothing
_NOTHING = SavedTensors(frozenset(), False, 0.0, None)


@dataclass(frozen=True)
class NodeCosts:
    """Of each choice of one node, on one rank: seconds of a microbatch's forward and backward, of
    sending it on to the next stage and its gradient back, and of a step; bytes that last, and bytes
    of its result and of what else it keeps for the backward of a microbatch."""

    forward: np.ndarray
    backward: np.ndarray
    send: np.ndarray
    step: np.ndarray
    state: np.ndarray
    result: np.ndarray
    internal: np.ndarray


class Work(NamedTuple):
    """Of one kernel: FLOPs, and bytes read and written."""

    operator: str
    kind: str
    dtype: str
    flops: float
    nbytes: float


class Costs:
    """Prices of nodes and conversions on the mesh of one stage."""

    def __init__(
        self,
        analysis: Analysis,
        saved: Mapping[fx.Node, SavedTensors],
        conversions: ConversionCosts,
        compute: ComputeCosts,
        optimizer: str,
        reduction_dtype: torch.dtype | None = None,
        microbatches: int = 1,
        kernel_timer: KernelTimer | None = None,
        autograd: OperatorTracer | None = None,
        holders: Mapping[fx.Node, int] | None = None,
    ) -> None:
        """``reduction_dtype``: in which ranks sum gradients of parameters; None for that in which they
        are made. ``kernel_timer`` measures kernels, of
        which ``autograd`` says how they are on one rank. ``holders``: how many ranks of the
            pipeline have each tensor of the state."""
        self.analysis, self._saved, self.conversion, self.compute = (
            analysis,
            saved,
            conversions,
            compute,
        )
        self.optimizer, self.reduction_dtype, self._microbatches = (
            optimizer,
            reduction_dtype,
            microbatches,
        )
        self._spot, self._autograd = kernel_timer, autograd or OperatorTracer(compute.device_kind)
        self._holders = holders or {}
        self.sizes = conversions.sizes

    def differentiable(self, node: fx.Node) -> bool:
        return node in self.analysis.differentiable

    def saved(self, node: fx.Node) -> SavedTensors:
        return self._saved.get(node, _NOTHING)

    def local_bytes(self, node: fx.Node, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of one rank's part of ``node``'s tensor in each layout."""
        total = nbytes(node)
        return np.array([total / self._parts(layout) for layout in layouts])

    def conversions(
        self,
        node: fx.Node,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        backward: bool = True,
    ) -> np.ndarray:
        """Seconds of converting ``node``'s tensor in one microbatch, [source, target]; with or
        without its gradient's way back.
        """
        value = node.meta["val"]
        if not isinstance(
            value, torch.Tensor
        ):  # several results, which are converted one by one, once they are taken
            return np.array(
                [[0.0 if source == target else np.inf for target in targets] for source in sources]
            )
        both = list(dict.fromkeys([*sources, *targets]))
        place = {layout: i for i, layout in enumerate(both)}
        differentiable = backward and self.differentiable(node)
        matrix = self.conversion.matrix(
            tuple(value.shape), value.dtype.itemsize, differentiable, both, self._summed(node)
        )
        return matrix[np.ix_([place[s] for s in sources], [place[t] for t in targets])]

    def path(self, node: fx.Node, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps that convert ``node``'s tensor."""
        value = node.meta["val"]
        return self.conversion.path(
            tuple(value.shape),
            value.dtype.itemsize,
            self.differentiable(node),
            source,
            target,
            self._summed(node),
        )

    def terms(self, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
        """The parts of the price of that."""
        value = node.meta["val"]
        return self.conversion.terms(
            tuple(value.shape),
            value.dtype.itemsize,
            self.differentiable(node),
            source,
            target,
            self._summed(node),
        )

    def _summed(self, node: fx.Node) -> int | None:
        """Bytes of one element where ranks sum ``node``'s gradient, if that has a dtype of its own:
        a parameter's may.
        """
        return (
            self.reduction_dtype.itemsize
            if self.reduction_dtype is not None and node in self.analysis.state
            else None
        )

    def node_costs(
        self, node: fx.Node, rule: Rule | None, choices: Sequence[Strategy | ParameterStrategy]
    ) -> NodeCosts:
        """The prices of each choice of one node."""
        none = np.zeros(len(choices))
        if isinstance(choices[0], ParameterStrategy):
            storages = [c for c in choices if isinstance(c, ParameterStrategy)]
            step = [
                sum(t.seconds for t in self.synchronisation_terms(node, c)) + self.update(node, c)
                for c in storages
            ]
            state = [sum(self.state_bytes(node, c).values()) for c in storages]
            added = [w for c in storages if (w := self.added(node, c))]
            adding = [
                self.compute.seconds(w.kind, w.dtype, w.flops, w.nbytes, operator=w.operator)
                for w in added
            ]
            return NodeCosts(
                none,
                np.array(adding) if added else none,
                none,
                np.array(step),
                np.array(state),
                none,
                none,
            )
        strategies = [c for c in choices if isinstance(c, Strategy)]
        result = self.local_bytes(node, [s.out for s in strategies])
        if node.target is send:
            there = np.array([point_to_point(float(n), self.conversion.pipeline) for n in result])
            return NodeCosts(
                none, none, there * (1 + self.differentiable(node)), none, none, result, none
            )
        forward, backward = self._work(node, rule, strategies)
        internal = (
            np.array([self.internal(node, s) for s in strategies])
            if self.saved(node).nbytes
            else none
        )
        return NodeCosts(
            forward,
            backward,
            none,
            none,
            none,
            none if node.op == "placeholder" else result,
            internal,
        )

    def internal(self, node: fx.Node, strategy: Strategy) -> float:
        """Bytes on one rank of what a node keeps for its backward beside operands and result."""
        split = list(zip(strategy.factors, self.sizes, strict=True))
        return sum(
            nbytes / math.prod(n for f, n in split if f in factors)
            for nbytes, factors in self.saved(node).internal
        )

    def _parts(self, layout: Layout) -> int:
        return math.prod(n for t, n in zip(layout, self.sizes, strict=True) if t.is_shard)

    def work(self, node: fx.Node) -> Iterator[Work]:
        """What a whole node's kernels do, forward and backward."""
        for _, launch in self.launches(node):
            yield Work(
                launch.operator, launch.kind, _dtype(node), launch.flops, float(launch.nbytes)
            )

    def launches(self, node: fx.Node) -> Iterator[tuple[bool, KernelLaunch]]:
        """The kernels of a node, with whether they are the backward's. The gradients of a result
        that several read are added up there.
        """
        if (
            node.op != "call_function"
            or node.target in (send, operator.getitem)
            or not result_tensors(node)
        ):
            return
        if (
            self.compute.device_kind == "cpu" and not self.saved(node).forward
        ):  # a view: it takes the time to call it
            view = KernelLaunch("view", "copy", (), -1)
            yield from (
                (late, view) for late in ((False, True) if self.differentiable(node) else (False,))
            )
        yield from ((False, launch) for launch in self.saved(node).forward)
        if node.target is torch.ops.aten.slice.Tensor and (pieces := _pieces(node)):
            # Lowering joins them into one split, whose backward joins their gradients
            # (passes/join_slices.py).
            if node is pieces[0] and self.differentiable(node):
                yield (
                    True,
                    KernelLaunch("cat", "copy", ((0, nbytes(node.all_input_nodes[0])),) * 2, 0),
                )
        else:
            yield from ((True, launch) for launch in self.saved(node).backward)
        if self.differentiable(node) and isinstance(node.meta["val"], torch.Tensor):
            readers = [
                user
                for user in node.users
                if user.op == "call_function" and self.differentiable(user)
            ]
            joined = sum(len(pieces) - 1 for pieces in slices_of(node))
            yield from (
                (True, KernelLaunch("add", "elementwise", ((-1, nbytes(node)),) * 3, -1))
                for _ in range(len(readers) - joined - 1)
            )

    def _work(
        self, node: fx.Node, rule: Rule | None, strategies: list[Strategy]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds forward and backward."""
        launches = list(self.launches(node))
        if not launches:
            return np.zeros(len(strategies)), np.zeros(len(strategies))
        shards, dtype = Shards(node, rule, strategies, self.sizes, self._autograd), _dtype(node)
        there, back = (
            seconds_of(
                self.compute,
                [launch for late, launch in launches if late is backward],
                shards,
                dtype,
                backward,
                self._spot,
            )
            for backward in (False, True)
        )
        for i, s in enumerate(strategies if rule is not None and rule.composed else ()):
            if (answer := self.composed(node, rule, s)) is not None:
                sent = self._sent(answer, dtype)
                there[i], back[i] = (
                    self._working(launches, dtype)
                    + sum(t.seconds for t in sent if t.phase == phase)
                    for phase, launches in (
                        ("forward", answer.forward),
                        ("backward", answer.backward),
                    )
                )
        return there, back

    def _working(self, launches: Sequence[KernelLaunch], dtype: str) -> float:
        """Seconds of what a kernel computes that is made of many operators."""
        return sum(
            float(self.compute.seconds(n.kind, dtype, n.flops, n.nbytes, operator=n.operator))
            for n in launches
            if not n.sends
        )

    def composed(
        self, node: fx.Node, rule: Rule | None, strategy: Strategy
    ) -> OperatorTrace | None:
        """What one rank launches and sends for a kernel that is made of many operators. None for
        other strategies.
        """
        if rule is None or rule.composed.isdisjoint(strategy.kernels):
            return None
        tensors = []
        for (operand, _), layout in zip(operands(node), strategy.ins, strict=True):
            val, grad = (
                operand.meta["val"],
                self.differentiable(node) and self.differentiable(operand),
            )
            tensors.append(
                contiguous_spec(local_shape(val.shape, layout, self.sizes), val.dtype, grad)
            )
        chosen = NodePlan(strategy.ins, strategy.out, strategy.factors, strategy.kernels)
        return trace_kernel(self._autograd, node, chosen, FakeMesh(tuple(self.sizes)), tensors)

    def kernel_terms(self, node: fx.Node, rule: Rule | None, strategy: Strategy) -> list[Term]:
        """What a node's kernels communicate by themselves, in one microbatch."""
        answer = self.composed(node, rule, strategy)
        return self._sent(answer, _dtype(node)) if answer is not None else []

    def _sent(self, answer: OperatorTrace, dtype: str) -> list[Term]:
        """The collectives that a kernel launches, one term for each axis of their groups. What it
        streams goes while it computes, as far as both can at once: their seconds are what is
        left."""
        terms = []
        for phase, launches in (("forward", answer.forward), ("backward", answer.backward)):
            sent = [
                (kind, axis, nbytes)
                for n in launches
                if n.sends
                for kind, nbytes, axes in collectives_of_launch(n)
                for axis in axes
            ]
            taken = [
                float(collective_seconds(kind, nbytes, self.axis(axis)))
                for kind, axis, nbytes in sent
            ]
            streamed = sum(
                t
                for t, (kind, _, _) in zip(taken, sent, strict=True)
                if kind in STREAMED_COLLECTIVES
            )
            hidden = (
                self.compute.overlap * min(streamed, self._working(launches, dtype)) / streamed
                if streamed
                else 0.0
            )
            terms += [
                Term(
                    kind,
                    axis,
                    nbytes,
                    t * (1 - hidden if kind in STREAMED_COLLECTIVES else 1),
                    phase,
                )
                for t, (kind, axis, nbytes) in zip(taken, sent, strict=True)
            ]
        return terms

    def axis(self, axis: int) -> AxisLinks:
        return self.conversion.axes[axis]

    def synchronisation_terms(self, node: fx.Node, storage: ParameterStrategy) -> list[Term]:
        """What gathers a parameter and sums its gradient, once a step, where the graph uses it
        otherwise than it is stored, and where several ranks of the pipeline have it: the sum over
        these has :attr:`pipeline_axis` for its axis.

        They go in buckets: a collective costs its share of one that is full. Gradients go during
        the last backward, parameters before the forward, when there is nothing to hide behind.
        """
        terms = [
            replace(t, seconds=self._bucketed(t))
            for t in self.terms(node, storage.stored, storage.used)
        ]
        shared = self._holders.get(node, 1) > 1 and self.differentiable(node)
        return [*terms, self._shared(node, storage, self._holders[node])] if shared else terms

    @property
    def pipeline_axis(self) -> int:
        """One past the mesh's."""
        return len(self.sizes)

    def _bucketed(self, term: Term) -> float:
        if term.kind == "copy":
            return term.seconds
        bucket = max(term.nbytes, BUCKET_BYTES)
        exposed = max(1 - self.compute.overlap, _LEAST_EXPOSED) if term.phase == "backward" else 1.0
        return (
            exposed
            * float(collective_seconds(term.kind, bucket, self.axis(term.axis)))
            * term.nbytes
            / bucket
        )

    def _shared(self, node: fx.Node, storage: ParameterStrategy, ranks: int) -> Term:
        """The sum of a parameter's gradient over that many ranks of the pipeline: a ring of theirs,
        which nothing hides.
        """
        gradient = self.reduction_dtype or _stored(node)
        nbytes = node.meta["val"].numel() / self._parts(storage.stored) * gradient.itemsize
        taken = 2 * (ranks - 1) * point_to_point(nbytes / ranks, self.conversion.pipeline)
        return Term("all_reduce", self.pipeline_axis, nbytes, taken, "backward")

    def update(self, node: fx.Node, storage: ParameterStrategy) -> float:
        """Seconds of a parameter's optimizer step, and of casting it to the dtype that the graph
        computes in.
        """
        elements, dtype = node.meta["val"].numel() / self._parts(storage.stored), _stored(node)
        traffic = (
            optimizer_traffic(elements * dtype.itemsize, self.optimizer)
            if self.differentiable(node)
            else 0.0
        )
        if dtype != node.meta["val"].dtype:
            traffic += elements * (dtype.itemsize + node.meta["val"].dtype.itemsize)
        return float(self.compute.optimizer_seconds(traffic)) if traffic else 0.0

    def added(self, node: fx.Node, storage: ParameterStrategy) -> Work | None:
        """What adds a microbatch's gradient of a parameter to those before, where there are any. On
        GPUs it is a part of other kernels: the presets' rates are fitted to runs that add up
        gradients."""
        if (
            self._microbatches == 1
            or self.compute.device_kind != "cpu"
            or not self.differentiable(node)
        ):
            return None
        computed, stored = node.meta["val"].dtype, _stored(node)
        elements = node.meta["val"].numel() / self._parts(storage.used)
        return Work(
            "add_",
            "elementwise",
            str(stored),
            0.0,
            elements * (computed.itemsize + 2 * stored.itemsize),
        )

    def state_bytes(self, node: fx.Node, storage: ParameterStrategy) -> dict[str, float]:
        """One rank's bytes of a tensor of the state, by kind."""
        elements, trains, stored = (
            node.meta["val"].numel(),
            self.differentiable(node),
            _stored(node),
        )
        kept = parameter_memory(
            math.ceil(elements / self._parts(storage.stored)),
            stored.itemsize,
            self.optimizer,
            trains,
        )
        kinds = {
            "parameters": float(kept.parameters),
            "gradients": float(kept.gradients),
            "optimizer": float(kept.optimizer),
        }
        used, computed = elements / self._parts(storage.used), node.meta["val"].dtype
        if any(
            s.is_shard and s is not u for s, u in zip(storage.stored, storage.used, strict=True)
        ):
            gradient = (
                stored if self._microbatches > 1 else computed
            )  # microbatches add up in the parameter's dtype
            kinds["gathered parameters"] = used * (computed.itemsize + trains * gradient.itemsize)
        elif stored != computed:
            kinds["compute copies"] = used * computed.itemsize
        return kinds


def _stored(node: fx.Node) -> torch.dtype:
    """The dtype in which a tensor of the state lies between steps; its node has the one that the
    graph computes in.
    """
    dtype: torch.dtype = node.meta.get("stored", node.meta["val"].dtype)
    return dtype


def nbytes(node: fx.Node) -> int:
    """The bytes of a node's whole tensor, or of all its results."""
    return sum(t.numel() * t.dtype.itemsize for t in result_tensors(node))


def _dtype(node: fx.Node) -> str:
    """Of a call's result, the first of several."""
    return str(result_tensors(node)[0].dtype)


def _pieces(node: fx.Node) -> list[fx.Node] | None:
    """The slices of which ``node`` is one, if they take their tensor apart."""
    return next((pieces for pieces in slices_of(node.all_input_nodes[0]) if node in pieces), None)
