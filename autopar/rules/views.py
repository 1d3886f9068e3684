"""Operators that move or rename elements: views, slices, joins and gathers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Dim, Rule


def factorise(before: Sequence[int], after: Sequence[int]) -> tuple[tuple[Dim, ...], tuple[Dim, ...], dict[str, int]]:
    """Split the dims of two shapes of one element count into common factors.

    The cumulative products of the sizes, from the right, are the places where a dim of either shape begins. Where they divide one
    another they cut both shapes into the same factors; where they do not (6 by 4 viewed as 8 by 3), the smaller is left out, and the
    dims that it would cut share one factor: only the first dim of such a run carries it.
    """
    total = math.prod(before)
    bounds = sorted(set(_bounds(before)) | set(_bounds(after)) | {1, total})
    kept = [total]
    for b in reversed(bounds[:-1]):
        if kept[-1] % b == 0 and kept[-1] != b:
            kept.append(b)
    kept.reverse()
    sizes = {f"f{b}": upper // b for b, upper in pairwise(kept)}
    return _products(before, kept), _products(after, kept), sizes


def _bounds(shape: Sequence[int]) -> list[int]:
    bounds, product = [], 1
    for n in reversed(shape):
        bounds.append(product)
        product *= n
    return bounds


def _products(shape: Sequence[int], kept: list[int]) -> tuple[Dim, ...]:
    dims, stop = [], math.prod(shape)
    for n in shape:
        start = stop // n if n else stop
        # Every factor that begins inside [start, stop): all of it when the dim's own bounds are kept.
        inside = [b for b in kept[:-1] if start <= b < stop]
        dims.append(tuple(f"f{b}" for b in reversed(inside)) if n > 1 else ())
        stop = start
    return tuple(dims)


@register_rule("aten.reshape", "aten.squeeze", "aten.unsqueeze")
def reshape(call: Call) -> Rule | None:
    if 0 in call.shape:
        return None
    before, after, sizes = factorise(call.shapes[0], call.shape)
    # A factor whose size is not the product its dim needs lies across dims: whole.
    whole = {
        f
        for dims, shape in ((before, call.shapes[0]), (after, call.shape))
        for d, n in zip(dims, shape, strict=True)
        if math.prod(sizes[f] for f in d) != n
        for f in d
    }
    shape_argument = "shape" if call.name == "aten.reshape" else None
    return Rule((before,), after, sizes, (frozenset({0}),), frozenset(whole), kind="view", shape_argument=shape_argument)


@register_rule("aten.permute", "aten.transpose", "aten.t")
def permute(call: Call) -> Rule:
    n = len(call.shape)
    order = list(range(n))
    if call.name == "aten.permute":
        order = call.dims("dims")
    elif call.name in ("aten.transpose", "aten.swapaxes"):
        names = ("dim0", "dim1") if call.name == "aten.transpose" else ("axis0", "axis1")
        a, b = (call[name] % n for name in names)
        order[a], order[b] = b, a
    elif call.name == "aten.movedim":
        source, target = call.dims("source"), call.dims("destination")
        rest = iter([d for d in range(n) if d not in source])
        order = [source[target.index(d)] if d in target else next(rest) for d in range(n)]
    else:
        order.reverse()
    return call.rule(f"{_names(range(n))} -> {_names(order)}", kind="view")


@register_rule("aten.expand")
def expand(call: Call) -> Rule:
    return call.rule("... -> ...", kind="view", shape_argument="size")


@register_rule("aten.slice", "aten.roll", "aten.flip", "aten.cumsum", "aten.diff", "aten.cumprod")
def along_one_dim(call: Call) -> Rule:
    """The dims named are whole; in the others the operator is local."""
    name = {"aten.roll": "dims", "aten.flip": "dims"}.get(call.name, "dim")
    dims = call.dims(name)
    full = all(call.shapes[0][d] == call.shape[d] for d in dims) and call.name in ("aten.slice", "aten.narrow")
    spec = _names(range(len(call.shape)))
    outer = " ".join(f"o{d}" if d in dims and not full else f"d{d}" for d in range(len(call.shape)))
    linear = "" if call.name != "aten.cumprod" else "~"
    inputs = " + ".join(
        [linear + spec] + [" ".join(f"p{d}" if d in dims else f"d{d}" for d in range(len(call.shape)))] * (len(call.inputs) - 1)
    )
    whole = () if full else [f"{p}{d}" for d in dims for p in "dop"]
    return call.rule(f"{inputs} -> {outer}", whole=whole, kind="view" if call.name in ("aten.slice", "aten.narrow") else "elementwise")


@register_rule("aten.select")
def select(call: Call) -> Rule:
    n = len(call.shapes[0])
    (dim,) = call.dims("dim")
    return call.rule(f"{_names(range(n))} -> {_names(d for d in range(n) if d != dim)}", whole=[f"d{dim}"], kind="view")


@register_rule("aten.slice_scatter", "aten.select_scatter")
def scatter_back(call: Call) -> Rule:
    n = len(call.shape)
    (dim,) = call.dims("dim")
    source = " ".join(f"s{d}" if d == dim else f"d{d}" for d in range(n) if d != dim or call.name == "aten.slice_scatter")
    return call.rule(f"{_names(range(n))} + {source} -> {_names(range(n))}", whole=[f"d{dim}", f"s{dim}"])


@register_rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> Rule:
    n = len(call.shape)
    changed = [d for d in range(n) if call.shapes[0][d] != call.shape[d]]
    spec = " ".join(f"o{d}" if d in changed else f"d{d}" for d in range(n))
    linear = "" if not call["value"] else "~"
    return call.rule(f"{linear}{_names(range(n))} -> {spec}", whole=[f"{p}{d}" for d in changed for p in "do"])


@register_rule("aten.cat")
def cat(call: Call) -> Rule | None:
    n = len(call.shape)
    if any(len(s) != n for s in call.shapes):
        return None
    dim = call["dim"] % n
    inputs = [" ".join(f"i{k}" if d == dim else f"d{d}" for d in range(n)) for k in range(len(call.inputs))]
    return call.rule(f"{' + '.join(inputs)} -> {_names(range(n))}", whole=[f"d{dim}", *(f"i{k}" for k in range(len(inputs)))])


@register_rule("aten.stack")
def stack(call: Call) -> Rule:
    n = len(call.shape)
    dim = call["dim"] % n
    names = _names(d for d in range(n) if d != dim)
    return call.rule(f"{' + '.join([names] * len(call.inputs))} -> {_names(range(n))}", whole=[f"d{dim}"])


@register_rule("aten.repeat")
def repeat(call: Call) -> Rule:
    n, extra = len(call.shape), len(call.shape) - len(call.shapes[0])
    same = [d for d in range(n) if d >= extra and call.shapes[0][d - extra] == call.shape[d]]
    inputs = " ".join(f"d{d}" if d in same else f"i{d}" for d in range(extra, n))
    return call.rule(f"{inputs} -> {_names(range(n))}", whole=[f"{p}{d}" for d in range(n) if d not in same for p in "di"])


def _names(dims: Iterable[int]) -> str:
    return " ".join(f"d{d}" for d in dims)
