"""Operators that move or rename elements: views, slices, joins and gathers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Dim, Rule


def factorise(
    before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], dict[str, int]]:
    """Split the dims of two shapes with the same number of elements into factors; returns the
    factors of each dim, and the size of each factor.

    Both shapes are read from the major end. The greatest common divisor of the rests of the two
    present dims is a factor of both dims. If it is 1 (as for 6 by 4 viewed as 8 by 3, after the
    common factor 2), the dims share no factor up to the next place where both shapes begin a dim.
    """
    shapes = (before, after)
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    sizes: dict[str, int] = {}

    def add(size: int, *places: tuple[int, int]) -> None:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for side, dim in places:
            dims[side][dim].append(name)

    at, rest = [-1, -1], [1, 1]  # for each shape, the present dim and the rest of its size
    while True:
        for side in (0, 1):
            while rest[side] == 1 and at[side] + 1 < len(shapes[side]):
                at[side] += 1
                rest[side] = shapes[side][at[side]]
        if rest == [1, 1]:
            return tuple(map(tuple, dims[0])), tuple(map(tuple, dims[1])), sizes
        common = math.gcd(*rest)
        if common > 1:
            add(common, (0, at[0]), (1, at[1]))
            rest = [n // common for n in rest]
            continue
        for side in (0, 1):
            add(rest[side], (side, at[side]))
        while rest[0] != rest[1]:
            side = 0 if rest[0] < rest[1] else 1
            at[side] += 1
            if shapes[side][at[side]] > 1:
                add(shapes[side][at[side]], (side, at[side]))
            rest[side] *= shapes[side][at[side]]
        rest = [1, 1]


@register_rule("aten.reshape", "aten.squeeze", "aten.unsqueeze")
def reshape(call: OperatorCall) -> Rule | None:
    if 0 in call.shape:
        return Rule(
            (((),) * len(call.shapes[0]),),
            ((),) * len(call.shape),
            {},
            (frozenset({0}),),
            kind="view",
        )
    before, after, sizes = factorise(call.shapes[0], call.shape)
    lone = {f for d in before for f in d} ^ {f for d in after for f in d}
    shape_argument = "shape" if call.name == "aten.reshape" else None
    return Rule(
        (before,),
        after,
        sizes,
        (frozenset({0}),),
        frozenset(lone),
        kind="view",
        shape_argument=shape_argument,
    )


@register_rule("aten.permute", "aten.transpose", "aten.t")
def permute(call: OperatorCall) -> Rule:
    order = list(range(len(call.shape)))
    if call.name == "aten.permute":
        order = call.dims("dims")
    elif len(order) > 1:
        a, b = (
            (0, 1)
            if call.name == "aten.t"
            else (call[name] % len(order) for name in ("dim0", "dim1"))
        )
        order[a], order[b] = b, a
    return call.rule(f"{_names(range(len(order)))} -> {_names(order)}", kind="view")


@register_rule("autopar.send")
def send(call: OperatorCall) -> Rule:
    return call.rule("... -> ...", kind="view")


@register_rule("aten.expand")
def expand(call: OperatorCall) -> Rule:
    return call.rule("... -> ...", kind="view", shape_argument="size")


@register_rule("aten.slice")
def slice_dim(call: OperatorCall) -> Rule | None:
    """Two kinds of slices may be split along their dim. A slice that takes one of several equal
    parts of a dim takes the same part on each rank, where each part is split. A slice that takes
    every n-th element of a dim takes every n-th element of each chunk. For any other slice the dim
    is whole.
    """
    (dim,), start, step = call.dims("dim"), call["start"], call["step"]
    size = call.shape[call["dim"]]
    if step > 1 and size > 1 and size * step == call.shapes[0][dim]:
        spec = " ".join(f"o{d}" if d == dim else f"d{d}" for d in range(len(call.shape)))
        bound = partial(_end, f"o{dim}", call.shapes[0][dim])
        return call.rule(
            f"{spec.replace(f'o{dim}', f'(o{dim} m)')} -> {spec}",
            whole=["m"],
            kind="view",
            localise=bound,
        )
    if step != 1 or not size or call.shapes[0][dim] % size or start % size:
        return along_one_dim(call)
    spec = " ".join(f"o{d}" if d == dim else f"d{d}" for d in range(len(call.shape)))
    chunk = partial(_part, f"o{dim}")
    return call.rule(
        f"{spec.replace(f'o{dim}', f'(m o{dim})')} -> {spec}",
        whole=["m"],
        kind="view",
        localise=chunk,
    )


def _end(
    factor: str, length: int, arguments: dict[str, Any], splits: dict[str, int]
) -> dict[str, Any]:
    """The end of a rank's chunk of a dim of size ``length``."""
    return {"end": length // splits.get(factor, 1)}


def _part(factor: str, arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
    """The bounds of a rank's slice."""
    return {name: arguments[name] // splits.get(factor, 1) for name in ("start", "end")}


@register_rule(
    "aten.roll", "aten.flip", "aten.cumsum", "aten.diff", "aten.cumprod", "aten.logcumsumexp"
)
def along_one_dim(call: OperatorCall) -> Rule:
    """The dims of the operator are whole; along other dims it is local."""
    dims = call.dims("dims" if call.name in ("aten.roll", "aten.flip") else "dim")

    def spec(prefix: str) -> str:
        return " ".join(f"{prefix}{d}" if d in dims else f"d{d}" for d in range(len(call.shape)))

    linear = "~" if call.name in ("aten.cumprod", "aten.logcumsumexp") else ""
    # diff may have further operands, which are put before and after the first one.
    inputs = " + ".join([linear + spec("i"), *[spec("p")] * (len(call.inputs) - 1)])
    whole = [f"{p}{d}" for d in dims for p in "ipo"]
    return call.rule(
        f"{inputs} -> {spec('o')}",
        whole=whole,
        kind="view" if call.name == "aten.slice" else "elementwise",
    )


@register_rule("aten.select")
def select(call: OperatorCall) -> Rule:
    n = len(call.shapes[0])
    (dim,) = call.dims("dim")
    return call.rule(
        f"{_names(range(n))} -> {_names(d for d in range(n) if d != dim)}",
        whole=[f"d{dim}"],
        kind="view",
    )


@register_rule("aten.slice_scatter", "aten.select_scatter")
def scatter_slice(call: OperatorCall) -> Rule:
    n = len(call.shape)
    (dim,) = call.dims("dim")
    source = " ".join(
        f"s{d}" if d == dim else f"d{d}"
        for d in range(n)
        if d != dim or call.name == "aten.slice_scatter"
    )
    return call.rule(
        f"{_names(range(n))} + {source} -> {_names(range(n))}", whole=[f"d{dim}", f"s{dim}"]
    )


@register_rule("aten.pad", "aten.constant_pad_nd")
def pad(call: OperatorCall) -> Rule:
    n, amounts = len(call.shape), call["pad"]
    # The amounts are pairs, for the last dim first.
    changed = [n - 1 - k for k in range(len(amounts) // 2) if any(amounts[2 * k : 2 * k + 2])]
    spec = " ".join(f"o{d}" if d in changed else f"d{d}" for d in range(n))
    linear = "" if not call["value"] else "~"
    return call.rule(
        f"{linear}{_names(range(n))} -> {spec}", whole=[f"{p}{d}" for d in changed for p in "do"]
    )


@register_rule("aten.cat")
def cat(call: OperatorCall) -> Rule | None:
    n = len(call.shape)
    if any(len(s) != n for s in call.shapes):
        return None
    dim = call["dim"] % n
    inputs = [
        " ".join(f"i{k}" if d == dim else f"d{d}" for d in range(n))
        for k in range(len(call.inputs))
    ]
    return call.rule(
        f"{' + '.join(inputs)} -> {_names(range(n))}",
        whole=[f"d{dim}", *(f"i{k}" for k in range(len(inputs)))],
    )


@register_rule("aten.stack")
def stack(call: OperatorCall) -> Rule:
    n = len(call.shape)
    dim = call["dim"] % n
    names = _names(d for d in range(n) if d != dim)
    return call.rule(
        f"{' + '.join([names] * len(call.inputs))} -> {_names(range(n))}", whole=[f"d{dim}"]
    )


@register_rule("aten.repeat")
def repeat(call: OperatorCall) -> Rule:
    n, extra = len(call.shape), len(call.shape) - len(call.shapes[0])
    same = [d for d in range(n) if d >= extra and call.shapes[0][d - extra] == call.shape[d]]
    inputs = " ".join(f"d{d}" if d in same else f"i{d}" for d in range(extra, n))
    return call.rule(
        f"{inputs} -> {_names(range(n))}",
        whole=[f"{p}{d}" for d in range(n) if d not in same for p in "di"],
    )


def _names(dims: Iterable[int]) -> str:
    return " ".join(f"d{d}" for d in dims)
