"""torch's functional collectives, for tensors of every dtype that can be sent.

The names and arguments are those of ``torch.ops._c10d_functional``, and so is the result: read it
after :func:`wait_tensor`. gloo and NCCL know few dtypes. What only moves is sent as another dtype
of the same bytes, and a complex number is summed as its two parts. Sums of other dtypes, such as
8-bit floats, are refused, because no backend adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import RunError

_ops = torch.ops._c10d_functional
wait_tensor = _ops.wait_tensor

_SENT = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_PARTS = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.complex32: torch.float16,
}


def as_message(x: torch.Tensor) -> torch.Tensor:
    """``x`` as backends send it: the same bytes, the same dims in front, and the memory of ``x``
    where it is contiguous.
    """
    if x.dtype in _SENT:
        return x.contiguous()
    plain = x.resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).view(_PARTS.get(x.dtype, torch.uint8))


def _from_message(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`as_message`; also before the message has arrived."""
    return message if message.dtype is dtype else message.view(dtype).squeeze(-1)


def _as_summands(x: torch.Tensor, op: str) -> torch.Tensor:
    """:func:`as_message` of what is combined by ``op``, "sum" or "max"."""
    if x.dtype not in _SENT and not (x.dtype in _PARTS and op == "sum"):
        raise RunError(
            f"a {op} of {x.dtype} over ranks, of a tensor of shape {tuple(x.shape)}: torch's "
            "backends have none for this dtype; convert to float32 (of integers, to int64) in the "
            "model before what is split over ranks, or constrain the tensor to lie whole"
        )
    return as_message(x)


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """``x`` of all ranks, combined by ``op``, in a new tensor."""
    return _from_message(_ops.all_reduce(_as_summands(x, op), op, group), x.dtype)


def all_reduce_(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Combines ``x``, which is contiguous, in place."""
    return _from_message(_ops.all_reduce_(_as_summands(x, op), op, group), x.dtype)


def all_gather_into_tensor(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """``x`` of all ranks, one after the other along dim 0."""
    return _from_message(_ops.all_gather_into_tensor(as_message(x), ranks, group), x.dtype)


def all_gather_into_tensor_coalesced(
    parts: Sequence[torch.Tensor], ranks: int, group: str
) -> list[torch.Tensor]:
    """:func:`all_gather_into_tensor` of each of ``parts``, in one collective."""
    messages = [as_message(x) for x in parts]
    started = _ops.all_gather_into_tensor_coalesced(messages, ranks, group)
    return [_from_message(y, x.dtype) for y, x in zip(started, parts, strict=True)]


def reduce_scatter_tensor_coalesced(
    parts: Sequence[torch.Tensor], op: str, ranks: int, group: str
) -> list[torch.Tensor]:
    """:func:`reduce_scatter_tensor` of each of ``parts``, in one collective."""
    messages = [_as_summands(x, op) for x in parts]
    started = _ops.reduce_scatter_tensor_coalesced(messages, op, ranks, group)
    return [_from_message(y, x.dtype) for y, x in zip(started, parts, strict=True)]


def reduce_scatter_tensor(x: torch.Tensor, op: str, ranks: int, group: str) -> torch.Tensor:
    """This rank's chunk along dim 0 of ``x`` of all ranks, combined by ``op``."""
    message = _as_summands(x, op)
    return _from_message(_ops.reduce_scatter_tensor(message, op, ranks, group), x.dtype)


def all_to_all_single(
    x: torch.Tensor, received: list[int], sent: list[int], group: str
) -> torch.Tensor:
    """What each rank sends here; the sizes are along dim 0."""
    return _from_message(_ops.all_to_all_single(as_message(x), received, sent, group), x.dtype)


def broadcast_(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    """Fills ``x``, which is contiguous, with that of rank ``source`` of the group."""
    return _from_message(_ops.broadcast_(as_message(x), source, group), x.dtype)
