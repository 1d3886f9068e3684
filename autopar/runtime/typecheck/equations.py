"""Equations in the style of einsum, by which rules type a call (over ``spmd_types.rules.einsum``).

A letter names a dim. Where a cut dim keeps its letter, the result is cut in the same way; where the
letter is missing in the result, the result is P. A dim with ``_`` must not be cut. ``linear`` lists
the operands through which a pending sum may pass: ``(0, 1)`` means either of them alone, and
``((0, 1),)`` both at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules

from autopar.runtime.typecheck.typed_tensors import sharding_axes

Linear = tuple[Any, ...]


def einsum(
    terms: Sequence[str], out: str, operands: Sequence[torch.Tensor], linear: Linear = ()
) -> Any:
    """The type of the equation ``terms -> out``. Operands that get no gradient count as I or R,
    whichever the other operands are.
    """
    equation = ",".join(term or "..." for term in terms) + "->" + out
    return rules.einsum(equation, *_agree(operands), linear_in=linear)


def einsum_present(*pairs: tuple[str, Any], out: str, linear: Linear = ()) -> Any:
    """:func:`einsum` over those pairs of a term and an operand whose operand is a tensor."""
    present = [(term, x) for term, x in pairs if isinstance(x, torch.Tensor)]
    return einsum([term for term, _ in present], out, [x for _, x in present], linear)


def broadcast(out: torch.Tensor, operands: Sequence[torch.Tensor], linear: Linear = ()) -> Any:
    """The type of a pointwise operator, whose operands are aligned from the right."""
    terms = [
        broadcast_term(ascii_letters[out.ndim - x.ndim : out.ndim], x.shape, sharding_axes(x))
        for x in operands
    ]
    bound = set("".join(terms))
    result = "".join(name if name in bound else "_" for name in ascii_letters[: out.ndim])
    return einsum(terms, result, operands, linear)


def broadcast_term(names: str, shape: Sequence[int], cuts: Sequence[tuple]) -> str:
    """The term ``names`` with ``_`` for dims that are broadcast: of size 1 and not cut."""
    return "".join(
        "_" if n == 1 and not cut else name for name, n, cut in zip(names, shape, cuts, strict=True)
    )


def letters(x: torch.Tensor, *opaque: int) -> list[str]:
    """A letter for each dim of ``x``, and ``_`` for the dims ``opaque``."""
    closed = {dim % x.ndim for dim in opaque} if x.ndim else set()
    return ["_" if dim in closed else ascii_letters[dim] for dim in range(x.ndim)]


def dims_of(value: Any, ndim: int) -> list[int]:
    """The dims that an argument names; all dims where it is None or empty."""
    if value is None or value == []:
        return list(range(ndim))
    return [d % ndim for d in ([value] if isinstance(value, int) else value)] if ndim else []


def _agree(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, those without a gradient reinterpreted as I or R to agree with the others."""
    result = list(operands)
    for axis in {axis for t in operands for axis in spmd.get_local_type(t)}:
        types = [spmd.get_local_type(t)[axis] for t in result]
        if spmd.I not in types or all(t is spmd.I for t in types):
            continue
        bound = {
            t
            for t, x in zip(types, result, strict=True)
            if t in (spmd.V, spmd.P) or x.requires_grad
        }
        target = spmd.I if bound == {spmd.I} else spmd.R
        for i, (t, x) in enumerate(zip(types, result, strict=True)):
            if not x.requires_grad and t in (spmd.I, spmd.R) and t is not target:
                result[i] = spmd.reinterpret_no_grad(_copy(x), axis, dst=target)
    return result


def _copy(x: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return spmd.assert_type(
        copy, dict(spmd.get_local_type(x)), partition_spec=spmd.get_partition_spec(x)
    )
