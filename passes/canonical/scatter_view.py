"""Write through a view: the call that makes a base's new value from the new value of its view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.ops import aten

from autopar.errors import CaptureError
from autopar.ir.nodes import describe_node, permutation, shape

ScatterCall = tuple[Any, tuple[Any, ...]]  # an operator and its arguments


def scatter_view(view: fx.Node, base: fx.Node, new: fx.Node, writer: fx.Node) -> ScatterCall:
    """The call that returns ``base`` with the part that ``view`` shows replaced by ``new``.

    Raises:
        CaptureError: the call that made ``view`` has no inverse here; ``writer`` is the call that
            writes to the view.
    """
    scatter = _SCATTER.get(view.target)
    if scatter is None:
        raise CaptureError(
            f"{describe_node(writer)} writes through a view made by {describe_node(view)}, "
            "which has no functional form here; "
            "clone() the view first, or write with torch.where or index_put"
        )
    return scatter(view, base, new)


def _scatter_with(operator: Any) -> Callable[[fx.Node, fx.Node, fx.Node], ScatterCall]:
    """For a view whose other arguments are those of ``operator``."""
    return lambda view, base, new: (operator, (base, new, *view.args[1:]))


def _narrow(view: fx.Node, base: fx.Node, new: fx.Node) -> ScatterCall:
    _, dim, start, length = view.args
    return aten.slice_scatter.default, (base, new, dim, start, start + length)  # type: ignore[operator]


def _permute(view: fx.Node, base: fx.Node, new: fx.Node) -> ScatterCall:
    dims = permutation(view)
    return aten.permute.default, (new, sorted(range(len(dims)), key=dims.__getitem__))


def _reshape(view: fx.Node, base: fx.Node, new: fx.Node) -> ScatterCall:
    return aten.reshape.default, (new, list(shape(base)))


_PERMUTATIONS = (
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.mT.default,
    aten.numpy_T.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
)
_RESHAPES = (
    aten.view.default,
    aten.view_as.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_SCATTER: dict[Any, Callable[[fx.Node, fx.Node, fx.Node], ScatterCall]] = {
    aten.slice.Tensor: _scatter_with(aten.slice_scatter.default),
    aten.select.int: _scatter_with(aten.select_scatter.default),
    aten.diagonal.default: _scatter_with(aten.diagonal_scatter.default),
    aten.narrow.default: _narrow,
    **dict.fromkeys(_PERMUTATIONS, _permute),
    **dict.fromkeys(_RESHAPES, _reshape),
}
