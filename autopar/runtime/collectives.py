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

    ``src`` and ``dst`` are ``"I"``, ``"R"``, ``"P"`` or ``"S<dim>"``. Integer and boolean tensors convert too, but are never P when
    boolean. Where data moves the result is contiguous and has memory of its own; otherwise it is ``x`` itself. ``summed_in``: the dtype
    in which its gradient is converted (free: the gradient's own).
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
    if target.dim >= 0 and x.shape[target.dim] % n:
        raise RunError(f"{src} -> {dst}: dim {target.dim} of shape {tuple(x.shape)} does not divide by {n} (axis {mesh.names[axis]!r})")
    since = mesh.recorder.mark()
    moved = movement(x, mesh.group(axis).group_name, n, mesh.coordinate[axis], source.dim, target.dim)
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


def gather_from(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``x`` stacked along a new dim 0, in the group's order; has no gradient."""
    return _wait(_functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size(), group.group_name))
