"""All the ways to run a node on a mesh: the product over axes of its rule's options, where the dims
divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.layout import (
    I,
    Layout,
    R,
    S,
    Type,
    Z,
    can_convert,
    format_layout,
    inner,
    is_legal,
    strided,
)
from autopar.rules import Dim, Option, Rule

Allowed = Callable[[int, Option], bool]  # (axis, option) -> may it be used there?
Together = Callable[[Sequence[Option]], bool]


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: the layout of each operand and of the output, and per axis the factor
    split and the kernel needed.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...] = ()
    kernels: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(format_layout, self.ins))} -> {format_layout(self.out)}"


@dataclass(frozen=True)
class ParameterStrategy:
    """One way to keep a parameter: its layout between steps and its layout in the graph."""

    stored: Layout
    used: Layout

    @property
    def out(self) -> Layout:
        """What the graph's consumers see."""
        return self.used

    @property
    def ins(self) -> tuple[Layout, ...]:
        return ()


Choice = Strategy | ParameterStrategy


def strategies(
    rule: Rule | None,
    operands: Sequence[bool],
    output: bool,
    sizes: Sequence[int],
    allowed: Allowed,
    together: Together = lambda options: True,
    zigzag: Collection[int] = (),
    parts: Mapping[str, int] | None = None,
) -> list[Strategy]:
    """Every legal strategy on a mesh with these axis ``sizes``.

    ``operands`` and ``output`` say which tensors have gradients: the others know no R, as nothing
    tells it from I. A node without a rule runs unsplit. ``together`` says whether options, one for
    each axis, may be used together; along the axes ``zigzag`` tensors may be cut so, too; and dims
    with a factor in ``parts`` in each of so many equal parts.
    """
    options = _options(rule, operands, output)
    options += [
        o
        for factor, count in (parts or {}).items()
        if rule is not None
        for o in _strided(rule, options, factor, count)
    ]
    folded = (
        [*options, *(o for option in options if (o := _zigzag(option)) is not None)]
        if zigzag
        else []
    )
    per_axis = [
        [o for o in (folded if axis in zigzag else options) if allowed(axis, o)]
        for axis in range(len(sizes))
    ]
    found: dict[tuple, Strategy] = {}

    def extend(axis: int, chosen: tuple[Option, ...], splits: dict[str, int]) -> None:
        if axis == len(sizes):
            if together(chosen) and (rule is None or _fit(rule, chosen, sizes)):
                strategy = Strategy(
                    tuple(tuple(o.ins[k] for o in chosen) for k in range(len(operands))),
                    tuple(o.out for o in chosen),
                    tuple(o.factor for o in chosen),
                    tuple(o.kernel for o in chosen),
                )
                found.setdefault((strategy.ins, strategy.out, strategy.kernels), strategy)
            return
        for option in per_axis[axis]:
            if option.factor is None:
                extend(axis + 1, (*chosen, option), splits)
            elif rule is not None and _divides(rule, option, splits, sizes[axis]):
                extend(
                    axis + 1,
                    (*chosen, option),
                    splits | {option.factor: splits.get(option.factor, 1) * sizes[axis]},
                )

    extend(0, (), {})
    return list(found.values())


def _options(rule: Rule | None, operands: Sequence[bool], output: bool) -> list[Option]:
    """The options for one axis, in the types that the tensors can have."""
    unsplit = Rule((((),),) * len(operands), (), {}) if rule is None else rule
    options: dict[tuple, Option] = {}
    for o in unsplit.options():
        ins = tuple(t if grad or t is not R else I for t, grad in zip(o.ins, operands, strict=True))
        out = o.out if output or o.out is not R else I
        options.setdefault((ins, out, o.kernel, o.beside), replace(o, ins=ins, out=out))
    return list(options.values())


def _zigzag(option: Option) -> Option | None:
    """The same with its dims cut in zigzag order; None where nothing is cut, or a kernel counts on
    the order.
    """
    if (
        option.factor is None
        or option.kernel not in _ANY_ORDER
        or any(t.pieces > 1 for t in (*option.ins, option.out))
    ):
        return None
    ins, out = (
        tuple(Z(t.dim) if t.is_shard else t for t in option.ins),
        Z(option.out.dim) if option.out.is_shard else option.out,
    )
    return replace(option, ins=ins, out=out)


def _strided(rule: Rule, options: Sequence[Option], factor: str, count: int) -> Iterator[Option]:
    """Those that split a factor, with dims that have it cut in each of ``count`` equal parts. Where
    a dim is such parts of the factor, which the operator takes apart, that dim alone is."""
    apart = any(_are_parts(rule, dim, factor, count) for dims in rule.operands for dim in dims)

    def turned(t: Type, dims: Sequence[Dim]) -> Type:
        inside = t.is_shard and factor in dims[t.dim]
        return (
            strided(t.dim, count)
            if inside and (not apart or _are_parts(rule, dims[t.dim], factor, count))
            else t
        )

    for o in options:
        if o.factor == factor and o.kernel in (*_ANY_ORDER, "summa"):
            ins = tuple(turned(t, dims) for t, dims in zip(o.ins, rule.operands, strict=True))
            yield replace(o, ins=ins, out=turned(o.out, rule.output))


def _are_parts(rule: Rule, dim: Dim, factor: str, count: int) -> bool:
    """Whether a dim is ``count`` parts, in each of which the factor is the major one."""
    return factor in dim[1:] and math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]) == count


_ANY_ORDER = (None, "attention", "batch_norm", "dropout", "layer_norm", "mean", "ring")


def _fit(rule: Rule, chosen: Sequence[Option], sizes: Sequence[int]) -> bool:
    """Whether kernels that work along one axis or two have what they need."""
    special = [(o, n) for o, n in zip(chosen, sizes, strict=True) if o.beside is not None]
    if not special:
        return True
    if any(o.beside is None and o.factor in rule.exclusive for o in chosen) or len(
        special
    ) != 1 + bool(special[0][0].beside):
        return False
    (one, n), (other, m) = special[0], special[-1]
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


def _divides(rule: Rule, option: Option, splits: dict[str, int], n: int) -> bool:
    """Whether ``n`` more ranks may split the option's factor: it divides, each has enough of it,
    and in each dim the more major factors are split up already; or not at all, where the dim is cut
    in each of the parts that they make."""
    factor = option.factor
    assert factor is not None
    whole, ways = rule.sizes[factor], splits.get(factor, 1)
    pieces = 1
    for t, dims in zip((*option.ins, option.out), (*rule.operands, rule.output), strict=True):
        for d, dim in enumerate(dims):
            if factor not in dim:
                continue
            majors, mine = dim[: dim.index(factor)], t.pieces if t.dim == d else 1
            apart = t.letter == "S" and mine > 1 and _are_parts(rule, dim, factor, mine)
            pieces = max(pieces, 1 if apart else mine)
            if any(splits.get(f, 1) != (1 if apart else rule.sizes[f]) for f in majors):
                return False
            if any(f in splits for f in dim[dim.index(factor) + 1 :]):
                return False
    return whole % (ways * n * pieces) == 0 and whole // (ways * n) >= rule.least.get(factor, 1)


def parameter_strategies(
    shape: Sequence[int],
    trainable: bool,
    sizes: Sequence[int],
    zero: int | None,
    kind: str,
    split: Callable[[int], bool],
    within: Collection[int] = (),
    parts: Mapping[int, int] | None = None,
) -> list[ParameterStrategy]:
    """Every way to keep a tensor of the model's state.

    ``zero``: None leaves sharded storage to the search, 0 forbids it, 1 or 2 asks for it where a
    dim divides, and 3 for a use that is as sharded as the storage. ``split(axis)`` says whether the
    axis may split a tensor's use. What is gathered of an axis in ``within`` is cut
    inside the chunks of the others. ``parts``: dims of which each of so many equal parts may be cut
        where it is used.
    """

    def per_axis(axis: int) -> list[tuple[Type, Type]]:
        shards = (
            [inner(d) if axis in within else S(d) for d in range(len(shape))]
            if sizes[axis] > 1
            else []
        )
        used = [(s, s) for s in shards] if split(axis) else []
        used += [
            (S(d), strided(d, count))
            for d, count in (parts or {}).items()
            if used and trainable and axis not in within
        ]
        if kind != "parameter":
            return [(I, I), *((I, s) for _, s in used)]
        if not trainable:
            return [(I, I), *used]
        gathered = [(s, R) for s in shards] if zero not in (0, 3) else []
        return [(I, I), *used, *gathered, (I, R)]

    found: list[tuple[Layout, Layout]] = [((), ())]
    for axis in range(len(sizes)):
        found = [((*s, a), (*u, b)) for s, u in found for a, b in per_axis(axis)]
    divides = [
        ParameterStrategy(s, u)
        for s, u in found
        if is_legal(shape, s, sizes) and is_legal(shape, u, sizes) and can_gather(s, u)
    ]
    if zero == 3:
        cuts = max((sum(t.is_shard for t in s.stored) for s in divides), default=0)
        return [s for s in divides if sum(t.is_shard for t in s.stored) == cuts]
    if zero and any(s.stored != s.used and any(t.is_shard for t in s.stored) for s in divides):
        lazy = [
            s
            for s in divides
            if any(a is I and b is R for a, b in zip(s.stored, s.used, strict=True))
        ]
        keep = [s for s in divides if s not in lazy]
        return keep or divides
    return divides


def can_gather(stored: Layout, used: Layout) -> bool:
    """Whether the axes can be gathered one by one: those within all others first, then the last."""
    layout = list(stored)
    for axis in sorted(range(len(stored)), key=lambda a: (not stored[a].is_inner, -a)):
        if stored[axis] is not used[axis] and not can_convert(tuple(layout), axis, used[axis]):
            return False
        layout[axis] = used[axis]
    return True


def work_share(strategy: Strategy, sizes: Sequence[int]) -> float:
    """The part of the node's work that one rank does."""
    return 1.0 / math.prod(n for f, n in zip(strategy.factors, sizes, strict=True) if f is not None)
