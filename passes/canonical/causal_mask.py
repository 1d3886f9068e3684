"""Attention whose mask is causal, or lets every query see every key, without the mask.

transformers writes the mask of a decoder into the graph: ``key position <= query position``, and
that both lie in one packed sequence. With ``is_causal`` instead, torch runs its flash kernels,
which skip the upper half of the scores and read no mask, and ring attention need not send one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import arguments, set_argument, shape
from autopar.passes.canonical.known_values import KnownValues

aten = torch.ops.aten

_AND = (aten.bitwise_and.Tensor, aten.logical_and.default, operator.and_)
# By comparison, the same comparison of numbers, and the comparison with exchanged sides.
_COMPARE: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    aten.le.Tensor: (torch.le, torch.ge),
    aten.lt.Tensor: (torch.lt, torch.gt),
    aten.ge.Tensor: (torch.ge, torch.le),
    aten.gt.Tensor: (torch.gt, torch.lt),
    aten.eq.Tensor: (torch.eq, torch.eq),
}
_CAUSAL, _ALL_TRUE = "causal", "all true"


def drop_causal_masks(graph: fx.Graph) -> None:
    """Rewrite each attention whose mask is known to be causal, or to be true everywhere."""
    found = _Masks()
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        given = arguments(node)
        mask = given["attn_mask"]
        lengths = shape(given["query"])[-2], shape(given["key"])[-2]
        if mask is None or given["is_causal"] or mask.meta["val"].dtype is not torch.bool:
            continue
        kind = found.kind(mask)
        if kind == _ALL_TRUE or (kind == _CAUSAL and shape(mask)[-2:] == lengths):
            set_argument(node, "attn_mask", None)
            set_argument(node, "is_causal", kind == _CAUSAL)


class _Masks:
    """Which masks of a graph are causal, and which are true everywhere."""

    def __init__(self) -> None:
        self._values = KnownValues()
        self._kinds: dict[fx.Node, str | None] = {}

    def kind(self, mask: fx.Node) -> str | None:
        """``_CAUSAL`` where each query sees the keys up to its own position, ``_ALL_TRUE``, or None
        where the mask is neither, or is not known before the model runs.
        """
        if mask not in self._kinds:
            kinds = {self._term(term) for term in _terms(mask)}
            self._kinds[mask] = (
                None if None in kinds else _CAUSAL if _CAUSAL in kinds else _ALL_TRUE
            )
        return self._kinds[mask]

    def _term(self, term: fx.Node) -> str | None:
        if term.target in _COMPARE:
            left, right = (self._side(side) for side in term.args)
            if left is None or right is None:
                return None
            return _comparison(left, right, len(shape(term)), *_COMPARE[term.target])
        value = self._values.of(term)
        return _ALL_TRUE if value is not None and bool(value.all()) else None

    def _side(self, side: Any) -> torch.Tensor | None:
        return self._values.of(side) if isinstance(side, fx.Node) else None


def _terms(mask: fx.Node) -> Iterator[fx.Node]:
    """The masks of which ``mask`` is the conjunction."""
    if mask.target in _AND:
        for part in mask.all_input_nodes:
            yield from _terms(part)
    elif mask.target is aten.expand.default:
        yield from _terms(mask.all_input_nodes[0])
    else:
        yield mask


def _comparison(
    left: torch.Tensor,
    right: torch.Tensor,
    ndim: int,
    compare: Callable[..., Any],
    exchanged: Callable[..., Any],
) -> str | None:
    """The kind of the mask ``compare(left, right)``, which need not be computed as a whole: each
    side is known along the queries (the last dim but one) or along the keys (the last).
    """
    if _always(left, right, compare):
        return _ALL_TRUE
    if _varies_along(left, ndim) == ndim - 1 and _varies_along(right, ndim) == ndim - 2:
        return _CAUSAL if _is_causal(left.flatten(), right.flatten(), compare) else None
    if _varies_along(right, ndim) == ndim - 1 and _varies_along(left, ndim) == ndim - 2:
        return _CAUSAL if _is_causal(right.flatten(), left.flatten(), exchanged) else None
    return None


def _always(left: torch.Tensor, right: torch.Tensor, compare: Callable[..., Any]) -> bool:
    """Whether each number of ``left`` compares true with each of ``right``."""
    return all(bool(compare(a, b)) for a in left.aminmax() for b in right.aminmax())


def _varies_along(value: torch.Tensor, ndim: int) -> int | None:
    """The one dim, of ``ndim`` dims, along which a value has several elements."""
    wide = [ndim - value.ndim + d for d, n in enumerate(value.shape) if n > 1]
    return wide[0] if len(wide) == 1 else None


def _is_causal(keys: torch.Tensor, queries: torch.Tensor, compare: Callable[..., Any]) -> bool:
    """Whether key j compares true with query i just where j <= i."""
    rising = bool((keys[1:] >= keys[:-1]).all()) and len(keys) == len(queries)
    # As the keys rise, it is enough that each query sees its own key, and not the next one.
    return (
        rising
        and compare in (torch.le, torch.lt)
        and bool(compare(keys, queries).all())
        and not bool(compare(keys[1:], queries[:-1]).any())
    )
