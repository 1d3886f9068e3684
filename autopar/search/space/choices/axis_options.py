"""The options of a node along one mesh axis: those of its rule, and the same options with dims cut
in zigzag order or inside equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from autopar.ir.layout import I, R, Type, Z, strided
from autopar.rules import Dim, Option, Rule

# Kernels that compute the same whatever the order of the pieces of a dim; None is the operator.
_ANY_ORDER = (None, "attention", "batch_norm", "dropout", "layer_norm", "mean", "ring")


def axis_options(
    rule: Rule, operands: Sequence[bool], output: bool, parts: Mapping[str, int]
) -> list[Option]:
    """The options of a node along one axis.

    Args:
        operands, output: whether each operand and the result have gradients.
        parts: factors whose dims may also be cut inside each of this many equal parts.
    """
    options = _typed_options(rule, operands, output)
    in_parts = (_options_in_parts(rule, options, f, count) for f, count in parts.items())
    return [*options, *chain.from_iterable(in_parts)]


def _typed_options(rule: Rule, operands: Sequence[bool], output: bool) -> list[Option]:
    """The options of the rule. R becomes I for a tensor without a gradient."""
    options: dict[tuple, Option] = {}
    for o in rule.options():
        ins = tuple(t if grad or t is not R else I for t, grad in zip(o.ins, operands, strict=True))
        out = o.out if output or o.out is not R else I
        options.setdefault((ins, out, o.kernel, o.beside), replace(o, ins=ins, out=out))
    return list(options.values())


def zigzag_options(options: Sequence[Option]) -> Iterator[Option]:
    """The options that split a factor, with their dims cut in zigzag order. Left out are options
    whose kernel depends on the order, or whose dims are cut into several pieces already.
    """
    for o in options:
        if o.factor is None or o.kernel not in _ANY_ORDER:
            continue
        if all(t.pieces == 1 for t in (*o.ins, o.out)):
            yield replace(o, ins=tuple(map(_in_zigzag, o.ins)), out=_in_zigzag(o.out))


def _in_zigzag(t: Type) -> Type:
    return Z(t.dim) if t.is_shard else t


def _options_in_parts(
    rule: Rule, options: Sequence[Option], factor: str, count: int
) -> Iterator[Option]:
    """The options that split ``factor``, with its dims cut inside each of ``count`` equal parts.
    Where the operator takes a dim apart into these parts, only that dim is cut inside the parts.
    """
    takes_apart = any(are_parts(rule, dim, factor, count) for dims in rule.operands for dim in dims)

    def in_parts(t: Type, dims: Sequence[Dim]) -> Type:
        if not t.is_shard or factor not in dims[t.dim]:
            return t
        if takes_apart and not are_parts(rule, dims[t.dim], factor, count):
            return t
        return strided(t.dim, count)

    for o in options:
        if o.factor == factor and o.kernel in (*_ANY_ORDER, "summa"):
            ins = tuple(in_parts(t, dims) for t, dims in zip(o.ins, rule.operands, strict=True))
            yield replace(o, ins=ins, out=in_parts(o.out, rule.output))


def are_parts(rule: Rule, dim: Dim, factor: str, count: int) -> bool:
    """Whether a dim consists of ``count`` parts, in each of which ``factor`` is the major one."""
    return factor in dim[1:] and math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]) == count
