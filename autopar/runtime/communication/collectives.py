"""Conversions between types along one mesh axis, differentiable.

The gradient of a conversion ``src -> dst`` is the conversion ``dual(dst) -> dual(src)``, so one
table of movements serves both directions. The semantics are those of ``spmd_types.redistribute``,
which the tests compare with. It is not called here because it costs about 40 us a call on top of
the communication. The functional collectives that are called instead are visible to inductor, which
can overlap them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from autopar.errors import RunError
from autopar.ir.layout import Type, parse_type
from autopar.runtime.communication import functional
from autopar.runtime.communication.mesh import Mesh

_wait = functional.wait_tensor


def redistribute(
    x: torch.Tensor,
    mesh: Mesh,
    axis: int,
    src: str,
    dst: str,
    reduction_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x``, of type ``src`` along mesh ``axis``, converted to type ``dst``.

    ``src`` and ``dst`` are ``"I"``, ``"R"``, ``"P"``, ``"S<dim>"``, ``"S<dim>/<parts>"``,
    ``"Z<dim>"`` or ``"s<dim>"``. Integer and boolean tensors convert too, but are never P when
    boolean. Where data moves, the result is contiguous and has memory of its own; otherwise it is
    ``x`` itself. ``reduction_dtype``: the dtype in which the gradient is converted (by default the
    gradient's own). Raises :class:`RunError` for a pair that has no conversion and for a dim that
    does not divide.
    """
    if src == dst or mesh.sizes[axis] == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Redistribute.apply(x, mesh, axis, src, dst, reduction_dtype)
    return _convert(x, mesh, axis, src, dst)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mesh: Mesh,
        axis: int,
        src: str,
        dst: str,
        reduction_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.conversion, ctx.reduction_dtype = (mesh, axis, _dual(dst), _dual(src)), reduction_dtype
        return _convert(x, mesh, axis, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        converted = redistribute(grad.to(ctx.reduction_dtype or grad.dtype), *ctx.conversion)
        return converted.to(grad.dtype), None, None, None, None, None


@cache
def _dual(text: str) -> str:
    return repr(parse_type(text).dual)


# A movement takes (x, group name, group size, this rank's place, source dim, target dim). A dim is
# -1 where the type has none.
_Movement = Callable[[torch.Tensor, str, int, int, int, int], torch.Tensor]


def _convert(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str) -> torch.Tensor:
    since = mesh.recorder.mark()
    converted = _convert_untimed(x, mesh, axis, src, dst)
    mesh.recorder.end_conversion(since)
    return converted


def _convert_untimed(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str) -> torch.Tensor:
    source, target = parse_type(src), parse_type(dst)
    movement = _MOVEMENTS.get((source.kind, target.kind))
    two_orders = source.dim == target.dim and min(source.pieces, target.pieces) > 1
    if movement is None or two_orders or max(source.dim, target.dim) >= x.ndim:
        raise RunError(
            f"no conversion {src} -> {dst} of a tensor of shape {tuple(x.shape)} (axis "
            f"{mesh.names[axis]!r})"
        )
    n = mesh.sizes[axis]
    if target.dim >= 0 and x.shape[target.dim] % target.chunks(n) and source.dim != target.dim:
        cuts = f"dim {target.dim} of shape {tuple(x.shape)} does not divide by {target.chunks(n)}"
        raise RunError(f"{src} -> {dst}: {cuts} (axis {mesh.names[axis]!r})")
    place, group = mesh.coordinate[axis], mesh.group(axis).group_name
    if source.dim == target.dim >= 0:
        return reorder_pieces([x], mesh, axis, [(source, target)])[0]
    return _ordered(
        movement(_ordered(x, n, target), group, n, place, source.dim, target.dim),
        n,
        source,
        back=True,
    )


def _keep(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    return x


def _first_only(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    if place == 0:
        return x.clone(memory_format=torch.contiguous_format)
    # Zeros that depend on x: the compiler would move what does not depend on a gradient out of the
    # backward, with the collectives after it, and on these ranks alone.
    nowhere, zero = (torch.zeros((), dtype=t, device=x.device) for t in (torch.bool, x.dtype))
    return torch.where(nowhere, x, zero).contiguous()


def _all_reduce(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return _wait(functional.all_reduce(x.contiguous(), "sum", group))


def _slice(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    size = x.shape[dst] // n
    # A copy, because a view would keep the whole tensor alive for as long as the slice.
    return x.narrow(dst, place * size, size).clone(memory_format=torch.contiguous_format)


def _pad(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    size = x.shape[src]
    whole = x.new_zeros(*x.shape[:src], n * size, *x.shape[src + 1 :])
    whole.narrow(src, place * size, size).copy_(x)
    return whole


def _all_gather(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return join_dim(_wait(functional.all_gather_into_tensor(x.contiguous(), n, group)), n, src)


def _reduce_scatter(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return _wait(functional.reduce_scatter_tensor(cut_dim(x, n, dst), "sum", n, group))


def _all_to_all(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    cut = cut_dim(x, n, dst)
    sizes = [cut.shape[0] // n] * n
    return join_dim(_wait(functional.all_to_all_single(cut, sizes, sizes, group)), n, src)


def cut_dim(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The ``n`` chunks of ``dim``, one for each rank of the group, one after the other along dim
    0.
    """
    return (
        x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).flatten(0, 1).contiguous()
        if dim
        else x.contiguous()
    )


def join_dim(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The inverse of :func:`cut_dim`: joins chunks that lie along dim 0 along ``dim``."""
    return (
        x.unflatten(0, (n, x.shape[0] // n)).movedim(0, dim).flatten(dim, dim + 1).contiguous()
        if dim
        else x
    )


def _ordered(x: torch.Tensor, n: int, t: Type, back: bool = False) -> torch.Tensor:
    """Reorders the pieces that type ``t`` makes of a whole dim, so that the pieces of each of ``n``
    ranks are side by side; with ``back``, restores the order of the dim.
    """
    if t.pieces == 1:
        return x
    order = [piece for rank in range(n) for piece in t.pieces_of(rank, n)]
    if back:
        order = sorted(range(len(order)), key=order.__getitem__)
    pieces = x.tensor_split(len(order), t.dim)
    return torch.cat([pieces[i] for i in order], t.dim)


def reorder_pieces(
    parts: Sequence[torch.Tensor], mesh: Mesh, axis: int, conversions: Sequence[tuple[Type, Type]]
) -> list[torch.Tensor]:
    """Converts ``parts`` of several tensors, each from one order of its pieces along ``axis`` to
    another, in one all-to-all. ``conversions`` has the source and the target type of each part.
    Has no gradient.
    """
    n, place = mesh.sizes[axis], mesh.coordinate[axis]
    sent: list[list[torch.Tensor]] = [[] for _ in range(n)]
    # From each rank, what arrives: the number of the part and of the piece.
    arriving: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    shapes = []
    for number, (x, (src, dst)) in enumerate(zip(parts, conversions, strict=True)):
        pieces = _unbind_pieces(x, src, dst)
        count = len(pieces)
        shapes.append(pieces[0].shape)
        before = [_pieces(src, count, rank, n) for rank in range(n)]
        owner = {piece: rank for rank in range(n) for piece in _pieces(dst, count, rank, n)}
        for piece, held in zip(before[place], pieces, strict=True):
            sent[owner[piece]].append(held.reshape(-1))
        for rank in range(n):
            arriving[rank] += [(number, piece) for piece in before[rank] if owner[piece] == place]
    lengths = [[math.prod(shapes[number]) for number, _ in pieces] for pieces in arriving]
    sizes = [sum(each) for each in lengths], [sum(map(len, pieces)) for pieces in sent]
    flat = torch.cat([piece for pieces in sent for piece in pieces])
    del sent  # before the collective allocates what it receives
    received = _wait(functional.all_to_all_single(flat, *sizes, mesh.group(axis).group_name))
    del flat
    flat_pieces = received.split(list(itertools.chain(*lengths)))
    arrived = dict(zip(itertools.chain(*arriving), flat_pieces, strict=True))
    result = []
    for number, (src, dst) in enumerate(conversions):
        own = _pieces(dst, max(src.pieces, dst.pieces), place, n)
        joined = torch.cat([arrived[number, piece].view(shapes[number]) for piece in own])
        result.append(joined.movedim(0, dst.dim).contiguous())
    return result


def _unbind_pieces(x: torch.Tensor, src: Type, dst: Type) -> tuple[torch.Tensor, ...]:
    """The pieces of a rank's part ``x`` that a conversion moves, each with the cut dim in front."""
    count, dim = max(src.pieces, dst.pieces), src.dim
    if x.shape[dim] % count:
        raise RunError(
            f"{src} -> {dst}: dim {dim} of a part of shape {tuple(x.shape)} has no {count} "
            "equal pieces"
        )
    return x.movedim(dim, 0).unflatten(0, (count, -1)).unbind(0)


def _pieces(t: Type, count: int, rank: int, n: int) -> tuple[int, ...]:
    """The numbers of the pieces that a rank holds, out of ``n * count`` pieces of a dim."""
    return t.pieces_of(rank, n) if t.pieces > 1 else tuple(range(count * rank, count * (rank + 1)))


_MOVEMENTS: dict[tuple[str, str], _Movement] = {
    ("I", "R"): _keep,
    ("R", "I"): _keep,
    ("I", "P"): _first_only,
    ("R", "P"): _first_only,
    ("I", "S"): _slice,
    ("R", "S"): _slice,
    ("P", "I"): _all_reduce,
    ("P", "R"): _all_reduce,
    ("P", "S"): _reduce_scatter,
    ("S", "I"): _all_gather,
    ("S", "R"): _all_gather,
    ("S", "P"): _pad,
    ("S", "S"): _all_to_all,
}
