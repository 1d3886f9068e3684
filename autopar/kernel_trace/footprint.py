"""The memory that one call takes while it runs, forward and backward, and which of its gradients
share storage. torch runs the call on meta tensors, and every storage is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.kernel_trace.kernel_launches import storage_id
from autopar.runtime.measure.live_bytes import LiveBytes

Rounding = Callable[[int], int]


class Gradient(NamedTuple):
    """The gradient of one operand.

    Attributes:
        source: the number of its storage among the storages that the backward made; -1 - j where it
            shares the storage of result j's gradient.
        nbytes: bytes that it takes in a storage of its own.
        dense: whether no two of its elements share memory, so that autograd can add to it in place.
    """

    source: int
    nbytes: int
    dense: bool


class Footprint(NamedTuple):
    """The memory of one call.

    Attributes:
        forward: peak bytes of the forward beyond the operands; it contains the results.
        backward: peak bytes of the backward beyond the saved tensors and the results' gradients.
        made: bytes of each storage of gradients that the backward leaves.
        gradients: the gradient of each operand, None for an operand without a gradient.
    """

    forward: int = 0
    backward: int = 0
    made: tuple[int, ...] = ()
    gradients: tuple[Gradient | None, ...] = ()


def trace_footprint(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    allocated: Rounding,
) -> Footprint:
    """Runs ``call`` forward and backward on meta tensors and measures its memory.

    Args:
        call: the operator.
        args, kwargs: its arguments.
        operands: the tensors among the arguments, in order.
        allocated: maps the bytes of a tensor to the bytes that the allocator takes for the tensor.
    """
    watch = LiveBytes(meta=True, rounded=allocated)
    watch.uncounted |= {storage_id(t) for t in operands}
    with torch.set_grad_enabled(any(t.requires_grad for t in operands)), watch:
        out = call(*args, **kwargs)
    results = out if isinstance(out, (tuple, list)) else [out]
    outputs = [t for t in results if isinstance(t, torch.Tensor)]
    forward = watch.peak
    inputs = [t for t in operands if t.requires_grad]
    if not inputs or not any(t.requires_grad for t in outputs):
        return Footprint(forward, 0, (), (None,) * len(operands))
    watch.uncounted |= {storage_id(t) for t in outputs}
    arriving: list[Any] = []  # the storages of the results' gradients
    try:
        with watch:
            root = _Arrival.apply(watch, arriving, *outputs)
            made = torch.autograd.grad(root, inputs, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return assumed_footprint(forward, operands, allocated)
    found = dict(zip(map(id, inputs), made, strict=True))
    nbytes, gradients = _gradients(
        [found.get(id(t)) for t in operands], arriving, watch.uncounted, allocated
    )
    return Footprint(forward, watch.peak - watch.before, nbytes, gradients)


def _gradients(
    found: Sequence[torch.Tensor | None],
    arriving: Sequence[Any],
    uncounted: Collection[int],
    allocated: Rounding,
) -> tuple[tuple[int, ...], tuple[Gradient | None, ...]]:
    """The bytes of the storages that a backward made, and the gradient of each operand.

    Args:
        found: the gradient of each operand.
        arriving: the storages of the results' gradients, None for a result without one.
        uncounted: the ids of storages that existed before.
        allocated: as for :func:`trace_footprint`.
    """
    places = {ref.cdata: -1 - j for j, ref in enumerate(arriving) if ref is not None}
    made: dict[int, int] = {}
    gradients: list[Gradient | None] = []
    for g in found:
        if g is None:
            gradients.append(None)
            continue
        key, storage_bytes = storage_id(g), g.untyped_storage().nbytes()
        nbytes = g.numel() * g.dtype.itemsize
        if key not in places:
            places[key] = len(made)
            made[key] = allocated(storage_bytes) if key not in uncounted else 0
        gradients.append(Gradient(places[key], allocated(nbytes), storage_bytes >= nbytes))
    return tuple(made.values()), tuple(gradients)


def assumed_footprint(forward: int, operands: Sequence[Any], allocated: Rounding) -> Footprint:
    """The footprint of a call that does not run on meta tensors.

    It assumes that each gradient has a storage of its own, and that there are no temporaries.
    """
    made, gradients = list[int](), list[Gradient | None]()
    for t in operands:
        has_gradient = t.requires_grad if isinstance(t, torch.Tensor) else t.grad
        nbytes = allocated(torch.Size(t.shape).numel() * t.dtype.itemsize)
        gradients.append(Gradient(len(made), nbytes, True) if has_gradient else None)
        made += [nbytes] * has_gradient
    return Footprint(forward, sum(made), tuple(made), tuple(gradients))


class _Arrival(torch.autograd.Function):
    """Starts a backward with gradients that only autograd holds, as in the middle of a program."""

    @staticmethod
    def forward(
        ctx: Any, watch: LiveBytes, arriving: list[Any], *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.watch, ctx.arriving = watch, arriving
        ctx.like = [(t.shape, t.stride(), t.dtype) if t.requires_grad else None for t in outputs]
        ctx.set_materialize_grads(False)
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        made = [
            None if x is None else torch.empty_strided(x[0], x[1], dtype=x[2], device="meta")
            for x in ctx.like
        ]
        ctx.arriving += [None if t is None else StorageWeakRef(t.untyped_storage()) for t in made]
        ctx.watch.start()
        return (None, None, *made)
