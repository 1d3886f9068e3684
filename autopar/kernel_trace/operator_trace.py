"""Traces one operator call: the tensors that autograd saves, the kernels that run, the memory.

torch itself runs the call once on meta tensors with the shapes and strides of the operands, so no
table of operators has to be correct. Strides matter: a ``reshape`` of a transposed tensor copies, a
``reshape`` of a contiguous tensor is a view, and a saved view keeps its whole storage alive.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autopar.capture.function_operator import FunctionOperator
from autopar.cost_model.memory import allocated_bytes
from autopar.kernel_trace import meta_kernels
from autopar.kernel_trace.footprint import Footprint, assumed_footprint, trace_footprint
from autopar.kernel_trace.kernel_launches import (
    KernelLaunch,
    KernelRecorder,
    backward_launches,
    storage_id,
)
from autopar.kernel_trace.tensor_spec import TensorSpec, input_spec

aten = torch.ops.aten

_MAX_TRACES = 20_000  # the search of a large model makes a few thousand traces
# All traces of this process, by device type. They hold no tensors and no model.
_TRACES: defaultdict[str, dict[Any, OperatorTrace]] = defaultdict(dict)


class TracedResult(NamedTuple):
    """One tensor that a call returns.

    Attributes:
        tensor: its specification.
        alias: the number of the operand whose storage it shares, None if it has its own storage.
        nbytes: bytes of its own storage, 0 for an alias.
        saved: whether the backward reads it.
    """

    tensor: TensorSpec
    alias: int | None
    nbytes: int
    saved: bool


@dataclass(eq=False)
class OperatorTrace:
    """The behaviour of one call.

    Attributes:
        results: the tensors that it returns.
        operands: the numbers of the operands that the backward reads.
        internal: bytes of each saved tensor that is neither an operand nor a result.
        several: whether it returns a tuple.
        forward, backward: the kernels that it launches.
        measure: runs the call once more and measures its footprint.
    """

    results: tuple[TracedResult, ...]
    operands: frozenset[int]
    internal: tuple[int, ...]
    several: bool
    forward: tuple[KernelLaunch, ...]
    backward: tuple[KernelLaunch, ...]
    measure: Callable[[], Footprint]

    @cached_property
    def footprint(self) -> Footprint:
        """The memory that it takes while it runs. Most traces are of calls that the search prices
        and no plan has, so that nobody asks for it.
        """
        return self.measure()

    @property
    def value(self) -> Any:
        """The specification of the result, or a tuple of them."""
        tensors = tuple(r.tensor for r in self.results)
        return tensors if self.several else tensors[0]


class OperatorTracer:
    """Traces calls and remembers the traces, because the blocks of a model are alike.

    Args:
        device_type: where the program will run. Attention has other kernels on ``"cpu"`` than on
            ``"cuda"``, and the allocator for ``"cuda"`` rounds the bytes of each tensor up.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.allocated_bytes = allocated_bytes if device_type == "cuda" else int
        self._own: dict[Any, OperatorTrace] = {}
        self._shared = _TRACES[device_type]

    def trace(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        val: Any = None,
    ) -> OperatorTrace:
        """Trace one call.

        An operator that does not run on meta tensors is assumed to save all its operands and
        results. The same holds for a ``torch.autograd.Function``: it is the user's code, which only
        the program itself may run.

        Args:
            target: the operator.
            args, kwargs: its arguments, with a :class:`TensorSpec` for each tensor.
            val: a value like the result, for an operator that does not run on meta tensors.
        """
        key = (target, _frozen(args), _frozen(kwargs))
        if key not in self._own:
            self._own[key] = self._shared_trace(key, target, args, kwargs, val)
        return self._own[key]

    def _shared_trace(
        self,
        key: Any,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        val: Any,
    ) -> OperatorTrace:
        """The trace from the memory of this process, or a new trace."""
        if isinstance(target, FunctionOperator) and val is not None:
            return self._assumed(args, kwargs, val)
        if key in self._shared:
            return self._shared[key]
        try:
            trace = self._run(target, args, kwargs)
        # Meta kernels raise any exception: BatchNorm of one value a channel divides by zero.
        except Exception:
            if val is None:
                raise
            return self._assumed(args, kwargs, val)
        if len(self._shared) == _MAX_TRACES:
            self._shared.clear()
        self._shared[key] = trace
        return trace

    def _run(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OperatorTrace:
        call = self._meta_kernel(target)
        operands, run_args, run_kwargs = _meta_arguments(args, kwargs)
        packed: list[torch.UntypedStorage] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append(t.untyped_storage())  # keeps the storage, so that its id stays unique
            return t.detach()

        with (
            torch.set_grad_enabled(any(t.requires_grad for t in operands)),
            saved_tensors_hooks(pack, lambda t: t),
            KernelRecorder() as forward,
        ):
            out = call(*run_args, **run_kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        own = {storage_id(t): k for k, t in reversed(list(enumerate(operands)))}
        saved = {s._cdata: self.allocated_bytes(s.nbytes()) for s in packed}
        results = tuple(self._result(t, own.get(storage_id(t)), saved) for t in outputs)
        returned = {storage_id(t) for t in outputs}
        places = {storage_id(t): -1 - j for j, t in enumerate(outputs)} | own
        backward = backward_launches(operands, [t for t in outputs if t.requires_grad], places)
        return OperatorTrace(
            results,
            frozenset(k for k, t in enumerate(operands) if storage_id(t) in saved),
            tuple(n for s, n in saved.items() if s not in own and s not in returned),
            isinstance(out, (tuple, list)),
            forward.launches(places),
            backward,
            partial(self._footprint, call, args, kwargs, sum(r.nbytes for r in results)),
        )

    def _footprint(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], nbytes: int
    ) -> Footprint:
        """The footprint of a second run, with operands of its own, because the recorder keeps the
        tensors of the first. Of a call that does not run so, it is assumed.

        Args:
            nbytes: of the results.
        """
        operands, run_args, run_kwargs = _meta_arguments(args, kwargs)
        try:
            return trace_footprint(call, run_args, run_kwargs, operands, self.allocated_bytes)
        except Exception:  # meta kernels raise any exception
            return assumed_footprint(nbytes, operands, self.allocated_bytes)

    def _result(self, t: torch.Tensor, alias: int | None, saved: Mapping[int, int]) -> TracedResult:
        tensor = TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
        nbytes = self.allocated_bytes(t.untyped_storage().nbytes()) if alias is None else 0
        return TracedResult(tensor, alias, nbytes, storage_id(t) in saved)

    def _assumed(self, args: Sequence[Any], kwargs: Mapping[str, Any], val: Any) -> OperatorTrace:
        """The trace of a call that is not run: the backward reads all operands and results."""
        inputs = [
            v
            for a in (*args, *kwargs.values())
            for v in (a if isinstance(a, list) else [a])
            if isinstance(v, TensorSpec)
        ]
        grad = any(v.grad for v in inputs)
        outputs = [
            input_spec(t, grad and (t.is_floating_point() or t.is_complex()))
            for t in tree_leaves(val)
            if isinstance(t, torch.Tensor)
        ]
        results = [TracedResult(t, None, self.allocated_bytes(_bytes(t)), grad) for t in outputs]
        touched = [(k, _bytes(t)) for k, t in enumerate(inputs)]
        touched += [(-1 - j, r.nbytes) for j, r in enumerate(results)]
        once = (KernelLaunch("call", "elementwise", tuple(touched), -1),)
        return OperatorTrace(
            tuple(results),
            frozenset(range(len(inputs)) if grad else ()),
            (),
            isinstance(val, (tuple, list)),
            once,
            once if grad else (),
            partial(
                assumed_footprint,
                sum(r.nbytes for r in results),
                inputs if grad else [],
                self.allocated_bytes,
            ),
        )

    def _meta_kernel(self, target: Callable[..., Any]) -> Callable[..., Any]:
        """A function on meta tensors that saves the same tensors as ``target`` on the device."""
        if target is aten.dropout.default:
            return meta_kernels.dropout
        if target is aten.scaled_dot_product_attention.default:
            return (
                meta_kernels.attention_on_cpu
                if self.device_type == "cpu"
                else meta_kernels.attention_on_gpu
            )
        return target


def _bytes(t: TensorSpec) -> int:
    return math.prod(t.shape) * t.dtype.itemsize


def _frozen(value: Any) -> Any:
    """``value`` as a dictionary key that tells 1, 1.0 and True apart, because torch does."""
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value), value)


def _meta_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[Any], dict[str, Any]]:
    """The meta tensors of a call, in order, and its positional and keyword arguments with them."""
    tensors: list[torch.Tensor] = []

    def meta(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            empty = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            tensors.append(empty.requires_grad_(value.grad))
            return tensors[-1]
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    run_args = [meta(a) for a in args]
    run_kwargs = {k: meta(v) for k, v in kwargs.items()}
    if "device" in kwargs:
        run_kwargs["device"] = torch.device("meta")
    return tensors, run_args, run_kwargs
