"""The calls of a plan's program on one rank, with their storages, saved tensors and gradients.

The plan is not lowered for this. The trace runs the kernels and the conversions of the runtime on
meta tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.ir.layout import Layout, S
from autopar.ir.nodes import operands, slices_of
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec, contiguous_spec, with_grad
from autopar.memory.conversion_trace import ConversionTrace, TracedTensor, complete
from autopar.memory.folding import Folding, Program
from autopar.memory.local_operator import LocalOperators
from autopar.memory.staged_calls import StagedCalls, stage_of
from autopar.memory.traced_call import GradientSlot, StageInput, TracedCall, TracedStorage
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.kernels.graph_kernels import send

_SLICE = torch.ops.aten.slice.Tensor


class CallTrace:
    """The program of one plan on one rank, for one microbatch.

    Attributes:
        calls: the calls and conversions, in the order of the program.
        arrivals: the tensors that stages receive.
        outputs: the storages of the tensors that the program returns, the loss first; None for a
            parameter or an input.
        output_bytes: the bytes that it takes to bring an output into a DTensor, by its storage.
        loss: where the backward starts.

    Args:
        analysis: the analysis of the graph of one microbatch. In a graph that is cut into stages,
            ``meta["stage"]`` of a node gives its stage.
        program: the plan, or the fields of it that make the program.
        sizes: the mesh's axis sizes, inside one stage.
        tracer: traces calls for the device type where the program will run.
        reduction_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype
            of each gradient.
        folding: which calls are traced; by default all.
    """

    def __init__(
        self,
        analysis: Analysis,
        program: Program,
        sizes: Sequence[int],
        tracer: OperatorTracer,
        reduction_dtype: torch.dtype | None = None,
        folding: Folding | None = None,
    ) -> None:
        self._analysis, self._nodes = analysis, program.nodes
        self._folding = folding or Folding.of_every_call(StagedCalls.of_single_nodes(analysis))
        self._tracer, self._mesh = tracer, FakeMesh(tuple(sizes))
        self._operators = LocalOperators(analysis, program.nodes, sizes, tracer)
        self._conversions = ConversionTrace(
            analysis.graph,
            program,
            self._folding,
            tracer,
            self._mesh,
            reduction_dtype,
            self._source,
        )
        self._values: dict[fx.Node, Any] = {}
        self._storages: dict[fx.Node, tuple[TracedStorage | None, ...]] = {}
        self._slots: dict[fx.Node, tuple[GradientSlot | None, ...]] = {}
        self._call_of: dict[fx.Node, TracedCall] = {}
        self._place = {node: place for place, node in enumerate(analysis.graph.nodes)}
        self.calls: list[TracedCall] = []
        self.arrivals: list[StageInput] = []
        for node, place in self._place.items():
            if node.op == "call_function" and self._folding.is_traced(node):
                self._visit(node, place)
        self.calls += self._conversions.calls()
        self.calls.sort(key=lambda call: call.order)
        self._join_slices()
        self._note_outputs()

    def _note_outputs(self) -> None:
        analysis = self._analysis
        returned = analysis.outputs[: analysis.captured.out_spec.num_leaves]
        others = [n for n in returned if isinstance(n, fx.Node) and n is not analysis.loss]
        self.outputs = [self._storages.get(n, (None,))[0] for n in (analysis.loss, *others)]
        self.output_bytes = {
            storage: self._bytes_to_return(n)
            for n in others
            if (storage := self._storages.get(n, (None,))[0]) is not None
        }
        self.loss = self._slots[analysis.loss][0]

    def _visit(self, node: fx.Node, place: int) -> None:
        if node.target is operator.getitem:
            source = self._folding.traced(node.args[0])  # type: ignore[arg-type]
            index: int = node.args[1]  # type: ignore[assignment]
            self._values[node] = self._values[source][index]
            self._storages[node] = (self._storages[source][index],)
            self._slots[node] = (self._slots[source][index],)
        elif node.target is send:
            self._send(node, place)
        else:
            self._call(node, place)

    def _visit_input(self, node: fx.Node) -> None:
        """Notes a parameter, a buffer or an input of the program at its first use."""
        val, grad = node.meta["val"], node in self._analysis.differentiable
        is_tensor = isinstance(val, torch.Tensor)
        shape = self._operators.local_shape(node) if is_tensor else ()
        self._values[node] = contiguous_spec(shape, val.dtype, grad) if is_tensor else val
        self._storages[node] = (None,)
        self._slots[node] = (
            GradientSlot(parameter=self._analysis.state[node].target) if grad else None,
        )

    def _call(self, node: fx.Node, place: int) -> None:
        differentiable = self._analysis.differentiable
        chosen, rule = self._nodes[node.name], self._analysis.rules.get(node)
        call = TracedCall(node.name, (place, 0), stage_of(node), self._folding.block(node))
        self._call_of[node] = call
        specs: list[Any] = []
        storages = []
        for k, (operand, _) in enumerate(operands(node)):
            tensor = self._operand(operand, chosen.ins[k], node)
            specs.append(
                with_grad(tensor.value, node in differentiable and operand in differentiable)
            )
            storages.append(tensor.storage)
            has_gradient = specs[-1] is not tensor.value or node in differentiable
            call.operand_slots.append(tensor.slot if has_gradient else None)
            if operand in self._folding.calls.written or (rule is not None and k in rule.writes):
                call.cloned += self._allocated_bytes(tensor.value)
        trace = self._operators.trace(node, specs)
        made = [
            storages[r.alias] if r.alias is not None else TracedStorage(r.nbytes, call)
            for r in trace.results
        ]
        self._values[node], self._storages[node] = trace.value, tuple(made)
        self._slots[node] = tuple(
            GradientSlot(call) if r.tensor.grad else None for r in trace.results
        )
        complete(call, trace, storages, made, self._slots[node])
        self.calls.append(call)

    def _send(self, node: fx.Node, place: int) -> None:
        """A tensor goes to the next stage, where it has a storage of its own."""
        value, sent, source, _ = self._operand(
            node.all_input_nodes[0], self._nodes[node.name].ins[0], node
        )
        receive = TracedCall(node.name, (place, 0), stage_of(node), self._folding.block(node))
        arrived = TracedStorage(self._allocated_bytes(value), receive)
        slot = GradientSlot(receive) if value.grad else None
        self._values[node] = contiguous_spec(value.shape, value.dtype, value.grad)
        self._storages[node], self._slots[node] = (arrived,), (slot,)
        self.arrivals.append(
            StageInput(stage_of(node) or 0, sent, arrived, source if value.grad else None, slot)
        )

    def _operand(self, node: fx.Node, wanted: Layout, reader: fx.Node) -> TracedTensor:
        """The result of ``node`` in the layout that ``reader`` wants."""
        node = self._folding.traced(node)
        if node.op == "placeholder" and node not in self._values:
            self._visit_input(node)
        layout = self._nodes[node.name].out
        storages, slots = self._storages[node], self._slots[node]
        if wanted == layout or not isinstance(self._values[node], TensorSpec):
            is_single = len(storages) == 1
            return TracedTensor(
                self._values[node],
                storages[0] if is_single else None,
                slots[0] if is_single else None,
            )
        return self._conversions.convert(node, wanted, reader)

    def _source(self, node: fx.Node) -> TracedTensor:
        """The result of ``node``, which is one tensor, as the node makes it."""
        if node.op == "placeholder" and node not in self._values:
            self._visit_input(node)
        return TracedTensor(self._values[node], self._storages[node][0], self._slots[node][0])

    def _bytes_to_return(self, node: fx.Node) -> int:
        """The bytes of an output in an order that a DTensor has, and of its conversion; or 0."""
        found, value = 0, self._values[node]
        for axis, t in enumerate(self._nodes[node.name].out):
            if t.pieces > 1 and isinstance(value, TensorSpec):
                args = [value, self._mesh, axis, repr(t), repr(S(t.dim)), None]
                found += self._tracer.trace(redistribute, args, {}).footprint.forward
        return found

    def _join_slices(self) -> None:
        """Notes the slices that lowering joins into one split (``passes.join_slices``).

        These are slices of one tensor that read it in the same layout.
        """
        sources = dict.fromkeys(
            n for node in self._call_of if node.target is _SLICE for n in node.all_input_nodes
        )
        for node in sources:
            for slices in slices_of(node) if node.op == "call_function" else ():
                if any(each not in self._call_of for each in slices):
                    continue  # slices in several stages, or in several blocks
                calls = [self._call_of[each] for each in slices]
                layouts = {self._nodes[each.name].ins[0] for each in slices}
                if len(layouts) == 1 and len({call.stage for call in calls}) == 1:
                    for call in calls:
                        call.joined_slices = sorted(calls, key=lambda c: c.order)

    def _allocated_bytes(self, value: TensorSpec) -> int:
        return self._tracer.allocated_bytes(math.prod(value.shape) * value.dtype.itemsize)
