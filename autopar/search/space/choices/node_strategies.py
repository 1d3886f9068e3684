"""Every strategy of a node on a mesh: one option of its rule for each mesh axis, where the sizes of
the factors divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from autopar.ir.layout import is_legal
from autopar.rules import Option, Rule
from autopar.search.space.choices.axis_options import are_parts, axis_options, zigzag_options
from autopar.search.space.strategies import Strategy

IsAllowed = Callable[[int, Option], bool]  # (axis, option) -> may the axis have this option?
AreCompatible = Callable[[Sequence[Option]], bool]  # may the axes have these options together?


def node_strategies(
    rule: Rule,
    operands: Sequence[bool],
    output: bool,
    sizes: Sequence[int],
    is_allowed: IsAllowed,
    are_compatible: AreCompatible = lambda options: True,
    zigzag: Collection[int] = (),
    parts: Mapping[str, int] | None = None,
) -> list[Strategy]:
    """Every legal strategy of a node on a mesh.

    Args:
        operands, output: whether each operand and the result have gradients. A tensor without a
            gradient is never R, because nothing tells R from I there.
        sizes: the sizes of the mesh axes.
        is_allowed: whether an axis may have an option.
        are_compatible: whether options, one for each axis, may be used together.
        zigzag: the axes along which tensors may also be cut in zigzag order.
        parts: factors whose dims may also be cut inside each of this many equal parts.
    """
    options = axis_options(rule, operands, output, parts or {})
    with_zigzag = [*options, *zigzag_options(options)] if zigzag else []
    per_axis = [
        [o for o in (with_zigzag if axis in zigzag else options) if is_allowed(axis, o)]
        for axis in range(len(sizes))
    ]
    found: dict[tuple, Strategy] = {}
    for chosen in _combinations(rule, per_axis, sizes):
        if are_compatible(chosen) and _kernels_fit(rule, chosen, sizes):
            strategy = Strategy(
                tuple(tuple(o.ins[k] for o in chosen) for k in range(len(operands))),
                tuple(o.out for o in chosen),
                tuple(o.factor for o in chosen),
                tuple(o.kernel for o in chosen),
            )
            found.setdefault((strategy.ins, strategy.out, strategy.kernels), strategy)
    return list(found.values())


def _combinations(
    rule: Rule, per_axis: Sequence[Sequence[Option]], sizes: Sequence[int]
) -> Iterator[tuple[Option, ...]]:
    """Every combination of one option for each axis that the sizes of the factors allow."""

    def extend(chosen: tuple[Option, ...], ways: dict[str, int]) -> Iterator[tuple[Option, ...]]:
        axis = len(chosen)
        if axis == len(sizes):
            yield chosen
            return
        for option in per_axis[axis]:
            if option.factor is None:
                yield from extend((*chosen, option), ways)
            elif _can_split(rule, option, ways, sizes[axis]):
                more = {option.factor: ways.get(option.factor, 1) * sizes[axis]}
                yield from extend((*chosen, option), ways | more)

    return extend((), {})


def _can_split(rule: Rule, option: Option, ways: Mapping[str, int], n: int) -> bool:
    """Whether an axis of ``n`` ranks may split the option's factor, which earlier axes split
    ``ways[factor]`` times.

    The factor's size must divide, and each rank must get enough of it. In each dim the factors
    that are more major must be split up completely, and the factors that are more minor not at
    all. Where a dim is cut inside each of its parts, the factors that count these parts must not
    be split.
    """
    factor = option.factor
    assert factor is not None
    ranks = ways.get(factor, 1) * n
    pieces = 1
    for t, dims in zip((*option.ins, option.out), (*rule.operands, rule.output), strict=True):
        for d, dim in enumerate(dims):
            if factor not in dim:
                continue
            place, own = dim.index(factor), t.pieces if t.dim == d else 1
            in_parts = t.letter == "S" and own > 1 and are_parts(rule, dim, factor, own)
            pieces = max(pieces, 1 if in_parts else own)
            if any(ways.get(f, 1) != (1 if in_parts else rule.sizes[f]) for f in dim[:place]):
                return False
            if any(f in ways for f in dim[place + 1 :]):
                return False
    size = rule.sizes[factor]
    return size % (ranks * pieces) == 0 and size // ranks >= rule.least.get(factor, 1)


def _kernels_fit(rule: Rule, chosen: Sequence[Option], sizes: Sequence[int]) -> bool:
    """Whether the kernel that works along one axis or two, if there is one, has the axes and the
    operand layouts that it needs.
    """
    special = [(o, n) for o, n in zip(chosen, sizes, strict=True) if o.beside is not None]
    if not special:
        return True
    if any(o.beside is None and o.factor in rule.exclusive for o in chosen):
        return False
    (one, n), (other, m) = special[0], special[-1]
    if len(special) != (2 if one.beside else 1):
        return False
    if one.beside and (
        one.kernel != other.kernel
        or one.beside != other.factor
        or other.beside != one.factor
        or n != m
    ):
        return False
    shapes = [
        tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims) for dims in rule.operands
    ]
    return all(
        is_legal(shape, tuple(o.ins[k] for o in chosen), sizes) for k, shape in enumerate(shapes)
    )
