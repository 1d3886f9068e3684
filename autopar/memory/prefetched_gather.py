"""The call that starts the gather of a ZeRO bucket ahead of the call that waits for it, and their
backward: the gather's starts the sums of the gradients, and the start's ends them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.footprint import Footprint, Gradient
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec
from autopar.memory.traced_call import GradientSlot, TracedCall
from autopar.runtime.communication.bucket_sums import (
    end_reduce_scatter,
    part_form,
    small_parts,
    start_reduce_scatter,
)


class PrefetchedGather:
    """Divides a traced gather into its start and itself.

    Args:
        gather: the call, with ``trace``.
        axis: the mesh axis that it gathers along.
        sources: the type of each parameter along it.
        reduction_dtype: the dtype of the sums of gradients; None for the gradients' own.
    """

    def __init__(
        self,
        gather: TracedCall,
        trace: OperatorTrace,
        tracer: OperatorTracer,
        mesh: FakeMesh,
        axis: int,
        sources: Sequence[str],
        reduction_dtype: torch.dtype | None,
    ) -> None:
        self._gather, self._tracer, self._mesh, self._axis = gather, tracer, mesh, axis
        self._trained = [i for i, r in enumerate(trace.results) if r.tensor.grad]
        self._wholes = [trace.results[i].tensor._replace(grad=False) for i in self._trained]
        self._sources = [sources[i] for i in self._trained]
        self._reduction_dtype = reduction_dtype

    def start(self, at: TracedCall, sums: bool) -> TracedCall:
        """The call that starts the gather, in the place of the call ``at``.

        Args:
            sums: whether the backward sums the gradients over ranks.
        """
        gather = self._gather
        start = TracedCall(f"start {gather.name}", at.order, at.stage, at.block)
        start.starts, gather.is_started = gather, True
        own = [gather.operand_slots[i] for i in self._trained]
        if self._trained:
            slots = self._sums(start) if sums else self._slices(start)
            gather.operand_slots, start.operand_slots, start.result_slots = [*slots], own, slots
        return start

    def _slices(self, start: TracedCall) -> list[GradientSlot]:
        """Without sums the gradients pass the start as they are."""
        found = [g for g in self._gather.footprint.gradients if g is not None]
        self._gather.footprint = self._gather.footprint._replace(gradients=tuple(found))
        passed = tuple(g._replace(source=-1 - i) for i, g in enumerate(found))
        start.footprint = Footprint(0, 0, (), passed)
        return [GradientSlot(start) for _ in found]

    def _sums(self, start: TracedCall) -> list[GradientSlot]:
        """What is sent and what arrives is made by the backward of the gather, and waits for that
        of the start.
        """
        args = [self._wholes, self._mesh, self._axis, self._sources, self._reduction_dtype]
        trace = self._tracer.trace(start_reduce_scatter, args, {})
        made, gradients = list[int](), list[Gradient]()
        for result in trace.results:
            nbytes = math.prod(result.tensor.shape) * result.tensor.dtype.itemsize
            nbytes = self._tracer.allocated_bytes(nbytes)
            if result.alias is None:
                gradients.append(Gradient(len(made), nbytes, True))
                made.append(result.nbytes)
            else:
                gradients.append(Gradient(-1 - self._trained[result.alias], nbytes, True))
        self._gather.footprint = self._gather.footprint._replace(
            backward=trace.footprint.forward, made=tuple(made), gradients=tuple(gradients)
        )
        start.footprint = self._end([r.tensor for r in trace.results])
        return [GradientSlot(start) for _ in trace.results]

    def _end(self, on_the_way: Sequence[TensorSpec]) -> Footprint:
        """The start's backward: small parts and casts get memory of their own, the others are what
        has arrived.
        """
        n, dtype = self._mesh.sizes[self._axis], self._reduction_dtype
        forms = tuple(
            part_form(whole.shape, whole.dtype, n, source)
            for whole, source in zip(self._wholes, self._sources, strict=True)
        )
        sent = len(on_the_way) // 2
        trace = self._tracer.trace(
            end_reduce_scatter, [list(on_the_way[sent:]), forms, n, dtype], {}
        )
        small = small_parts(forms, n, dtype)
        arrived = iter(range(sent, len(on_the_way)))
        made, gradients = list[int](), list[Gradient]()
        for i, (shape, own) in enumerate(forms):
            nbytes = self._tracer.allocated_bytes(math.prod(shape) * own.itemsize)
            place = None if i in small else next(arrived)
            if place is None or dtype not in (None, own):
                gradients.append(Gradient(len(made), nbytes, True))
                made.append(nbytes)
            else:
                gradients.append(Gradient(-1 - place, nbytes, True))
        return Footprint(0, trace.footprint.forward, tuple(made), tuple(gradients))
