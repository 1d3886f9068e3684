"""Gradients of parameters, summed over the ranks that hold parts of the sum: once a step, in
buckets, during the last backward.

In the graph a parameter's gradient is local to the rank. Along each mesh axis its plan says what is
still to be done:

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

Where the graph computes in another dtype than a parameter has, so does its gradient come.
Microbatches add up in the parameter's dtype, ranks in the one that is asked for, and what is
delivered has the parameter's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.ir.layout import I
from autopar.ir.plan_data import BUCKET_BYTES
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.gather import buckets, cut, exchange
from autopar.runtime.parameters.model_state import Weight

_functional = torch.ops._c10d_functional
Gradients = list[tuple[Weight, torch.Tensor]]


@dataclass
class _Bucket:
    weights: list[Weight]
    scatter: tuple[int, ...]  # axes of a reduce-scatter
    reduce: tuple[int, ...]  # axes of an all-reduce, after it
    dtype: torch.dtype  # in which it sums
    expected: set[str] = field(
        default_factory=set
    )  # parameters that got a gradient in the last round; all of them at first
    missing: set[str] = field(default_factory=set)  # those of them that have none yet in this round
    flat: torch.Tensor | None = None  # what goes into an all-reduce, filled as gradients come
    filled: dict[str, torch.Tensor] = field(default_factory=dict)  # the parts of it that are there
    places: dict[str, torch.Tensor] = field(default_factory=dict)  # all its parts

    def put(self, weight: Weight) -> None:
        """Moves a gradient into the bucket while it is still in the cache, and frees it for the
        next ones.
        """
        gradient = weight.gradient
        if (
            gradient is None
            or gradient.is_sparse
            or self.scatter
            or weight.moved
            or weight.name not in self.expected
        ):
            return
        if self.flat is None:
            inside = [w for w in self.weights if w.name in self.expected]
            self.flat = gradient.new_empty(sum(w.leaf.numel() for w in inside), dtype=self.dtype)
            pieces = self.flat.split([w.leaf.numel() for w in inside])
            self.places = {
                w.name: piece.view(w.leaf.shape) for w, piece in zip(inside, pieces, strict=True)
            }
        self.filled[weight.name] = self.places[weight.name].copy_(gradient)
        weight.drop_gradient()

    def clear(self) -> None:
        """Ready for another round."""
        self.missing, self.flat, self.filled, self.places = set(self.expected), None, {}, {}


@dataclass
class _Flight:
    """A collective under way and what it carries."""

    weights: list[Weight]
    flat: torch.Tensor
    reduce: tuple[int, ...]


class GradientSync:
    """Synchronises the gradients of ``weights``, which come in the order in which the graph first
    uses them.

    A round is one backward: :meth:`begin`, the backward (whose hooks start the collectives of full
    buckets, in the same order on all ranks), :meth:`finish`, which waits, and :meth:`deliver`,
    which adds to ``parameter.grad``. A parameter that got no gradient keeps
    ``grad`` as it was. Arguments: ``bucket_bytes``, the most that goes into one collective;
    ``dtype``, in which ranks' gradients are summed (None: as they come).
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._mesh = mesh
        # Where autograd accumulates into the parameter itself there is nothing to do.
        backward_order = [
            w
            for w in weights
            if w.leaf is not w.parameter and (w.leaf.is_floating_point() or w.leaf.is_complex())
        ][::-1]
        self._weights = backward_order
        self._local = [w for w in backward_order if not any(self._communication(w)) and not w.moved]
        others = [w for w in backward_order if any(self._communication(w)) or w.moved]
        grouped = buckets(
            others,
            lambda w: (self._communication(w), w.exchanged, w.leaf.dtype, w.local.dtype),
            bucket_bytes,
        )
        self._buckets = [self._bucket(group, dtype) for group in grouped]
        for weight in self._local:
            if weight.cast:
                _on_gradient(weight, Weight.add_up)
        self._armed = False
        self._next = 0
        self._flights: list[_Flight] = []

    def _bucket(self, group: list[Weight], dtype: torch.dtype | None) -> _Bucket:
        scatter, reduce = self._communication(group[0])
        own = group[0].leaf.dtype if scatter or reduce else group[0].local.dtype
        bucket = _Bucket(
            group,
            scatter,
            reduce,
            dtype if dtype and (scatter or reduce) else own,
            expected={w.name for w in group},
        )
        for axes in (scatter, reduce):
            if axes:
                self._mesh.axes_group(axes)  # made while all ranks are here
        me, its = (
            weakref.ref(self),
            weakref.ref(bucket),
        )  # the garbage collector does not see a tensor's hooks

        def arrived(weight: Weight) -> None:
            sync, into = me(), its()
            if sync is not None and into is not None:
                sync._arrived(into, weight)

        for weight in group:
            _on_gradient(weight, arrived)
        return bucket

    def _arrived(self, bucket: _Bucket, weight: Weight) -> None:
        if weight.cast and (not self._armed or weight.summed is not None):
            weight.add_up()
        if not self._armed:
            return
        if weight.name in bucket.missing:
            with torch.no_grad():
                bucket.put(weight)
            bucket.missing.discard(weight.name)
        self._launch_full()

    def _communication(self, weight: Weight) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the reduce-scatter and of the all-reduce."""
        pending = [
            a for a, t in enumerate(weight.used) if t.kind == "R" and self._mesh.sizes[a] > 1
        ]
        return tuple(a for a in pending if weight.stored[a].is_shard), tuple(
            a for a in pending if weight.stored[a] == I
        )

    # A round

    def clear(self) -> None:
        """Forgets what a backward that failed has left."""
        self._armed, self._flights = False, []
        for weight in self._weights:
            weight.drop_gradient()
        for bucket in self._buckets:
            bucket.clear()

    def begin(self) -> None:
        """From here on, buckets whose gradients are all there start."""
        self._armed, self._next, self._flights = True, 0, []
        for bucket in self._buckets:
            bucket.clear()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        filled, flat = bucket.filled, bucket.flat
        bucket.filled, bucket.flat, bucket.places = (
            {},
            None,
            {},
        )  # from here on it lives as long as the gradients
        present = [w for w in bucket.weights if w.name in filled or w.gradient is not None]
        if not present:
            return
        if flat is not None and len(filled) == len(present) == len(
            bucket.expected
        ):  # the usual case
            self._flights.append(_Flight(present, self._all_reduce(flat, bucket.reduce), ()))
            return
        taken = [filled[w.name] if w.name in filled else self._take(w) for w in present]
        arrived = exchange(taken, present, self._mesh, back=True)
        gradients = [
            g if w.name in filled else self._cut(w, g)
            for w, g in zip(present, arrived, strict=True)
        ]
        if bucket.scatter:
            group = self._mesh.axes_group(bucket.scatter)
            flat = (
                torch.cat([g.reshape(group.size(), -1) for g in gradients], dim=1)
                .view(-1)
                .to(bucket.dtype)
            )
            flat = _functional.reduce_scatter_tensor(flat, "sum", group.size(), group.group_name)
            self._flights.append(_Flight(present, flat, bucket.reduce))
            return
        flat = (
            gradients[0].reshape(-1)
            if len(gradients) == 1
            else torch.cat([g.reshape(-1) for g in gradients])
        )
        self._flights.append(
            _Flight(
                present, self._all_reduce(flat.contiguous().to(bucket.dtype), bucket.reduce), ()
            )
        )

    def _all_reduce(self, flat: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        return (
            _functional.all_reduce_(flat, "sum", self._mesh.axes_group(axes).group_name)
            if axes
            else flat
        )

    def _take(self, weight: Weight) -> torch.Tensor:
        """The leaf's gradient."""
        gradient = weight.gradient
        assert gradient is not None
        weight.drop_gradient()
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _cut(self, weight: Weight, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient cut along the axes on which the leaf was gathered: shape (ranks of the
        reduce-scatter..., *local).
        """
        if not weight.gathered:
            return gradient
        axes = weight.gathered
        gradient = cut(
            gradient, [self._mesh.sizes[a] for a in axes], [weight.stored[a] for a in axes]
        )
        for position in reversed(range(len(axes))):
            if weight.used[axes[position]] == I:
                gradient = gradient.select(position, self._mesh.coordinate[axes[position]])
        return gradient

    @torch.no_grad()
    def finish(self) -> Gradients:
        """Starts what did not start by itself, waits for all, and returns this rank's part of each
        gradient, in the parameter's dtype.
        """
        since = self._mesh.recorder.mark()
        self._armed = False
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:  # what came after its bucket had gone
            self._launch(bucket)
        for flight in self._flights:
            if flight.reduce:
                flight.flat = self._all_reduce(_functional.wait_tensor(flight.flat), flight.reduce)
        gradients = [(w, self._take(w)) for w in self._local if w.gradient is not None]
        self._learn()
        flights, self._flights = self._flights[::-1], []
        while flights:
            flight = flights.pop()  # what is cast goes at once
            whole = _functional.wait_tensor(flight.flat).to(
                flight.weights[0].local.dtype
            )  # a bucket's parameters are of one dtype
            pieces = whole.split([w.local.numel() for w in flight.weights])
            gradients += [
                (w, piece.view(w.local.shape))
                for w, piece in zip(flight.weights, pieces, strict=True)
            ]
        self._mesh.recorder.add("gradient synchronisation", since)
        return gradients

    def _learn(self) -> None:
        """A parameter that the loss does not reach shall not hold up its bucket next time."""
        arrived = {w.name for flight in self._flights for w in flight.weights}
        for bucket in self._buckets if arrived else ():
            bucket.expected = arrived.intersection(w.name for w in bucket.weights)

    @torch.no_grad()
    def deliver(self, gradients: Gradients) -> None:
        """Adds ``gradients`` to what the parameters have in ``grad``, and calls the hooks of these
        as autograd does: once. Takes the tensors over, one by one, so that a hook that uses a
        gradient up frees it."""
        gradients.reverse()
        while gradients:
            weight, value = gradients.pop()
            if hooks := weight.parameter._backward_hooks:
                value = _hooked(weight, value, list(hooks.values()))
            self._accumulate(weight, value)
            del value
            for hook in list((weight.parameter._post_accumulate_grad_hooks or {}).values()):
                hook(weight.parameter)

    def _accumulate(self, weight: Weight, value: torch.Tensor) -> None:
        old = weight.parameter.grad
        if old is None:
            weight.parameter.grad = weight.wrap(value)
        elif isinstance(old, DTensor):
            placements = weight.parameter.placements  # type: ignore[attr-defined]
            if old.placements != placements:  # the user put another one there
                weight.parameter.grad = old = old.redistribute(placements=placements)  # type: ignore[assignment]
            old.to_local().add_(value)
        else:
            old.add_(value)


def _hooked(
    weight: Weight,
    value: torch.Tensor,
    hooks: Sequence[Callable[[torch.Tensor], torch.Tensor | None]],
) -> torch.Tensor:
    """What the hooks of ``register_hook`` make of a gradient, this rank's part of it."""
    gradient = weight.wrap(value)
    for hook in hooks:
        found = hook(gradient)
        gradient = gradient if found is None else found
    parameter = weight.parameter
    if gradient.shape != parameter.shape or isinstance(gradient, DTensor) != isinstance(
        parameter, DTensor
    ):
        raise RunError(
            f"a hook of parameter {weight.name} returned a {type(gradient).__name__} of shape "
            f"{tuple(gradient.shape)}; its gradient is a "
            f"{type(parameter.data).__name__} of shape {tuple(parameter.shape)}, and so must be "
            "what takes its place"
        )
    if isinstance(gradient, DTensor):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()  # type: ignore[attr-defined]
    return gradient.detach().to(value.dtype)


def _on_gradient(weight: Weight, arrived: Callable[[Weight], None]) -> None:
    """Calls ``arrived`` whenever autograd has added to the leaf's gradient."""
    mine = weakref.ref(weight)

    def hook(_: torch.Tensor) -> None:
        if (arriving := mine()) is not None:
            arrived(arriving)

    trains = weight.leaf.requires_grad
    weight.leaf.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    weight.leaf.requires_grad_(trains)
