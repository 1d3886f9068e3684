"""The conversions of a plan's program on one rank, as traced calls: those of single tensors, and
those of ZeRO buckets, whose parameters are gathered by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from autopar.ir.layout import Layout, format_layout, parse_type
from autopar.ir.plan_data import ConversionStep
from autopar.ir.zero_buckets import gathered_together, is_gather
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.kernel_launches import fuse, may_repeat
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.memory.folding import Folding, Program
from autopar.memory.prefetched_gather import PrefetchedGather
from autopar.memory.staged_calls import stage_of
from autopar.memory.traced_call import GradientSlot, TracedCall, TracedStorage
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.zero_buckets import gather_bucket


class TracedTensor(NamedTuple):
    """A tensor in some layout, and the conversion that made it, if any."""

    value: Any
    storage: TracedStorage | None
    slot: GradientSlot | None
    conversion: TracedCall | None = None


class ConversionTrace:
    """The conversions of one program.

    Args:
        graph: the graph of one microbatch.
        program: the plan, or the fields of it that make the program.
        folding: which calls are traced.
        tracer, mesh: as for a :class:`CallTrace`.
        reduction_dtype: the dtype in which ranks sum gradients of parameters.
        source: gives the tensor of a node as the node makes it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        program: Program,
        folding: Folding,
        tracer: OperatorTracer,
        mesh: FakeMesh,
        reduction_dtype: torch.dtype | None,
        source: Callable[[fx.Node], TracedTensor],
    ) -> None:
        self._nodes, self._conversions = program.nodes, program.conversions
        self._folding, self._tracer, self._mesh, self._source = folding, tracer, mesh, source
        self._reduction_dtype, self._prefetch = reduction_dtype, program.prefetch
        # of each stage, the gather of a bucket that came last
        self._latest: dict[int | None, TracedCall] = {}
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        by_name = {n.name: n for n in self._place if n.op == "placeholder"}
        each = ([by_name[name] for name in names] for names in gathered_together(program))
        self._bucket_of = {node: bucket for bucket in each for node in bucket}
        self._converted: dict[tuple[fx.Node, tuple[ConversionStep, ...]], TracedTensor] = {}
        # conversions, by the place in the graph after which they run
        self._chains: dict[float, list[TracedCall]] = {}

    def calls(self) -> list[TracedCall]:
        """The calls, with their places in the program's order."""
        for chain in self._chains.values():
            for number, call in enumerate(chain, 1):
                call.order = call.order[0], number
        return [call for chain in self._chains.values() for call in chain]

    def convert(self, node: fx.Node, wanted: Layout, reader: fx.Node) -> TracedTensor:
        """The result of ``node`` after the plan's steps to another layout.

        Conversions that start with the same steps share them.
        """
        members = self._bucket_of.get(node, [node])
        steps = self._conversions[node.name][format_layout(wanted)]
        paths = [
            steps if n is node else next(iter(self._conversions[n.name].values())) for n in members
        ]
        tensors = [self._source(n) for n in members]
        for i in range(len(steps)):
            keys = [(n, path[: i + 1]) for n, path in zip(members, paths, strict=True)]
            if keys[0] not in self._converted:
                layouts = [_after(self._nodes[n.name].out, done) for n, done in keys]
                now = [path[i] for path in paths]
                made = self._step(members, layouts, tensors, now, reader)
                self._converted.update(zip(keys, made, strict=True))
            tensors = [self._converted[key] for key in keys]
        for conversion in (tensor.conversion for tensor in tensors):
            if conversion is not None:
                conversion.is_read = True
        return tensors[members.index(node)]

    def _step(
        self,
        nodes: Sequence[fx.Node],
        layouts: Sequence[Layout],
        tensors: Sequence[TracedTensor],
        steps: Sequence[ConversionStep],
        reader: fx.Node,
    ) -> list[TracedTensor]:
        """One step of the conversions of ``nodes``, to ``layouts``."""
        if len(nodes) > 1 and not is_gather(steps[0]):
            each = zip(nodes, layouts, tensors, steps, strict=True)
            return [
                self._step([n], [layout], [t], [step], reader)[0] for n, layout, t, step in each
            ]
        call = self._place_call(nodes[0], layouts[0], tensors, reader)
        (axis, source, target), values = steps[0], [t.value for t in tensors]
        sums = nodes[0].op == "placeholder" and target == "R" and values[0].dtype.is_floating_point
        end = target, self._reduction_dtype if sums else None
        if len(nodes) > 1:
            args = [values, self._mesh, axis, [source for _, source, _ in steps], *end]
            trace = self._tracer.trace(gather_bucket, args, {})
        else:
            trace = self._tracer.trace(
                redistribute, [values[0], self._mesh, axis, source, *end], {}
            )
        storages = [
            t.storage if r.alias is not None else TracedStorage(r.nbytes, call)
            for t, r in zip(tensors, trace.results, strict=True)
        ]
        slots = [GradientSlot(call) if r.tensor.grad else None for r in trace.results]
        call.operand_slots = [t.slot for t in tensors]
        complete(call, trace, [t.storage for t in tensors], storages, slots)
        if self._prefetch and len(nodes) > 1 and all(t.conversion is None for t in tensors):
            sources = [source for _, source, _ in steps]
            gather = PrefetchedGather(call, trace, self._tracer, self._mesh, axis, sources, end[1])
            self._prefetch_it(gather, call, reader, target == "R")
        return [
            TracedTensor(r.tensor, storage, slot, call)
            for r, storage, slot in zip(trace.results, storages, slots, strict=True)
        ]

    def _prefetch_it(
        self, gather: PrefetchedGather, call: TracedCall, reader: fx.Node, sums: bool
    ) -> None:
        """Starts a gather where the one before it in the same stage has arrived, as
        ``prefetch_gathers`` does; the first of a stage where it is needed.
        """
        stage, _ = self._folding.calls.places.get(reader, (None, 0))
        call.before, self._latest[stage] = self._latest.get(stage), call
        at = call.before or call
        chain = self._chains[at.order[0]]
        chain.insert(chain.index(at) + (at is not call), gather.start(at, sums))

    def _place_call(
        self, node: fx.Node, layout: Layout, tensors: Sequence[TracedTensor], reader: fx.Node
    ) -> TracedCall:
        """A new conversion call of ``tensors``, the first of them of ``node``, inserted into the
        program's order.

        It runs right after the tensor that it converts, before earlier conversions of the tensor. A
        conversion of an input runs before the first reader, after earlier conversions.
        """
        is_input = node.op == "placeholder"
        before = list(dict.fromkeys(t.conversion for t in tensors if t.conversion is not None))
        if before:
            place = before[-1].order[0]
        else:
            place = self._place[reader] - 0.5 if is_input else self._place[node]
        chain = self._chains.setdefault(place, [])
        block = self._folding.block(reader if is_input else node)
        name = f"{node.name} -> {format_layout(layout)}"
        call = TracedCall(name, (place, 0), stage_of(node), block, is_read=False)
        for earlier in before:
            earlier.later.append(call)
        if before:
            chain.insert(max(map(chain.index, before)) + 1, call)
        else:
            chain.insert(len(chain) if is_input else 0, call)
        return call


def _after(layout: Layout, steps: Iterable[ConversionStep]) -> Layout:
    """The layout after ``steps``."""
    found = list(layout)
    for axis, _, target in steps:
        found[axis] = parse_type(target)
    return tuple(found)


def complete(
    call: TracedCall,
    trace: OperatorTrace,
    storages: Sequence[TracedStorage | None],
    made: Sequence[TracedStorage | None],
    slots: Sequence[GradientSlot | None],
) -> None:
    """Fills in the rest of ``call``, from its trace and the storages of operands and results."""
    call.reads = [s for s in storages if s is not None]
    call.made = [s for s in made if s is not None and s.call is call]
    # In this order, on which the choice of what a compiler saves depends.
    results = (s for s, r in zip(made, trace.results, strict=True) if r.saved)
    saved = dict.fromkeys([*(storages[k] for k in sorted(trace.operands)), *results])
    call.saved = [s for s in saved if s is not None]
    call.internal, call.footprint = sum(trace.internal), trace.footprint
    call.is_view = not trace.forward
    call.fuses = not call.is_view and fuse(trace.forward)
    call.fuses_back = fuse(trace.backward)
    call.may_repeat = may_repeat(trace.forward)
    if call.may_repeat and call.fuses_back:
        read = max((n for launch in trace.forward for _, n in launch.touched), default=0)
        call.wide = sum(n for n in trace.internal if 4 * n >= read)
    call.result_slots = [slot if slot is not None else GradientSlot(call) for slot in slots]
