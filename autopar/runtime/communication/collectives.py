"""Conversions between types along one mesh axis, differentiable: the only file that communicates
tensors of a graph.

The gradient of a conversion ``src -> dst`` is the conversion ``dual(dst) -> dual(src)``, so one
table of movements serves both directions. The semantics are those of ``spmd_types.redistribute``,
which the tests compare with; it is not called here because it costs some 40 us a call on top of the
communication. The functional collectives used instead are also what inductor sees and can overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.ir.layout import Type, parse_type
from autopar.runtime.communication.mesh import Mesh

_functional = torch.ops._c10d_functional
_wait = _functional.wait_tensor


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
    boolean. Where data moves the result is contiguous and has memory of its own; otherwise it is
    ``x`` itself. ``reduction_dtype``: the dtype in which its gradient is converted (free: the gradient's
    own). Raises :class:`RunError` for a pair that has no conversion and for a dim that does not
    divide.
    """
    if src == dst or mesh.sizes[axis] == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Redistribute.apply(x, mesh, axis, src, dst, reduction_dtype)
    return _move(x, mesh, axis, src, dst)


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
        return _move(x, mesh, axis, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return (
            redistribute(grad.to(ctx.reduction_dtype or grad.dtype), *ctx.conversion).to(
                grad.dtype
            ),
            None,
            None,
            None,
            None,
            None,
        )


@cache
def _dual(text: str) -> str:
    return repr(parse_type(text).dual)


# Each movement takes (x, group name, group size, this rank's place, source dim, target dim); dims
# are -1 where the type has none.
_Movement = Callable[[torch.Tensor, str, int, int, int, int], torch.Tensor]


def _move(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str) -> torch.Tensor:
    since = mesh.recorder.mark()
    moved = _moved(x, mesh, axis, src, dst)
    mesh.recorder.end_conversion(since)
    return moved


def _moved(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str) -> torch.Tensor:
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
    return (
        x.clone(memory_format=torch.contiguous_format)
        if place == 0
        else torch.zeros_like(x, memory_format=torch.contiguous_format)
    )


def _all_reduce(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return _wait(_functional.all_reduce(x.contiguous(), "sum", group))


def _slice(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    size = x.shape[dst] // n
    # Not a view, which would keep the whole alive for as long as the slice.
    return x.narrow(dst, place * size, size).clone(memory_format=torch.contiguous_format)


def _pad(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    size = x.shape[src]
    whole = x.new_zeros(*x.shape[:src], n * size, *x.shape[src + 1 :])
    whole.narrow(src, place * size, size).copy_(x)
    return whole


def _all_gather(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return _join(_wait(_functional.all_gather_into_tensor(x.contiguous(), n, group)), n, src)


def _reduce_scatter(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    return _wait(_functional.reduce_scatter_tensor(_cut(x, n, dst), "sum", n, group))


def _all_to_all(
    x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int
) -> torch.Tensor:
    cut = _cut(x, n, dst)
    sizes = [cut.shape[0] // n] * n
    return _join(_wait(_functional.all_to_all_single(cut, sizes, sizes, group)), n, src)


def _cut(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The ``n`` chunks of ``dim``, one after the other along dim 0: what each rank of the group
    shall get.
    """
    return (
        x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).flatten(0, 1).contiguous()
        if dim
        else x.contiguous()
    )


def _join(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The inverse of :func:`_cut`: chunks that lie along dim 0 put together along ``dim``."""
    return (
        x.unflatten(0, (n, x.shape[0] // n)).movedim(0, dim).flatten(dim, dim + 1).contiguous()
        if dim
        else x
    )


def _ordered(x: torch.Tensor, n: int, t: Type, back: bool = False) -> torch.Tensor:
    """The pieces that type ``t`` makes of a whole dim, those of each of ``n`` ranks side by side;
    or ``back``.
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
    """``parts`` of tensors, each from one order of its pieces to another, source and target as
    ``conversions`` say: in one collective. Has no gradient."""
    n, place = mesh.sizes[axis], mesh.coordinate[axis]
    sent: list[list[torch.Tensor]] = [[] for _ in range(n)]
    arriving: list[list[tuple[int, int]]] = [
        [] for _ in range(n)
    ]  # from each rank: the tensor's number and the piece's
    shapes = []
    for number, (x, (src, dst)) in enumerate(zip(parts, conversions, strict=True)):
        count, dim = max(src.pieces, dst.pieces), src.dim
        if x.shape[dim] % count:
            raise RunError(
                f"{src} -> {dst}: dim {dim} of a part of shape {tuple(x.shape)} has no {count} "
                "equal pieces"
            )
        before, after = ([_pieces(t, count, rank, n) for rank in range(n)] for t in (src, dst))
        owner = {piece: rank for rank, pieces in enumerate(after) for piece in pieces}
        pieces = x.movedim(dim, 0).unflatten(0, (count, -1)).unbind(0)
        shapes.append(pieces[0].shape)
        for piece, held in zip(before[place], pieces, strict=True):
            sent[owner[piece]].append(held.reshape(-1))
        for rank in range(n):
            arriving[rank] += [(number, piece) for piece in before[rank] if owner[piece] == place]
    lengths = [[math.prod(shapes[number]) for number, _ in pieces] for pieces in arriving]
    there, here = [sum(map(len, pieces)) for pieces in sent], [sum(each) for each in lengths]
    flat = torch.cat([piece for pieces in sent for piece in pieces])
    del sent
    received = _wait(_functional.all_to_all_single(flat, here, there, mesh.group(axis).group_name))
    del flat
    came = dict(
        zip(
            itertools.chain(*arriving), received.split(list(itertools.chain(*lengths))), strict=True
        )
    )
    result = []
    for number, (src, dst) in enumerate(conversions):
        mine = [
            came[number, piece].view(shapes[number])
            for piece in _pieces(dst, max(src.pieces, dst.pieces), place, n)
        ]
        result.append(torch.cat(mine).movedim(0, dst.dim).contiguous())
    return result


def _pieces(t: Type, count: int, rank: int, n: int) -> tuple[int, ...]:
    """Which of ``n * count`` pieces of a dim a rank has."""
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


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    """``x`` reduced over ``group`` by ``"sum"`` or ``"max"``, in a new tensor; has no gradient. For
    kernels that derive their own.
    """
    return _wait(_functional.all_reduce(x.contiguous(), op, group.group_name))


def start_ring_shift(
    x: torch.Tensor, group: str, ranks: int, place: int
) -> Callable[[], torch.Tensor]:
    """Sends ``x``, of one shape on all of a group's ``ranks``, to the one after this one's
    ``place``, the first after the last. What is returned waits for what the one before sends. Has
    no gradient."""
    flat = x.contiguous().view(-1)
    sent, received = [0] * ranks, [0] * ranks
    sent[(place + 1) % ranks] = received[(place - 1) % ranks] = len(flat)
    coming = _functional.all_to_all_single(flat, received, sent, group)
    return lambda: _wait(coming).view(x.shape)


def exchange_with_neighbours(
    to_previous: torch.Tensor, to_next: torch.Tensor, group: dist.ProcessGroup, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ranks before and after this one, which is at ``place`` in ``group``, send here: the
    former its ``to_next``, the latter its ``to_previous``; zeros at the ends. Shapes are alike on
    all ranks. Has no gradient."""
    ranks = group.size()
    sent, received = [0] * ranks, [0] * ranks
    there: list[torch.Tensor] = []
    for neighbour, mine, its in (
        (place - 1, to_previous, to_next),
        (place + 1, to_next, to_previous),
    ):
        if 0 <= neighbour < ranks:
            sent[neighbour], received[neighbour] = mine.numel(), its.numel()
            there.append(mine.reshape(-1))
    arrived = _wait(
        _functional.all_to_all_single(torch.cat(there), received, sent, group.group_name)
    )
    pieces = iter(arrived.split([n for n in received if n]))

    def piece(neighbour: int, like: torch.Tensor) -> torch.Tensor:
        there_is_one = like.numel() and 0 <= neighbour < ranks
        return (
            next(pieces).view(like.shape)
            if there_is_one
            else torch.zeros_like(like, memory_format=torch.contiguous_format)
        )

    return piece(place - 1, to_next), piece(place + 1, to_previous)


def all_gather_stacked(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``x`` stacked along a new dim 0, in the group's order; has no gradient."""
    return _wait(
        _functional.all_gather_into_tensor(
            x.contiguous().unsqueeze(0), group.size(), group.group_name
        )
    )
