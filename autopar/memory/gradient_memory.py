"""The memory of parameters' gradients, and of gathered parameters, during a step.

The collectives are those of ``ir.parameter_collectives``, as ``runtime.parameters`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.parameter_collectives import ParameterSpec, gather_order, gradient_buckets
from autopar.memory.live_memory import GRADIENTS, TRANSIENT, Change, GradientBuffer, LiveMemory
from autopar.memory.recorded_step import HeldGradient


@dataclass(frozen=True)
class LocalParameter(ParameterSpec):
    """One parameter on one rank.

    ``is_trainable`` says whether the loss has a gradient for it.
    """

    is_trainable: bool

    @property
    def has_strided_pieces(self) -> bool:
        """Whether the pieces that ranks exchange are not contiguous."""
        return any(self.used[axis].dim for axis in self.collectives.exchanged)

    @property
    def is_joined_in_place(self) -> bool:
        """Whether the gathered parts, one after the other, are the whole parameter."""
        return [self.stored[axis].dim for axis in self.collectives.gathered] == [0]

    @property
    def is_sent_as_it_is(self) -> bool:
        """Whether the gradient, after any exchange of its pieces, has the order in memory of what
        the collective sends.
        """
        found = self.collectives
        return not found.gathered or (self.is_joined_in_place and found.scattered == found.gathered)


class GradientMemory:
    """Counts the gradients of one stage's parameters.

    Args:
        parameters: the parameters, in the order of first use.
        is_direct: whether autograd adds gradients to the parameters themselves, without buckets.
        reduction_dtype: the dtype in which ranks sum gradients; None for the dtype of each.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        is_direct: bool,
        reduction_dtype: torch.dtype | None,
    ) -> None:
        self._parameters = {p.name: p for p in parameters}
        self._is_direct, self._reduction_dtype = is_direct, reduction_dtype
        # bytes of the gradients that backwards have left
        self._made: dict[str, int] = {}
        # bytes of the sums over microbatches, in the dtype of a parameter that the graph casts
        self._summed: dict[str, int] = {}
        self._buckets = [] if is_direct else [b.parameters for b in gradient_buckets(parameters)]
        self._bucket_of = {p.name: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._flat_bytes: dict[int, int] = {}  # bytes of each bucket's flat tensor
        self._missing: list[set[str]] = []
        self._is_last_backward, self._next = False, 0

    def begin_last_backward(self) -> None:
        """The last backward of the step starts: buckets launch when their gradients are there."""
        self._is_last_backward, self._next = True, 0
        self._missing = [{p.name for p in bucket if p.is_trainable} for bucket in self._buckets]

    def add_gradient(self, name: str, gradient: GradientBuffer, live: LiveMemory) -> None:
        """A backward has the whole gradient of one parameter."""
        parameter = self._parameters[name]
        is_taken_over = gradient.refs == 1 and gradient.dense
        if name in self._made:
            pass  # autograd adds in place
        elif is_taken_over:
            self._made[name] = gradient.nbytes
            live.move(gradient.nbytes, TRANSIENT, GRADIENTS)
            live.rename(gradient.tensor, HeldGradient(name, "made"))
            gradient = GradientBuffer(0)
        else:
            self._made[name] = parameter.leaf_bytes
            live.add(GRADIENTS, parameter.leaf_bytes, HeldGradient(name, "made"))
        gradient.refs -= 1
        if not gradient.refs:
            live.add(TRANSIENT, -gradient.nbytes, gradient.tensor)
        bucket = self._bucket_of.get(name)
        is_launching = bucket is not None and self._is_last_backward
        if parameter.is_cast and (not is_launching or name in self._summed):
            self._add_to_sum(parameter, live)
        if bucket is not None and is_launching:
            self._put_into_bucket(parameter, bucket, live)

    def finish(self, live: LiveMemory) -> None:
        """After the last backward: launches the last buckets and casts gradients to the parameters'
        dtypes.
        """
        for place in range(self._next, len(self._buckets)):
            self._launch(place, live)
        for place, nbytes in self._flat_bytes.items():
            bucket = [p for p in self._buckets[place] if p.is_trainable]
            if bucket[0].bucket_dtype(self._reduction_dtype) != bucket[0].stored_dtype:
                live.add(
                    GRADIENTS, sum(p.stored_bytes for p in bucket), HeldGradient(place, "cast")
                )
                live.add(GRADIENTS, -nbytes, HeldGradient(place, "flat"))
        self._flat_bytes, self._is_last_backward = {}, False

    def _add_to_sum(self, parameter: LocalParameter, live: LiveMemory) -> None:
        """Adds a microbatch's gradient to the sum in the parameter's dtype."""
        nbytes = parameter.elements * parameter.stored_dtype.itemsize
        live.add_briefly(nbytes)
        if parameter.name not in self._summed:
            self._summed[parameter.name] = nbytes
            live.add(GRADIENTS, nbytes, HeldGradient(parameter.name, "summed"))
        live.add(GRADIENTS, -self._made.pop(parameter.name), HeldGradient(parameter.name, "made"))

    def _put_into_bucket(self, parameter: LocalParameter, place: int, live: LiveMemory) -> None:
        """Launches all buckets that are complete with this gradient.

        A bucket that is only all-reduced collects its gradients in a flat tensor. A gradient alone
        is summed where it is.
        """
        trained = [p for p in self._buckets[place] if p.is_trainable]
        if not (parameter.scatter_ranks > 1 or parameter.collectives.is_moved or len(trained) == 1):
            if place not in self._flat_bytes:
                elements = sum(p.elements for p in trained)
                itemsize = parameter.bucket_dtype(self._reduction_dtype).itemsize
                self._flat_bytes[place] = elements * itemsize
                live.add(GRADIENTS, self._flat_bytes[place], HeldGradient(place, "flat"))
            self._free(parameter.name, live)
        self._missing[place].discard(parameter.name)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._launch(self._next, live)
            self._next += 1

    def _launch(self, place: int, live: LiveMemory) -> None:
        """Launches a bucket's collective, which replaces its gradients by one flat result."""
        bucket = [p for p in self._buckets[place] if p.is_trainable]
        if place in self._flat_bytes or not bucket:
            return
        first, ranks = bucket[0].collectives, bucket[0].scatter_ranks
        itemsize = bucket[0].bucket_dtype(self._reduction_dtype).itemsize
        made = [self._summed.get(p.name, self._made.get(p.name, 0)) for p in bucket]
        parts = [p.elements // max(p.stored_elements, 1) for p in bucket]
        if first.exchanged:
            live.add_briefly(_exchange_bytes(bucket, made))
        joined = sum(
            nbytes if ranks > 1 else nbytes // n for nbytes, n in zip(made, parts, strict=True)
        )
        if len(bucket) == 1 and bucket[0].is_sent_as_it_is:
            joined = 0
        sent = itemsize * sum(p.elements if ranks > 1 else p.stored_elements for p in bucket)
        result = sent // ranks
        cast = 0 if itemsize * sum(p.elements for p in bucket) == sum(made) else sent
        live.add_briefly(joined + cast + (result if ranks > 1 else 0))
        if ranks > 1:
            live.add(GRADIENTS, result, HeldGradient(place, "flat"))
        for parameter in bucket:
            self._free(parameter.name, live)
        if ranks == 1:  # summed in place, or in what is counted above
            live.add(GRADIENTS, result, HeldGradient(place, "flat"))
        self._flat_bytes[place] = result

    def _free(self, name: str, live: LiveMemory) -> None:
        live.add(GRADIENTS, -self._made.pop(name, 0), HeldGradient(name, "made"))
        live.add(GRADIENTS, -self._summed.pop(name, 0), HeldGradient(name, "summed"))


def _bytes_sent(bucket: Sequence[LocalParameter]) -> int:
    """Bytes of the copy that an all-gather sends: none for one parameter in its own dtype."""
    is_copied = len(bucket) > 1 or bucket[0].is_cast
    return is_copied * sum(p.stored_elements * p.dtype.itemsize for p in bucket)


def _exchange_bytes(bucket: Sequence[LocalParameter], made: Sequence[int]) -> int:
    """Peak bytes of an exchange of pieces of tensors with ``made`` bytes.

    First the operand exists beside its pieces, then the result beside the joined tensor.
    """
    pairs = zip(made, bucket, strict=True)
    strided = [nbytes for nbytes, parameter in pairs if parameter.has_strided_pieces]
    return 2 * sum(made) + max(strided, default=0)


def gather_memory(parameters: Sequence[LocalParameter]) -> tuple[int, int, int]:
    """The memory of parameters in another form during a step.

    Args:
        parameters: the parameters, in the order of first use.

    Returns:
        Bytes of compute copies, bytes of gathered parameters, and the peak bytes beyond these while
        they are made.
    """
    order = gather_order(parameters)
    copies = sum(p.leaf_bytes for p in order.cast)
    buckets = [bucket.parameters for bucket in order.gathered]
    wholes = [sum(p.leaf_bytes for p in bucket) for bucket in buckets]
    sent = [_bytes_sent(bucket) for bucket in buckets]
    gathered, peak, now = sum(wholes), 0, 0
    for whole, part in zip(wholes, sent, strict=True):
        now += whole
        peak = max(peak, now + part)
    now += copies
    for bucket in (exchanged.parameters for exchanged in order.exchanged):
        made = [p.leaf_bytes for p in bucket]
        cast = sum(p.leaf_bytes for p in bucket if p.is_cast)
        peak = max(peak, now + cast + _exchange_bytes(bucket, made))
        now, gathered = now + sum(made), gathered + sum(made)
    peak = max(peak, now)
    for bucket, whole in zip(buckets, wholes, strict=True):
        joined = whole if len(bucket) > 1 or not bucket[0].is_joined_in_place else 0
        made = [p.leaf_bytes for p in bucket]
        exchange = _exchange_bytes(bucket, made) if bucket[0].collectives.exchanged else 0
        peak = max(peak, now + joined + exchange)
    return copies, gathered, max(0, peak - gathered - copies)


def gather_changes(parameters: Sequence[LocalParameter]) -> list[Change]:
    """What :func:`gather_memory` counts, tensor by tensor."""
    copies, gathered, temporary = gather_memory(parameters)
    order = gather_order(parameters)
    buckets = (bucket.parameters for bucket in (*order.gathered, *order.exchanged))
    made = [*order.cast, *(p for bucket in buckets for p in bucket)]
    wholes = [Change((p.name, i, "whole"), p.leaf_bytes) for i, p in enumerate(made)]
    return [Change(None, copies + gathered + temporary), *wholes]
