"""Asks torch what its autograd keeps of a call. No table of operators has to be right.

A call runs once on meta tensors of its operands' shapes and strides, under hooks that see what is
saved. Strides matter: a ``reshape`` of a transposed tensor copies, of another it is a view, and a
saved view keeps its whole storage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autopar.capture.function_operator import FunctionOperator
from autopar.cost_model.memory import allocated_bytes
from autopar.kernel_trace import meta_kernels
from autopar.kernel_trace.footprint import Footprint, trace_footprint, unknown
from autopar.kernel_trace.kernel_launches import KernelLaunch, KernelRecorder, storage_id

aten = torch.ops.aten

_MOST = 20_000  # answers that are kept; a large model's search asks a few thousand questions
_ANSWERS: defaultdict[str, dict[Any, OperatorTrace]] = defaultdict(
    dict
)  # that torch gave in this process, by device type: no model is in them


class TensorSpec(NamedTuple):
    """A tensor, as far as torch's choices depend on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False


def contiguous_spec(shape: Sequence[int], dtype: torch.dtype, grad: bool = False) -> TensorSpec:
    """A tensor whose elements lie one after the other."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return TensorSpec(tuple(shape), tuple(reversed(strides)), dtype, grad)


class TracedResult(NamedTuple):
    """One tensor that a call returns: ``alias`` is the operand whose memory it shares, else it has
    ``nbytes`` of its own; ``saved`` if the backward reads it."""

    tensor: TensorSpec
    alias: int | None
    nbytes: int
    saved: bool


class OperatorTrace(NamedTuple):
    """What torch does with one call: the ``operands`` that the backward reads, and the bytes of
    each tensor that it reads and that is neither an operand nor a result; the kernels that
    ``forward`` and ``backward`` launch; what it takes while it runs.

    ``several`` if it returns a tuple."""

    results: tuple[TracedResult, ...]
    operands: frozenset[int]
    internal: tuple[int, ...]
    several: bool
    forward: tuple[KernelLaunch, ...] = ()
    backward: tuple[KernelLaunch, ...] = ()
    footprint: Footprint = Footprint()

    @property
    def value(self) -> Any:
        """The result, or a tuple of them."""
        tensors = tuple(r.tensor for r in self.results)
        return tensors if self.several else tensors[0]


class OperatorTracer:
    """Asks torch, and remembers: blocks of a model are alike.

    ``device_type`` is where the program will run: attention has other kernels on ``"cpu"`` than on
    ``"cuda"``, and the allocator of the latter hands out memory in multiples, so that bytes of a
    tensor are those that it is given.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.allocated = allocated_bytes if device_type == "cuda" else int
        self._answers: dict[Any, OperatorTrace] = {}
        self._shared = _ANSWERS[device_type]

    def trace(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        val: Any = None,
    ) -> OperatorTrace:
        """What one call saves, with :class:`TensorSpec` for its tensors, which ``TensorSpec.grad`` marks
        as needing a gradient.

        An operator that does not run on meta tensors is taken to keep all its operands and results,
        which look like ``val``. So is a ``torch.autograd.Function``: that is the user's code, which
        nothing but the program runs.
        """
        key = (target, _frozen(args), _frozen(kwargs))
        if key not in self._answers:
            self._answers[key] = self._known(key, target, args, kwargs, val)
        return self._answers[key]

    def _known(
        self,
        key: Any,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        val: Any,
    ) -> OperatorTrace:
        """The same of what this process was asked before, of any model."""
        if isinstance(target, FunctionOperator) and val is not None:
            return self._all(args, kwargs, val)
        if key in self._shared:
            return self._shared[key]
        try:
            answer = self._run(target, args, kwargs)
        # torch's meta kernels fail in every way: BatchNorm of one value a channel divides by zero
        except Exception:
            if val is None:
                raise
            return self._all(args, kwargs, val)
        if len(self._shared) == _MOST:
            self._shared.clear()
        self._shared[key] = answer
        return answer

    def _run(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OperatorTrace:
        tensors: list[torch.Tensor] = []
        made = [_made(a, tensors) for a in args], {k: _made(v, tensors) for k, v in kwargs.items()}
        made[1].update(_placed_on_meta(kwargs))
        own = {storage_id(t): k for k, t in reversed(list(enumerate(tensors)))}
        packed: list[torch.UntypedStorage] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append(t.untyped_storage())  # held, so that its address stays its own
            return t.detach()

        call = self._stand_in(target)
        grad = any(t.requires_grad for t in tensors)
        with (
            torch.set_grad_enabled(grad),
            saved_tensors_hooks(pack, lambda t: t),
            KernelRecorder() as ran,
        ):
            out = call(*made[0], **made[1])
        several = isinstance(out, (tuple, list))
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        saved = {s._cdata: self.allocated(s.nbytes()) for s in packed}
        results = []
        for t in outputs:
            alias = own.get(storage_id(t))
            tensor = TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
            results.append(
                TracedResult(
                    tensor, alias, self._bytes(t) if alias is None else 0, storage_id(t) in saved
                )
            )
        returned = {storage_id(t) for t in outputs}
        places = {storage_id(t): -1 - j for j, t in enumerate(outputs)} | own
        backward = _backward(tensors, [t for t in outputs if t.requires_grad], places)
        internal = tuple(
            nbytes for s, nbytes in saved.items() if s not in own and s not in returned
        )
        kept = frozenset(k for k, t in enumerate(tensors) if storage_id(t) in saved)
        again: list[torch.Tensor] = []  # on fresh operands, as nothing that was recorded is let go
        given = (
            [_made(a, again) for a in args],
            {**{k: _made(v, again) for k, v in kwargs.items()}, **_placed_on_meta(kwargs)},
        )
        footprint = trace_footprint(call, *given, again, self.allocated)
        return OperatorTrace(
            tuple(results), kept, internal, several, ran.launches(places), backward, footprint
        )

    def _bytes(self, t: torch.Tensor) -> int:
        return self.allocated(t.untyped_storage().nbytes())

    def _all(self, args: Sequence[Any], kwargs: Mapping[str, Any], val: Any) -> OperatorTrace:
        inputs = [
            v
            for a in (*args, *kwargs.values())
            for v in (a if isinstance(a, list) else [a])
            if isinstance(v, TensorSpec)
        ]
        grad = any(v.grad for v in inputs)
        several = isinstance(val, (tuple, list))
        outputs = [
            input_spec(t, grad and (t.is_floating_point() or t.is_complex()))
            for t in tree_leaves(val)
            if isinstance(t, torch.Tensor)
        ]
        results = [
            TracedResult(t, None, self.allocated(math.prod(t.shape) * t.dtype.itemsize), grad)
            for t in outputs
        ]
        footprint = unknown(sum(r.nbytes for r in results), inputs if grad else [], self.allocated)
        sizes = [(k, math.prod(t.shape) * t.dtype.itemsize) for k, t in enumerate(inputs)] + [
            (-1 - j, r.nbytes) for j, r in enumerate(results)
        ]
        once = (KernelLaunch("call", "elementwise", tuple(sizes), -1),)
        return OperatorTrace(
            tuple(results),
            frozenset(range(len(inputs)) if grad else ()),
            (),
            several,
            once,
            once if grad else (),
            footprint,
        )

    def _stand_in(self, target: Callable[..., Any]) -> Callable[..., Any]:
        """What the program runs for ``target``, where meta tensors alone would not show it."""
        if target is aten.dropout.default:
            return meta_kernels.dropout
        if target is aten.scaled_dot_product_attention.default:
            return (
                meta_kernels.attention_on_cpu
                if self.device_type == "cpu"
                else meta_kernels.attention_on_gpu
            )
        return target


def input_spec(val: Any, grad: bool) -> Any:
    """An input of the program: parameters and batches lie contiguously."""
    return (
        contiguous_spec(tuple(val.shape), val.dtype, grad) if isinstance(val, torch.Tensor) else val
    )


def with_grad(value: Any, grad: bool) -> Any:
    """``value``, marked as needing a gradient or not."""
    return (
        value._replace(grad=grad) if isinstance(value, TensorSpec) and value.grad != grad else value
    )


def with_operands(node: fx.Node, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with ``inputs`` for its operands, in the order of
    ``graph.operands``.
    """
    left = iter(inputs)

    def put(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [next(left) if isinstance(item, fx.Node) else item for item in value]
        return next(left) if isinstance(value, fx.Node) else value

    return [put(a) for a in node.args], {k: put(v) for k, v in node.kwargs.items()}


def _backward(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], places: dict[int, int]
) -> tuple[KernelLaunch, ...]:
    """The kernels that a backward launches. Of what has none on meta tensors: one, that reads the
    gradient and all operands and writes their gradients."""
    inputs = [t for t in tensors if t.requires_grad]
    if not outputs or not inputs:
        return ()
    arriving = [torch.empty_like(t) for t in outputs]
    try:
        with KernelRecorder() as ran:
            gradients = torch.autograd.grad(outputs, inputs, arriving, allow_unused=True)
    except Exception:  # as above
        nbytes = [
            (places[storage_id(t)], t.numel() * t.dtype.itemsize)
            for t in (*outputs, *tensors, *inputs)
        ]
        return (
            KernelLaunch("backward", "elementwise", tuple(nbytes), places[storage_id(inputs[0])]),
        )
    places = places | {
        storage_id(g): places[storage_id(t)]
        for g, t in zip(gradients, inputs, strict=True)
        if g is not None
    }
    return ran.launches(
        places
        | {storage_id(g): places[storage_id(t)] for g, t in zip(arriving, outputs, strict=True)}
    )


def _frozen(value: Any) -> Any:
    """``value`` as a key. 1, 1.0 and True are equal, but not to torch."""
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value), value)


def _made(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, TensorSpec):
        t = torch.empty_strided(
            value.shape, value.stride, dtype=value.dtype, device="meta"
        ).requires_grad_(value.grad)
        tensors.append(t)
        return t
    return [_made(v, tensors) for v in value] if isinstance(value, (list, tuple)) else value


def _placed_on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in kwargs else {}
