"""All the ways to run a node on a mesh: the product over axes of its rule's options, where the dims divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.layout import I, Layout, R, S, Type, legal, movable, show
from autopar.rules import Option, Rule

Allowed = Callable[[int, Option], bool]  # (axis, option) -> may it be used there?


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: the layout of each operand and of the output, and per axis the factor split and the kernel needed."""

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...] = ()
    kernels: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(show, self.ins))} -> {show(self.out)}"


@dataclass(frozen=True)
class Storage:
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


def strategies(rule: Rule | None, operands: Sequence[bool], output: bool, sizes: Sequence[int], allowed: Allowed) -> list[Strategy]:
    """Every legal strategy on a mesh with these axis ``sizes``.

    ``operands`` and ``output`` say which tensors have gradients: the others know no R, as nothing tells it from I. A node without a
    rule runs unsplit.
    """
    options = _options(rule, operands, output)
    per_axis = [[o for o in options if allowed(axis, o)] for axis in range(len(sizes))]
    found: dict[tuple, Strategy] = {}

    def extend(axis: int, chosen: tuple[Option, ...], splits: dict[str, int]) -> None:
        if axis == len(sizes):
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
            elif rule is not None and _divides(rule, option.factor, splits, sizes[axis]):
                extend(axis + 1, (*chosen, option), splits | {option.factor: splits.get(option.factor, 1) * sizes[axis]})

    extend(0, (), {})
    return list(found.values())


def _options(rule: Rule | None, operands: Sequence[bool], output: bool) -> list[Option]:
    """The options for one axis, in the types that the tensors can have."""
    unsplit = Rule((((),),) * len(operands), (), {}) if rule is None else rule
    options: dict[tuple, Option] = {}
    for o in unsplit.options():
        ins = tuple(t if grad or t is not R else I for t, grad in zip(o.ins, operands, strict=True))
        out = o.out if output or o.out is not R else I
        options.setdefault((ins, out, o.kernel), Option(ins, out, o.factor, o.kernel))
    return list(options.values())


def _divides(rule: Rule, factor: str, splits: dict[str, int], n: int) -> bool:
    """Whether ``n`` more ranks may split ``factor``: it divides, and in each dim the more major factors are split up already."""
    if rule.sizes[factor] % (splits.get(factor, 1) * n):
        return False
    for dims in (*rule.operands, rule.output):
        for dim in dims:
            if factor in dim:
                place = dim.index(factor)
                if any(splits.get(f, 1) != rule.sizes[f] for f in dim[:place]) or any(f in splits for f in dim[place + 1 :]):
                    return False
    return True


def storages(
    shape: Sequence[int], trainable: bool, sizes: Sequence[int], zero: int | None, kind: str, split: Callable[[int], bool]
) -> list[Storage]:
    """Every way to keep a tensor of the model's state.

    ``zero``: None leaves sharded storage to the search, 0 forbids it, 1 or 2 asks for it where a dim divides, and 3 for a use that is as
    sharded as the storage. ``split(axis)`` says whether the axis may split a tensor's use.
    """

    def per_axis(axis: int) -> list[tuple[Type, Type]]:
        shards = [S(d) for d in range(len(shape))] if sizes[axis] > 1 else []
        used = [(s, s) for s in shards] if split(axis) else []
        if kind != "parameter":
            return [(I, I), *((I, s) for _, s in used)]
        if not trainable:
            return [(I, I), *used]
        gathered = [(s, R) for s in shards] if zero not in (0, 3) else []
        return [(I, I), *used, *gathered, (I, R)]

    found: list[tuple[Layout, Layout]] = [((), ())]
    for axis in range(len(sizes)):
        found = [((*s, a), (*u, b)) for s, u in found for a, b in per_axis(axis)]
    divides = [Storage(s, u) for s, u in found if legal(shape, s, sizes) and legal(shape, u, sizes) and _gathers(s, u)]
    if zero == 3:
        cuts = max((sum(t.is_shard for t in s.stored) for s in divides), default=0)
        return [s for s in divides if sum(t.is_shard for t in s.stored) == cuts]
    if zero and any(s.stored != s.used and any(t.is_shard for t in s.stored) for s in divides):
        lazy = [s for s in divides if any(a is I and b is R for a, b in zip(s.stored, s.used, strict=True))]
        keep = [s for s in divides if s not in lazy]
        return keep or divides
    return divides


def _gathers(stored: Layout, used: Layout) -> bool:
    """Whether the axes can be gathered one by one, the last first."""
    layout = list(stored)
    for axis in reversed(range(len(stored))):
        if stored[axis] is not used[axis] and not movable(tuple(layout), axis, used[axis]):
            return False
        layout[axis] = used[axis]
    return True


def work_share(strategy: Strategy, sizes: Sequence[int]) -> float:
    """The part of the node's work that one rank does."""
    return 1.0 / math.prod(n for f, n in zip(strategy.factors, sizes, strict=True) if f is not None)
