"""Conversions between types along one mesh axis, differentiable: the only file that communicates tensors of a graph.

The gradient of a conversion ``src -> dst`` is the conversion ``dual(dst) -> dual(src)``, so one table of movements serves both
directions. The semantics are those of ``spmd_types.redistribute``, which the tests compare with; it is not called here because it
costs some 40 us a call on top of the communication. The functional collectives used instead are also what inductor sees and can overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.layout import parse_type
from autopar.runtime.mesh import Mesh

_functional = torch.ops._c10d_functional
_wait = _functional.wait_tensor


def redistribute(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str, summed_in: torch.dtype | None = None) -> torch.Tensor:
    """``x``, of type ``src`` along mesh ``axis``, converted to type ``dst``.

    ``src`` and ``dst`` are ``"I"``, ``"R"``, ``"P"``, ``"S<dim>"``, ``"Z<dim>"`` or ``"s<dim>"``. Integer and boolean tensors convert
    too, but are never P when boolean. Where data moves the result is contiguous and has memory of its own; otherwise it is ``x`` itself.
    ``summed_in``: the dtype in which its gradient is converted (free: the gradient's own).
    Raises :class:`RunError` for a pair that has no conversion and for a dim that does not divide.
    """
    if src == dst or mesh.sizes[axis] == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Redistribute.apply(x, mesh, axis, src, dst, summed_in)
    return _move(x, mesh, axis, src, dst)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str, summed_in: torch.dtype | None) -> torch.Tensor:
        ctx.conversion, ctx.summed_in = (mesh, axis, _dual(dst), _dual(src)), summed_in
        return _move(x, mesh, axis, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return redistribute(grad.to(ctx.summed_in or grad.dtype), *ctx.conversion).to(grad.dtype), None, None, None, None, None


@cache
def _dual(text: str) -> str:
    return repr(parse_type(text).dual)


# Each movement takes (x, group name, group size, this rank's place, source dim, target dim); dims are -1 where the type has none.
_Movement = Callable[[torch.Tensor, str, int, int, int, int], torch.Tensor]


def _move(x: torch.Tensor, mesh: Mesh, axis: int, src: str, dst: str) -> torch.Tensor:
    source, target = parse_type(src), parse_type(dst)
    movement = _MOVEMENTS.get((source.kind, target.kind))
    if movement is None or max(source.dim, target.dim) >= x.ndim:
        raise RunError(f"no conversion {src} -> {dst} of a tensor of shape {tuple(x.shape)} (axis {mesh.names[axis]!r})")
    n = mesh.sizes[axis]
    if target.dim >= 0 and x.shape[target.dim] % target.chunks(n) and source.dim != target.dim:
        cuts = f"dim {target.dim} of shape {tuple(x.shape)} does not divide by {target.chunks(n)}"
        raise RunError(f"{src} -> {dst}: {cuts} (axis {mesh.names[axis]!r})")
    since = mesh.recorder.mark()
    place, group = mesh.coordinate[axis], mesh.group(axis).group_name
    if source.dim == target.dim >= 0:
        moved = _regroup(x, group, n, place, source.dim, target.is_zigzag)
    else:
        x = _folded(x, n, target.dim) if target.is_zigzag else x
        moved = movement(x, group, n, place, source.dim, target.dim)
        moved = _unfolded(moved, n, source.dim) if source.is_zigzag else moved
    mesh.recorder.converted(since)
    return moved


def _keep(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    return x


def _first_only(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format) if place == 0 else torch.zeros_like(x, memory_format=torch.contiguous_format)


def _all_reduce(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
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


def _all_gather(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    return _join(_wait(_functional.all_gather_into_tensor(x.contiguous(), n, group)), n, src)


def _reduce_scatter(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    return _wait(_functional.reduce_scatter_tensor(_cut(x, n, dst), "sum", n, group))


def _all_to_all(x: torch.Tensor, group: str, n: int, place: int, src: int, dst: int) -> torch.Tensor:
    cut = _cut(x, n, dst)
    sizes = [cut.shape[0] // n] * n
    return _join(_wait(_functional.all_to_all_single(cut, sizes, sizes, group)), n, src)


def _cut(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The ``n`` chunks of ``dim``, one after the other along dim 0: what each rank of the group shall get."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).flatten(0, 1).contiguous() if dim else x.contiguous()


def _join(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The inverse of :func:`_cut`: chunks that lie along dim 0 put together along ``dim``."""
    return x.unflatten(0, (n, x.shape[0] // n)).movedim(0, dim).flatten(dim, dim + 1).contiguous() if dim else x


def _folded(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The 2 ``n`` pieces of ``dim`` in zigzag order: the first, the last, the second, the last but one."""
    front, back = x.unflatten(dim, (2, n, x.shape[dim] // (2 * n))).unbind(dim)
    return torch.stack((front, back.flip(dim)), dim + 1).flatten(dim, dim + 2)


def _unfolded(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """The inverse of :func:`_folded`."""
    front, back = x.unflatten(dim, (n, 2, x.shape[dim] // (2 * n))).unbind(dim + 1)
    return torch.stack((front, back.flip(dim)), dim).flatten(dim, dim + 2)


def _regroup(x: torch.Tensor, group: str, n: int, place: int, dim: int, zigzag: bool) -> torch.Tensor:
    """From chunks of ``dim`` to zigzag order, or back: each rank sends its two pieces to where they belong."""
    if x.shape[dim] % 2:
        raise RunError(f"dim {dim} of a part of shape {tuple(x.shape)} has no two halves, as zigzag order needs")
    plain, folded = [(2 * r, 2 * r + 1) for r in range(n)], [(r, 2 * n - 1 - r) for r in range(n)]
    before, after = (plain, folded) if zigzag else (folded, plain)
    half = x.shape[dim] // 2
    owner = {piece: rank for rank, pieces in enumerate(after) for piece in pieces}
    leaving = sorted(range(2), key=lambda i: owner[before[place][i]])
    arriving = [(rank, piece) for rank in range(n) for piece in before[rank] if owner[piece] == place]
    there = [half * sum(owner[p] == rank for p in before[place]) for rank in range(n)]
    here = [half * sum(source == rank for source, _ in arriving) for rank in range(n)]
    pieces = x.movedim(dim, 0).unflatten(0, (2, half))
    received = _wait(_functional.all_to_all_single(torch.cat([pieces[i] for i in leaving]), here, there, group)).unflatten(0, (2, half))
    order = [[piece for _, piece in arriving].index(piece) for piece in after[place]]
    return torch.cat([received[i] for i in order]).movedim(0, dim).contiguous()


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


def reduce_over(x: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    """``x`` reduced over ``group`` by ``"sum"`` or ``"max"``, in a new tensor; has no gradient. For kernels that derive their own."""
    return _wait(_functional.all_reduce(x.contiguous(), op, group.group_name))


def shifted(x: torch.Tensor, group: str, ranks: int, place: int) -> Callable[[], torch.Tensor]:
    """Sends ``x``, of one shape on all of a group's ``ranks``, to the one after this one's ``place``, the first after the last. What is
    returned waits for what the one before sends. Has no gradient."""
    flat = x.contiguous().view(-1)
    sent, received = [0] * ranks, [0] * ranks
    sent[(place + 1) % ranks] = received[(place - 1) % ranks] = len(flat)
    coming = _functional.all_to_all_single(flat, received, sent, group)
    return lambda: _wait(coming).view(x.shape)


def from_neighbours(
    to_previous: torch.Tensor, to_next: torch.Tensor, group: dist.ProcessGroup, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ranks before and after this one, which is at ``place`` in ``group``, send here: the former its ``to_next``, the latter its
    ``to_previous``; zeros at the ends. Shapes are alike on all ranks. Has no gradient."""
    ranks = group.size()
    sent, received = [0] * ranks, [0] * ranks
    there: list[torch.Tensor] = []
    for neighbour, mine, its in ((place - 1, to_previous, to_next), (place + 1, to_next, to_previous)):
        if 0 <= neighbour < ranks:
            sent[neighbour], received[neighbour] = mine.numel(), its.numel()
            there.append(mine.reshape(-1))
    arrived = _wait(_functional.all_to_all_single(torch.cat(there), received, sent, group.group_name))
    pieces = iter(arrived.split([n for n in received if n]))

    def piece(neighbour: int, like: torch.Tensor) -> torch.Tensor:
        there_is_one = like.numel() and 0 <= neighbour < ranks
        return next(pieces).view(like.shape) if there_is_one else torch.zeros_like(like, memory_format=torch.contiguous_format)

    return piece(place - 1, to_next), piece(place + 1, to_previous)


def gather_from(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``x`` stacked along a new dim 0, in the group's order; has no gradient."""
    return _wait(_functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size(), group.group_name))
