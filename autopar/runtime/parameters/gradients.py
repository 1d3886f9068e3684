"""Gradients of parameters, summed over the ranks that hold parts of the sum: once a step, in
buckets, during the last backward.

In the graph a parameter's gradient is local to the rank. Along each mesh axis its plan says what is
still to be done (in ``ir.parameter_collectives`` for the memory count and the cost model, too):

======== ======== =====================================
used     stored   gradient
======== ======== =====================================
I        I        nothing: it is the same everywhere
S(d)     S(d)     nothing: each rank has its own part
S(d)/m   S(d)     ranks exchange its pieces
R        I        all-reduce
R        S(d)     reduce-scatter (ZeRO)
I        S(d)     this rank's slice
======== ======== =====================================

The loss is the loss of the whole batch on every rank, so gradients are sums and never averages.

Where the graph computes in another dtype than the parameter has, the graph's gradient has that
dtype. Microbatches add up in the parameter's dtype, ranks sum in the plan's ``reduce_dtype``, and
the gradient that is delivered has the parameter's dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.ir.parameter_collectives import (
    BUCKET_BYTES,
    Bucket,
    ParameterSpec,
    gradient_buckets,
)
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.torch_private import (
    accumulation_hooks,
    gradient_hooks,
    start_all_reduce,
    wait,
)
from autopar.runtime.parameters.gradient_bucket import GradientBucket, StartedBucket
from autopar.runtime.parameters.gradient_handlers import GradientHandlers
from autopar.runtime.parameters.waiting_gradients import keep_waiting, may_wait, take_waiting
from autopar.runtime.parameters.weight import Weight

Gradients = list[tuple[Weight, torch.Tensor]]


class GradientSync:
    """Synchronises the gradients of ``weights``, which come in the order in which the graph first
    uses them.

    A round is one backward. :meth:`begin` comes before it, and its hooks start the collectives of
    full buckets, in the same order on all ranks. :meth:`finish` waits for them, and :meth:`deliver`
    adds the gradients to ``parameter.grad``. A parameter that got no gradient keeps ``grad`` as it
    was.

    Args:
        handlers: the functions of the user that see the gradients before they are added.
        bucket_bytes: the most that one collective carries.
        dtype: the dtype in which ranks sum gradients; None for the dtype of the graph.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        mesh: Mesh,
        handlers: GradientHandlers,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._mesh, self._handlers = mesh, handlers
        # Where autograd accumulates into the parameter itself nothing is left to do.
        self._weights = [
            w
            for w in weights
            if w.leaf is not w.parameter and (w.leaf.is_floating_point() or w.leaf.is_complex())
        ]
        self._local = [w for w in self._weights if not w.spec.collectives.is_synchronised][::-1]
        buckets = gradient_buckets([w.spec for w in self._weights], bucket_bytes)
        self._buckets = [self._bucket(bucket, dtype) for bucket in buckets]
        for weight in self._local:
            if weight.spec.is_cast:
                _on_gradient(weight, Weight.accumulate)
        self._is_last_backward = False
        self._next = 0
        self._started: list[StartedBucket] = []

    def _bucket(self, bucket: Bucket[ParameterSpec], dtype: torch.dtype | None) -> GradientBucket:
        by_name = {weight.name: weight for weight in self._weights}
        made = GradientBucket(
            [by_name[spec.name] for spec in bucket.parameters],
            bucket.collectives,
            bucket.parameters[0].bucket_dtype(dtype),
        )
        for axes in (bucket.collectives.scattered, bucket.collectives.reduced):
            if axes:
                self._mesh.axes_group(axes)  # made while all ranks are here
        # Weak references: the garbage collector does not see the hooks of a tensor.
        weak_self, weak_bucket = weakref.ref(self), weakref.ref(made)

        def arrived(weight: Weight) -> None:
            sync, into = weak_self(), weak_bucket()
            if sync is not None and into is not None:
                sync._arrived(into, weight)

        for weight in made.weights:
            _on_gradient(weight, arrived)
        return made

    def _arrived(self, bucket: GradientBucket, weight: Weight) -> None:
        if weight.spec.is_cast and (not self._is_last_backward or weight.summed is not None):
            weight.accumulate()
        if not self._is_last_backward:
            return
        if weight.name in bucket.missing:
            with torch.no_grad():
                bucket.put(weight)
            bucket.missing.discard(weight.name)
        self._launch_full()

    def clear(self) -> None:
        """Forgets the gradients that a failed backward has left."""
        self._is_last_backward, self._started = False, []
        for weight in self._weights:
            weight.drop_gradient()
        for bucket in self._buckets:
            bucket.clear()

    def begin(self) -> None:
        """Comes before the last backward of a step, in which full buckets start."""
        self._is_last_backward, self._next, self._started = True, 0, []
        for bucket in self._buckets:
            bucket.clear()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: GradientBucket) -> None:
        if (started := bucket.start(self._mesh)) is not None:
            self._started.append(started)

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Starts the collectives that did not start yet, waits for all, and returns this rank's
        part of each gradient, in the parameter's dtype.
        """
        since = self._mesh.recorder.mark()
        self._is_last_backward = False
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:  # gradients that came after their bucket had started
            self._launch(bucket)
        for started in self._started:
            if started.reduced:
                group = self._mesh.axes_group(started.reduced)
                started.flat = start_all_reduce(wait(started.flat), group)
        gradients = [(w, w.take_gradient()) for w in self._local if w.gradient is not None]
        self._expect_the_same()
        all_started, self._started = self._started[::-1], []
        while all_started:
            gradients += _gradients_of(all_started.pop())
        self._mesh.recorder.add("gradient synchronisation", since)
        return gradients

    def _expect_the_same(self) -> None:
        """In the next round no bucket waits for a parameter that the loss does not reach."""
        arrived = {w.name for started in self._started for w in started.weights}
        for bucket in self._buckets if arrived else ():
            bucket.expected = arrived.intersection(w.name for w in bucket.weights)

    @property
    def may_wait(self) -> bool:
        """Whether the gradients of the next backward may wait for their sum."""
        return may_wait(self._summed)

    def keep_waiting(self) -> Gradients:
        """Leaves what the backward has left to wait for its sum. Returns the gradients that need no
        sum.
        """
        keep_waiting(self._summed, self._mesh)
        return [(w, w.take_gradient()) for w in self._local if w.gradient is not None]

    def take_waiting(self) -> None:
        """The next backward adds to the gradients that wait, and its collectives sum both."""
        take_waiting(self._summed)

    @property
    def _summed(self) -> list[Weight]:
        """The parameters whose gradients are summed over ranks."""
        return [weight for bucket in self._buckets for weight in bucket.weights]

    @torch.no_grad()
    def deliver(self, gradients: Gradients) -> None:
        """Adds ``gradients`` to the ``grad`` of the parameters, and calls their hooks once, as
        autograd does, and the gradient handlers. Takes the tensors out of ``gradients`` one by one,
        so that a hook that uses a gradient up frees it.
        """
        gradients.reverse()
        while gradients:
            weight, value = gradients.pop()
            if hooks := gradient_hooks(weight.parameter):
                value = _call_hooks(weight, value, hooks)
            value = self._handlers.run(weight, value)
            _add_to_grad(weight, value)
            del value
            for hook in accumulation_hooks(weight.parameter):
                hook(weight.parameter)


def _gradients_of(started: StartedBucket) -> Gradients:
    """This rank's parts of the gradients in a bucket, whose parameters have one dtype."""
    whole = wait(started.flat).to(started.weights[0].local.dtype)
    pieces = whole.split([w.local.numel() for w in started.weights])
    return [
        (w, piece.view(w.local.shape)) for w, piece in zip(started.weights, pieces, strict=True)
    ]


def _add_to_grad(weight: Weight, value: torch.Tensor) -> None:
    old = weight.parameter.grad
    if old is None:
        weight.parameter.grad = weight.wrap(value)
    elif isinstance(old, DTensor):
        placements = weight.parameter.placements  # type: ignore[attr-defined]
        if old.placements != placements:  # the user put another gradient there
            old = old.redistribute(placements=placements)
            weight.parameter.grad = old
        old.to_local().add_(value)
    else:
        old.add_(value)


def _call_hooks(
    weight: Weight,
    value: torch.Tensor,
    hooks: Sequence[Callable[[torch.Tensor], torch.Tensor | None]],
) -> torch.Tensor:
    """This rank's part of the gradient that the hooks of ``register_hook`` make of ``value``."""
    gradient = weight.wrap(value)
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    parameter = weight.parameter
    is_wrapped = isinstance(gradient, DTensor), isinstance(parameter, DTensor)
    if gradient.shape != parameter.shape or is_wrapped[0] != is_wrapped[1]:
        raise RunError(
            f"a hook of parameter {weight.name} returned a {type(gradient).__name__} of shape "
            f"{tuple(gradient.shape)}; its gradient is a {type(parameter.data).__name__} of shape "
            f"{tuple(parameter.shape)}, and so must be what takes its place"
        )
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        placed = gradient.redistribute(parameter.device_mesh, parameter.placements)
        gradient = placed.to_local()
    return gradient.detach().to(value.dtype)


def _on_gradient(weight: Weight, arrived: Callable[[Weight], None]) -> None:
    """Calls ``arrived`` whenever autograd has added to the leaf's gradient."""
    weak_weight = weakref.ref(weight)

    def hook(_: torch.Tensor) -> None:
        if (arriving := weak_weight()) is not None:
            arrived(arriving)

    trains = weight.leaf.requires_grad
    weight.leaf.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    weight.leaf.requires_grad_(trains)
