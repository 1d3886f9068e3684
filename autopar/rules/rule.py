"""Factor rules: how the dims of an operator's operands and output correspond.

A rule is written like the mathematics: ``"... k, n k + n -> ... n"`` is a linear layer. Names are
factors; a dim is a factor, a product of factors in parentheses (major first), or ``1``; ``...``
stands for leading dims, broadcast from the right. Commas
multiply, plus signs add: the operator is linear in every operand of a term while the others are
held. ``~`` marks an operand in which it is not. From one rule follow, for one mesh axis, all of the
operator's options: see :meth:`Rule.options`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.layout import I, P, R, S, Type

Dim = tuple[str, ...]  # the factors of a dim, major first; () for a dim of size 1


@dataclass(frozen=True)
class Option:
    """One way to run an operator along one mesh axis.

    ``factor`` names what is split (None: nothing is), ``kernel`` the kernel this takes in place of
    the operator itself. Where the kernel works along one axis or two, ``beside`` is the factor that
    it splits along the other, of the same size; "" where there is none.
    """

    ins: tuple[Type, ...]
    out: Type
    factor: str | None = None
    kernel: str | None = None
    beside: str | None = None


@dataclass(frozen=True)
class Rule:
    """How one node's dims correspond, what may be split, and what it costs."""

    operands: tuple[tuple[Dim, ...], ...]
    output: tuple[Dim, ...]
    sizes: dict[str, int]
    terms: tuple[frozenset[int], ...] = ()
    whole: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    least: dict[str, int] = field(
        default_factory=dict
    )  # of a factor, that each rank must have where it is split; 1 unless given
    kernels: dict[str, str] = field(default_factory=dict)
    extra: tuple[Option, ...] = ()
    composed: frozenset[str] = (
        frozenset()
    )  # kernels that are made of many operators, and send by themselves
    exclusive: frozenset[str] = (
        frozenset()
    )  # factors that no further axis may split beside a kernel that works along one axis or two
    flops: float = 0.0
    kind: str = "elementwise"
    writes: tuple[
        int, ...
    ] = ()  # operands that it updates in place: buffers, which it must get as they are kept
    shape_argument: str | None = None
    localise: Callable[[dict[str, Any], dict[str, int]], dict[str, Any]] | None = None

    def split(self, factor: str) -> list[Option]:
        """The options that split ``factor`` by the rule's own arithmetic."""
        if factor in self.whole or self.sizes[factor] == 1:
            return []
        ins = [self._type_in(dims, factor) for dims in self.operands]
        out = self._type_in(self.output, factor)
        kernel = self.kernels.get(factor)
        if out is not R:
            return [Option(tuple(ins), out, factor, kernel)]
        if factor not in self.sums and not any(
            factor in _flat(self.operands[k]) for term in self.terms for k in term
        ):
            return []
        # The factor is summed: a term that lacks it must itself come as a pending sum, through one
        # of its operands.
        choices: list[list[Type]] = [ins]
        for term in self.terms:
            if not any(factor in _flat(self.operands[k]) for k in term):
                choices = [
                    [P if k == j else t for j, t in enumerate(c)]
                    for c in choices
                    for k in sorted(term)
                ]
        return [Option(tuple(c), P, factor, kernel) for c in choices]

    def unsplit(self) -> list[Option]:
        """All I, all R, and a pending sum passing through operands in which the operator is
        linear.
        """
        n = len(self.operands)
        options = [Option((I,) * n, I), Option((R,) * n, R)]
        if self.terms:
            choices: list[list[Type]] = [[R] * n]
            for term in self.terms:
                choices = [
                    [P if k == j else t for j, t in enumerate(c)]
                    for c in choices
                    for k in sorted(term)
                ]
            options += [Option(tuple(c), P) for c in choices]
        return options

    def options(self) -> list[Option]:
        """Every way to run the operator along one axis, whatever its size."""
        return self.unsplit() + [o for f in self.sizes for o in self.split(f)] + list(self.extra)

    def _type_in(self, dims: Sequence[Dim], factor: str) -> Type:
        return next((S(d) for d, factors in enumerate(dims) if factor in factors), R)


def _flat(dims: Iterable[Dim]) -> set[str]:
    return {f for d in dims for f in d}


_TOKEN = re.compile(r"\.\.\.|\(|\)|[A-Za-z_]\w*|1")


def make_rule(
    spec: str,
    shapes: Sequence[Sequence[int]],
    output: Sequence[int],
    *,
    whole: Iterable[str] = (),
    **options: Any,
) -> Rule:
    """The rule written as ``spec`` for operands of these ``shapes`` and an ``output`` of that
    shape.

    ``whole`` names factors that must not be split (``"..."`` for all leading dims). A spec for one
    more operand than there are is cut at the ones missing (an absent bias). Other keywords are
    fields of :class:`Rule`.
    """
    left, right = spec.split("->")
    texts: list[str] = []
    terms: list[frozenset[int]] = []
    for term in left.split("+"):
        members = []
        for text in term.split(","):
            if len(texts) == len(shapes):
                break
            if not text.strip().startswith("~"):
                members.append(len(texts))
            texts.append(text.strip().lstrip("~ "))
        if members:
            terms.append(frozenset(members))
    sizes: dict[str, int] = {}
    parsed = [_parse_dims(text) for text in texts]
    sizes.update(options.pop("sizes", {}))
    out_dims = _bind(_parse_dims(right), output, sizes)
    operands = [_bind(dims, shape, sizes) for dims, shape in zip(parsed, shapes, strict=True)]
    operands = [
        _unbroadcast(dims, shape, sizes) for dims, shape in zip(operands, shapes, strict=True)
    ]
    out_dims = _unbroadcast(out_dims, output, sizes)
    whole = set(whole)
    if "..." in whole:
        whole |= {f for f in sizes if f.startswith(".")}
    used = {f for dims in [*operands, out_dims] for d in dims for f in d}
    return Rule(
        operands=tuple(operands),
        output=out_dims,
        sizes={f: n for f, n in sizes.items() if f in used},
        terms=tuple(options.pop("terms", terms)),
        whole=frozenset(whole),
        **options,
    )


def _parse_dims(text: str) -> list[Any]:
    dims: list[Any] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append("..." if token == "..." else () if token == "1" else (token,))
    return dims


def _bind(dims: list[Any], shape: Sequence[int], sizes: dict[str, int]) -> tuple[Dim, ...]:
    """Name the leading dims, and learn the factors' sizes from the shape."""
    bound: list[Dim] = []
    for dim in dims:
        if dim == "...":
            count = len(shape) - (len(dims) - 1)
            bound += [(f".{count - 1 - i}",) for i in range(count)]
        else:
            bound.append(dim)
    if len(bound) != len(shape):
        raise ValueError(f"rule dims {dims} do not fit shape {tuple(shape)}")
    for factors, n in zip(bound, shape, strict=True):
        unknown = [f for f in factors if f not in sizes]
        known = math.prod(sizes[f] for f in factors if f in sizes)
        if len(unknown) == 1 and n % max(known, 1) == 0:
            sizes[unknown[0]] = n // known
        elif len(factors) == 1 and sizes[factors[0]] == 1:
            sizes[factors[0]] = n  # broadcast so far
    return tuple(bound)


def _unbroadcast(
    dims: tuple[Dim, ...], shape: Sequence[int], sizes: dict[str, int]
) -> tuple[Dim, ...]:
    """A dim of size 1 has no factors; neither do factors of size 1 count."""
    return tuple(
        () if n == 1 else tuple(f for f in d if sizes[f] != 1)
        for d, n in zip(dims, shape, strict=True)
    )
