"""The calls of a plan on one rank: what memory each reads, makes, and saves for its backward, and
where its gradients go. The plan is not lowered for it, but kernels and conversions are those of the
runtime, run on meta tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from autopar.ir.layout import Layout, format_layout, local_shape, parse_type
from autopar.ir.nodes import arguments, operands, signature, slices_of
from autopar.ir.plan_data import ConversionStep, NodePlan
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.footprint import Footprint
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec, contiguous_spec, with_grad, with_operands
from autopar.passes.lowering.choose_kernels import kernel_call
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.kernels.graph_kernels import send


@dataclass(eq=False)
class TracedStorage:
    """One storage, made by a call or a conversion."""

    nbytes: int
    call: TracedCall


@dataclass(eq=False)
class GradientSlot:
    """Where the gradients of one tensor come together: of a result of ``call``, or of the
    ``parameter`` of this name.
    """

    call: TracedCall | None = None
    parameter: str = ""


@dataclass(eq=False)
class TracedCall:
    """A call or a conversion, on one rank.

    Attributes:
        order: its place in the program: that of the tensor, and that among its conversions.
        stage: None if each stage has its own.
        reads: the memory of its operands; None for parameters, buffers and inputs, which are there
            anyway.
        saved: what its backward reads of that, and of its results.
        internal: bytes of what else its backward reads.
        cloned: bytes of buffers that are written to, which computing it again needs as they were.
        made: its results' memory.
        later: conversions that go on from this one.
        read: whether anything but a further conversion reads it.
        flow: what it takes while it runs.
        into: where the gradients of its operands go, None where they have none.
        slots: its results'.
        pieces: slices, this one among them, that lowering joins into one split unless one of them
            is computed again.
    """

    name: str
    order: tuple[float, int]
    stage: int | None
    reads: list[TracedStorage] = field(default_factory=list)
    saved: list[TracedStorage] = field(default_factory=list)
    internal: int = 0
    cloned: int = 0
    made: list[TracedStorage] = field(default_factory=list)
    later: list[TracedCall] = field(default_factory=list)
    read: bool = True
    footprint: Footprint = field(default_factory=Footprint)
    into: list[GradientSlot | None] = field(default_factory=list)
    slots: list[GradientSlot] = field(default_factory=list)
    pieces: list[TracedCall] = field(default_factory=list)


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage is sent by the one before: what lies there, and here, and where the
    gradients of both come together.
    """

    stage: int
    sent: TracedStorage | None
    memory: TracedStorage
    source: GradientSlot | None
    slot: GradientSlot | None


Memories = tuple[TracedStorage | None, ...]


class CallTrace:
    """One plan's ``calls`` on one rank, in their order, conversions among them; the ``arrivals`` at
    each stage; ``outputs``, the memory of what it returns, the loss first; where the gradient of
    the ``loss`` begins; the parameters that stages use, in the order of first ``uses``, and the
    ``inputs`` that they take.

    Args:
        analysis: of the graph of one microbatch; one that is cut into stages says so by
            ``meta["stage"]``.
        nodes, conversions: as in a plan.
        sizes: of the mesh of one stage.
        autograd: asked for the device type where the program will run.
        summed_in: in which ranks sum gradients of parameters, None for that in which they are made.
    """

    def __init__(
        self,
        analysis: Analysis,
        nodes: Mapping[str, NodePlan],
        conversions: Mapping[str, Mapping[str, tuple[ConversionStep, ...]]],
        sizes: Sequence[int],
        autograd: OperatorTracer,
        reduction_dtype: torch.dtype | None = None,
    ) -> None:
        self._analysis, self._nodes, self._conversions, self._sizes, self._autograd = (
            analysis,
            nodes,
            conversions,
            sizes,
            autograd,
        )
        self._mesh, self._reduction_dtype = FakeMesh(tuple(sizes)), reduction_dtype
        self._values: dict[fx.Node, Any] = {}
        self._memories: dict[fx.Node, Memories] = {}
        self._slots: dict[fx.Node, tuple[GradientSlot | None, ...]] = {}
        self._converted: dict[tuple[fx.Node, tuple[ConversionStep, ...]], _Converted] = {}
        self._chains: dict[
            float, list[TracedCall]
        ] = {}  # conversions, by the place after which they stand
        self._call_of: dict[fx.Node, TracedCall] = {}
        self._place = {node: place for place, node in enumerate(analysis.graph.nodes)}
        self.calls: list[TracedCall] = []
        self.arrivals: list[StageInput] = []
        self.uses: dict[tuple[int | None, str], None] = {}
        self.inputs: set[tuple[int | None, fx.Node]] = set()
        updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        names = {i.target: n for n, i in analysis.state.items()}
        self._written = {
            names[target]
            for target, new in zip(analysis.captured.updates, updates, strict=True)
            if target in names
        }
        for node, place in self._place.items():
            self._visit(node, place)
        for chain in self._chains.values():
            for number, call in enumerate(chain, 1):
                call.order = call.order[0], number
                self.calls.append(call)
        self.calls.sort(key=lambda call: call.order)
        self._join_slices()
        tensors = [
            n
            for n in analysis.outputs[: analysis.captured.out_spec.num_leaves]
            if isinstance(n, fx.Node)
        ]
        others = [n for n in tensors if n is not analysis.loss]
        self.outputs = [self._memories[n][0] for n in (analysis.loss, *others)]
        self.loss = self._slots[analysis.loss][0]

    def _visit(self, node: fx.Node, place: int) -> None:
        if node.op == "placeholder":
            val, grad = node.meta["val"], node in self._analysis.differentiable
            self._values[node] = (
                contiguous_spec(self._local(node), val.dtype, grad)
                if isinstance(val, torch.Tensor)
                else val
            )
            self._memories[node] = (None,)
            self._slots[node] = (
                GradientSlot(parameter=self._analysis.state[node].target) if grad else None,
            )
        elif node.target is operator.getitem:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            index: int = node.args[1]  # type: ignore[assignment]
            self._values[node] = self._values[source][index]
            self._memories[node] = (self._memories[source][index],)
            self._slots[node] = (self._slots[source][index],)
        elif node.target is send:
            self._send(node, place)
        elif node.op == "call_function":
            self._call(node, place)

    def _call(self, node: fx.Node, place: int) -> None:
        chosen, grad, rule = (
            self._nodes[node.name],
            node in self._analysis.differentiable,
            self._analysis.rules.get(node),
        )
        call = self._call_of[node] = TracedCall(node.name, (place, 0), self._stage(node))
        tensors, memories = [], []
        for k, (operand, _) in enumerate(operands(node)):
            value, memory, slot = self._operand(operand, chosen.ins[k], node)
            tensors.append(with_grad(value, grad and operand in self._analysis.differentiable))
            memories.append(memory)
            call.into.append(slot if tensors[-1] is not value or grad else None)
            if operand in self._written or (rule is not None and k in rule.writes):
                call.cloned += self._nbytes(value)
        answer = self._ask(node, rule, chosen, tensors)
        made = [
            memories[r.alias] if r.alias is not None else TracedStorage(r.nbytes, call)
            for r in answer.results
        ]
        self._values[node], self._memories[node] = answer.value, tuple(made)
        self._slots[node] = tuple(
            GradientSlot(call) if r.tensor.grad else None for r in answer.results
        )
        self._fill(call, answer, memories, made, self._slots[node])
        self.calls.append(call)

    def _ask(
        self, node: fx.Node, rule: Rule | None, chosen: NodePlan, tensors: list[Any]
    ) -> OperatorTrace:
        if any(chosen.kernels) and not _RANDOM.intersection(chosen.kernels):
            return trace_kernel(self._autograd, node, chosen, self._mesh, tensors, self._like(node))
        args, kwargs = self._localised(node, rule, chosen, *with_operands(node, tensors))
        return self._autograd.trace(node.target, args, kwargs, self._like(node))  # type: ignore[arg-type]

    @staticmethod
    def _fill(
        call: TracedCall,
        answer: OperatorTrace,
        memories: Sequence[TracedStorage | None],
        made: Sequence[TracedStorage | None],
        slots: Sequence[GradientSlot | None],
    ) -> None:
        call.reads = [m for m in memories if m is not None]
        call.made = [m for m in made if m is not None and m.call is call]
        read = {memories[k] for k in answer.operands} | {
            m for m, r in zip(made, answer.results, strict=True) if r.saved
        }
        call.saved = [m for m in read if m is not None]
        call.internal, call.footprint = sum(answer.internal), answer.footprint
        call.slots = [slot if slot is not None else GradientSlot(call) for slot in slots]

    def _send(self, node: fx.Node, place: int) -> None:
        """What arrives in a stage is memory of its own there, and kept like any other that is there
        to start with.
        """
        value, sent, source = self._operand(
            node.all_input_nodes[0], self._nodes[node.name].ins[0], node
        )
        arrived = TracedStorage(
            self._nbytes(value), TracedCall(node.name, (place, 0), self._stage(node))
        )
        slot = GradientSlot(arrived.call) if value.grad else None
        self._values[node], self._memories[node] = (
            contiguous_spec(value.shape, value.dtype, value.grad),
            (arrived,),
        )
        self._slots[node] = (slot,)
        self.arrivals.append(
            StageInput(self._stage(node) or 0, sent, arrived, source if value.grad else None, slot)
        )

    def _operand(
        self, node: fx.Node, wanted: Layout, reader: fx.Node
    ) -> tuple[Any, TracedStorage | None, GradientSlot | None]:
        found = self._nodes[node.name].out
        memories, slots = self._memories[node], self._slots[node]
        if node in self._analysis.state:
            self.uses[self._stage(reader), self._analysis.state[node].target] = None
        elif node.op == "placeholder":
            self.inputs.add((self._stage(reader), node))
        if wanted == found or not isinstance(self._values[node], TensorSpec):
            alone = len(memories) == 1
            return self._values[node], memories[0] if alone else None, slots[0] if alone else None
        steps, layout = self._conversions[node.name][format_layout(wanted)], list(found)
        at = _Converted(self._values[node], memories[0], slots[0], None)
        for i, (axis, _, dst) in enumerate(steps):
            layout[axis] = parse_type(dst)
            key = (node, tuple(steps[: i + 1]))
            if key not in self._converted:
                self._converted[key] = self._conversion(node, tuple(layout), at, steps[i], reader)
            at = self._converted[key]
        if at.call is not None:
            at.call.read = True
        return at.value, at.memory, at.slot

    def _conversion(
        self, node: fx.Node, layout: Layout, at: _Converted, step: ConversionStep, reader: fx.Node
    ) -> _Converted:
        """One step, and what it makes."""
        # It stands right behind what it converts, before those made so far; what converts an input,
        # before its first reader.
        before = at.call
        place = (
            before.order[0]
            if before is not None
            else self._place[reader] - 0.5
            if node.op == "placeholder"
            else self._place[node]
        )
        chain = self._chains.setdefault(place, [])
        call = TracedCall(
            f"{node.name} -> {format_layout(layout)}", (place, 0), self._stage(node), read=False
        )
        first = len(chain) if node.op == "placeholder" else 0
        chain.insert(chain.index(before) + 1 if before is not None else first, call)
        if before is not None:
            before.later.append(call)
        sums = node.op == "placeholder" and step[2] == "R" and at.value.dtype.is_floating_point
        args = [at.value, self._mesh, *step, self._reduction_dtype if sums else None]
        answer = self._autograd.trace(redistribute, args, {})
        (result,) = answer.results
        memory = at.memory if result.alias is not None else TracedStorage(result.nbytes, call)
        slot = GradientSlot(call) if result.tensor.grad else None
        call.into = [at.slot]
        self._fill(call, answer, [at.memory], [memory], [slot])
        return _Converted(answer.value, memory, slot, call)

    def _join_slices(self) -> None:
        """Notes the slices that lowering makes one split of (``passes.join_slices``): those of one
        tensor, converted alike.
        """
        for node in self._analysis.graph.nodes:
            for pieces in slices_of(node) if node.op == "call_function" else ():
                calls = [self._call_of[piece] for piece in pieces]
                if (
                    len({self._nodes[piece.name].ins[0] for piece in pieces}) == 1
                    and len({call.stage for call in calls}) == 1
                ):
                    for call in calls:
                        call.pieces = sorted(calls, key=lambda c: c.order)

    def _localised(
        self,
        node: fx.Node,
        rule: Rule | None,
        chosen: NodePlan,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one rank's part of an operator, as ``passes.localise`` makes them."""
        if rule is None or all(f is None for f in chosen.factors):
            return args, kwargs
        new: dict[str, Any] = {}
        if rule.shape_argument:
            new[rule.shape_argument] = list(self._local(node))
        if rule.localise:
            splits = [
                (
                    f,
                    math.prod(
                        n for g, n in zip(chosen.factors, self._sizes, strict=True) if g == f
                    ),
                )
                for f in chosen.factors
                if f
            ]
            new.update(rule.localise(arguments(node), dict(splits)))
        for place, (name, _, keyword_only) in enumerate(signature(node.target)):  # type: ignore[arg-type]
            if name in new and place < len(args) and not keyword_only:
                args[place] = new[name]
            elif name in new:
                kwargs[name] = new[name]
        return args, kwargs

    def _local(self, node: fx.Node) -> tuple[int, ...]:
        return local_shape(node.meta["val"].shape, self._nodes[node.name].out, self._sizes)

    def _like(self, node: fx.Node) -> Any:
        val = node.meta["val"]
        return (
            torch.empty(self._local(node), dtype=val.dtype, device="meta")
            if isinstance(val, torch.Tensor)
            else val
        )

    def _stage(self, node: fx.Node) -> int | None:
        return node.meta.get("stage", 0) if node.op == "call_function" else None

    def _nbytes(self, value: TensorSpec) -> int:
        return self._autograd.allocated_bytes(math.prod(value.shape) * value.dtype.itemsize)


def trace_kernel(
    autograd: OperatorTracer,
    node: fx.Node,
    chosen: NodePlan,
    mesh: FakeMesh,
    tensors: Sequence[Any],
    like: Any = None,
) -> OperatorTrace:
    """What the kernel that ``chosen`` names makes, saves and launches on one rank; ``tensors`` are
    the rank's parts of its operands.
    """
    target, given = kernel_call(node, chosen, mesh)
    left = iter(tensors)
    return autograd.trace(
        target, [next(left) if isinstance(a, fx.Node) else a for a in given], {}, like
    )


_RANDOM = {
    "attention",
    "drawn",
    "dropout",
}  # kernels that are the operator, its numbers drawn from a stream


class _Converted(NamedTuple):
    """A tensor in another layout, and the conversion that made it, if any."""

    value: TensorSpec
    memory: TracedStorage | None
    slot: GradientSlot | None
    call: TracedCall | None
