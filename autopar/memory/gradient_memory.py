"""The memory of parameters' gradients during a step, as ``runtime.gradients`` and
``runtime.gather`` have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.parameter_collectives import ParameterSpec, gather_order, gradient_buckets
from autopar.memory.live_memory import GRADIENTS, TRANSIENT, GradientBuffer, LiveMemory


@dataclass(frozen=True)
class LocalParameter(ParameterSpec):
    """One parameter on one rank. ``is_trainable``: whether the loss has a gradient for it."""

    is_trainable: bool

    @property
    def has_apart_pieces(self) -> bool:
        """Whether pieces that ranks exchange lie apart in memory."""
        return any(self.used[axis].dim for axis in self.collectives.exchanged)

    @property
    def is_joined_in_place(self) -> bool:
        """Whether gathered parts lie in memory as they do in the whole."""
        return [self.stored[axis].dim for axis in self.collectives.gathered] == [0]


class GradientMemory:
    """The gradients of one stage's parameters, which come ``in_order`` of first use; ``direct`` if
    autograd has them in the parameters themselves. ``reduction_dtype``: in which ranks sum them,
    None for that in which they are made."""

    def __init__(
        self, in_order: Sequence[LocalParameter], direct: bool, reduction_dtype: torch.dtype | None
    ) -> None:
        self._leaves = {leaf.name: leaf for leaf in in_order}
        self._direct, self._reduction_dtype = direct, reduction_dtype
        self._there: dict[str, int] = {}  # what the backward has left
        self._added: dict[
            str, int
        ] = {}  # the sum of microbatches, in the parameter's dtype where that is not the graph's
        self._buckets = [] if direct else [b.parameters for b in gradient_buckets(in_order)]
        self._bucket_of = {
            leaf.name: i for i, bucket in enumerate(self._buckets) for leaf in bucket
        }
        self._flats: dict[int, int] = {}
        self._missing: list[set[str]] = []
        self._armed = False
        self._next = 0

    def begin_last_backward(self) -> None:
        """Before the last backward of a step."""
        self._armed, self._next = True, 0
        self._missing = [
            {leaf.name for leaf in bucket if leaf.is_trainable} for bucket in self._buckets
        ]

    def arrive(self, name: str, grad: GradientBuffer, ledger: LiveMemory) -> None:
        """The whole gradient that a backward has for one parameter."""
        leaf = self._leaves[name]
        own = grad.refs == 1 and grad.dense
        if name in self._there:
            pass  # added in place
        elif own:
            self._there[name] = grad.nbytes
            ledger.move(grad.nbytes, TRANSIENT, GRADIENTS)
            grad = GradientBuffer(0)
        else:
            self._there[name] = leaf.leaf_bytes
            ledger.add(GRADIENTS, leaf.leaf_bytes)
        grad.refs -= 1
        if not grad.refs:
            ledger.add(TRANSIENT, -grad.nbytes)
        place = self._bucket_of.get(name)
        if (
            leaf.is_cast
            and not self._direct
            and (place is None or not self._armed or name in self._added)
        ):
            self._add_up(leaf, ledger)
        if place is not None and self._armed:
            self._put(leaf, place, ledger)

    def _add_up(self, leaf: LocalParameter, ledger: LiveMemory) -> None:
        ledger.add_briefly(leaf.elements * leaf.stored_dtype.itemsize)
        if leaf.name not in self._added:
            self._added[leaf.name] = leaf.elements * leaf.stored_dtype.itemsize
            ledger.add(GRADIENTS, self._added[leaf.name])
        ledger.add(GRADIENTS, -self._there.pop(leaf.name))

    def _put(self, leaf: LocalParameter, place: int, ledger: LiveMemory) -> None:
        bucket = self._buckets[place]
        if not (leaf.scatter_ranks > 1 or leaf.collectives.is_moved):
            if place not in self._flats:
                self._flats[place] = (
                    sum(each.elements for each in bucket if each.is_trainable)
                    * leaf.bucket_dtype(self._reduction_dtype).itemsize
                )
                ledger.add(GRADIENTS, self._flats[place])
            self._drop(leaf.name, ledger)
        self._missing[place].discard(leaf.name)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._launch(self._next, ledger)
            self._next += 1

    def _drop(self, name: str, ledger: LiveMemory) -> None:
        ledger.add(GRADIENTS, -self._there.pop(name, 0) - self._added.pop(name, 0))

    def _launch(self, place: int, ledger: LiveMemory) -> None:
        bucket = [leaf for leaf in self._buckets[place] if leaf.is_trainable]
        if place in self._flats or not bucket:
            return
        first, ranks = bucket[0].collectives, bucket[0].scatter_ranks
        itemsize = bucket[0].bucket_dtype(self._reduction_dtype).itemsize
        made = [self._added.get(leaf.name, self._there.get(leaf.name, 0)) for leaf in bucket]
        parts = [leaf.elements // max(leaf.stored_elements, 1) for leaf in bucket]
        if first.exchanged:
            ledger.add_briefly(_exchanging(bucket, made))
        joined = sum(
            nbytes if ranks > 1 else nbytes // n for nbytes, n in zip(made, parts, strict=True)
        )
        if len(bucket) == 1 and first.exchanged and not first.gathered:
            joined = 0  # what arrived lies as it shall
        sends = itemsize * sum(
            leaf.elements if ranks > 1 else leaf.stored_elements for leaf in bucket
        )
        result = sends // ranks
        cast = 0 if itemsize * sum(leaf.elements for leaf in bucket) == sum(made) else sends
        ledger.add_briefly(joined + max(cast, 0) + (result if ranks > 1 else 0))
        for leaf in bucket:
            self._drop(leaf.name, ledger)
        self._flats[place] = result
        ledger.add(GRADIENTS, result)

    def finish(self, ledger: LiveMemory) -> None:
        """After the last backward: what is left has the parameters' dtype."""
        for place in range(self._next, len(self._buckets)):
            self._launch(place, ledger)
        for place, nbytes in self._flats.items():
            bucket = [leaf for leaf in self._buckets[place] if leaf.is_trainable]
            whole = sum(leaf.stored_bytes for leaf in bucket)
            if bucket[0].bucket_dtype(self._reduction_dtype) != bucket[0].stored_dtype:
                ledger.add(GRADIENTS, whole)
                ledger.add(GRADIENTS, -nbytes)
        self._flats, self._armed = {}, False


def _exchanging(bucket: Sequence[LocalParameter], made: Sequence[int]) -> int:
    """The most bytes that exchanging pieces of tensors of so many takes: what is sent beside its
    pieces, then what arrives beside what is put together."""
    apart = [nbytes for nbytes, leaf in zip(made, bucket, strict=True) if leaf.has_apart_pieces]
    return 2 * sum(made) + max(apart, default=0)


def gather_memory(in_order: Sequence[LocalParameter]) -> tuple[int, int, int]:
    """Bytes of compute copies, and of gathered parameters, while a step runs; and the most that
    making them takes beyond these.
    """
    order = gather_order(in_order)
    copies = sum(leaf.leaf_bytes for leaf in order.cast)
    together = [bucket.parameters for bucket in order.gathered]
    wholes = [sum(leaf.leaf_bytes for leaf in bucket) for bucket in together]
    sent = [
        sum(leaf.stored_elements * leaf.dtype.itemsize for leaf in bucket) for bucket in together
    ]
    gathered, most, now = sum(wholes), 0, 0
    for whole, part in zip(wholes, sent, strict=True):
        now += whole
        most = max(most, now + part)
    now += copies
    for bucket in (exchanged.parameters for exchanged in order.exchanged):
        made = [leaf.leaf_bytes for leaf in bucket]
        cast = sum(leaf.leaf_bytes for leaf in bucket if leaf.is_cast)
        most = max(most, now + cast + _exchanging(bucket, made))
        now, gathered = now + sum(made), gathered + sum(made)
    most = max(most, now)
    for bucket, whole in zip(together, wholes, strict=True):
        joined = whole if len(bucket) > 1 or not bucket[0].is_joined_in_place else 0
        made = [leaf.leaf_bytes for leaf in bucket]
        exchange = _exchanging(bucket, made) if bucket[0].collectives.exchanged else 0
        most = max(most, now + joined + exchange)
    return copies, gathered, max(0, most - gathered - copies)
