"""Factor rules: how the dims of an operator's operands and output correspond.

A rule is written like the mathematics: ``"... k, n k + n -> ... n"`` is a linear layer. Names are
factors. A dim is a factor, a product of factors in parentheses (major first), or ``1``. ``...``
stands for leading dims, broadcast from the right. Commas multiply, plus signs add: the operator is
linear in each operand of a term while the other operands are fixed. ``~`` marks an operand in which
the operator is not linear. All options of the operator along one mesh axis follow from its rule:
see :meth:`Rule.options`. Shardy's sharding rules (https://openxla.org/shardy) are similar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from autopar.ir.layout import I, P, R, S, Type

_T = TypeVar("_T")
Dim = tuple[str, ...]  # the factors of a dim, major first; () for a dim of size 1


@dataclass(frozen=True)
class Option:
    """One way to run an operator along one mesh axis.

    Attributes:
        ins: the type of each operand.
        out: the type of the result.
        factor: the factor that is split; None if none is.
        kernel: the kernel that replaces the operator; None if none does.
        beside: for a kernel that works along exactly two axes, the factor that it splits along the
            other axis, which has the same size; "" for a kernel that works along exactly one axis;
            None for all other options.
    """

    ins: tuple[Type, ...]
    out: Type
    factor: str | None = None
    kernel: str | None = None
    beside: str | None = None


@dataclass(frozen=True)
class Rule:
    """How one node's dims correspond, which factors may be split, and what the node costs.

    Attributes:
        operands: for each operand, the factors of each dim.
        output: the factors of each dim of the result (of the first result, if there are several).
        sizes: the size of each factor.
        terms: for each term of the sum, the operands in which the operator is linear.
        whole: the factors that must not be split.
        sums: factors that the operator sums over, beside the factors of the terms.
        least: the smallest size of a factor on each rank, where the factor is split; 1 by default.
        kernels: by factor, the kernel that replaces the operator where the factor is split.
        extra: options beside those that follow from the factors: algorithms with their own kernel.
        composed: the kernels that run several operators and communicate.
        exclusive: the factors that no further axis may split beside a kernel that works along
            exactly one or two axes.
        flops: floating-point operations of the whole node.
        kind: the kind of arithmetic, which the cost model prices: "matmul", "conv", "attention",
            "elementwise" or "view".
        writes: the operands that the operator updates in place. They are buffers, and the operator
            must get them in their stored layout.
        complete_gradient: whether the backward needs the whole gradient of the result, because it
            is not linear in it. Then the result is never R, whose gradient is a pending sum.
        shape_argument: the argument that names the shape of the result.
        localise: returns the other arguments that change on a rank, given all arguments by name and
            the number of ranks that split each factor.
    """

    operands: tuple[tuple[Dim, ...], ...]
    output: tuple[Dim, ...]
    sizes: dict[str, int]
    terms: tuple[frozenset[int], ...] = ()
    whole: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    least: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    extra: tuple[Option, ...] = ()
    composed: frozenset[str] = frozenset()
    exclusive: frozenset[str] = frozenset()
    flops: float = 0.0
    kind: str = "elementwise"
    writes: tuple[int, ...] = ()
    complete_gradient: bool = False
    shape_argument: str | None = None
    localise: Callable[[dict[str, Any], dict[str, int]], dict[str, Any]] | None = None

    def dims_by_factor(self, tensors: Sequence[_T]) -> Iterator[tuple[str, list[tuple[_T, int]]]]:
        """The factors with which dims begin, each with these dims.

        Args:
            tensors: the operands, and last the result.

        Raises:
            ValueError: the rule is of another number of operands.
        """
        if len(tensors) != len(self.operands) + 1:
            raise ValueError(f"a rule of {len(self.operands)} operands for {len(tensors) - 1}")
        for factor, places in self._first_factors.items():
            yield factor, [(tensors[k], d) for k, d in places]

    @cached_property
    def _first_factors(self) -> dict[str, list[tuple[int, int]]]:
        """For each factor the dims that begin with it, as (number of the tensor, dim)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for k, dims in enumerate((*self.operands, self.output)):
            for d, factors in enumerate(dims):
                if factors:
                    found.setdefault(factors[0], []).append((k, d))
        return found

    def split(self, factor: str) -> list[Option]:
        """The options that split ``factor`` and follow from the terms."""
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
        # The factor is summed over. A term that lacks the factor must be a pending sum itself,
        # through one of its operands.
        lacking = [t for t in self.terms if not any(factor in _flat(self.operands[k]) for k in t)]
        return [Option(choice, P, factor, kernel) for choice in _pending(ins, lacking)]

    def unsplit(self) -> list[Option]:
        """The options that split no factor: all I, all R, and a pending sum that passes through the
        operator, in one operand of each term.
        """
        n = len(self.operands)
        options = [Option((I,) * n, I)]
        if not self.complete_gradient:
            options.append(Option((R,) * n, R))
        if self.terms:
            options += [Option(choice, P) for choice in _pending([R] * n, self.terms)]
        return options

    def options(self) -> list[Option]:
        """All options of the operator along one axis, whatever its size."""
        return self.unsplit() + [o for f in self.sizes for o in self.split(f)] + list(self.extra)

    def _type_in(self, dims: Sequence[Dim], factor: str) -> Type:
        return next((S(d) for d, factors in enumerate(dims) if factor in factors), R)


def _pending(ins: list[Type], terms: Iterable[frozenset[int]]) -> list[tuple[Type, ...]]:
    """The types ``ins`` with one operand of each of ``terms`` a pending sum: every combination."""
    choices = [tuple(ins)]
    for term in terms:
        choices = [(*c[:k], P, *c[k + 1 :]) for c in choices for k in sorted(term)]
    return choices


def _flat(dims: Iterable[Dim]) -> set[str]:
    return {f for d in dims for f in d}


def whole_rule(operands: int, complete_gradient: bool) -> Rule:
    """The rule of a call with so many operands that nothing may split."""
    return Rule((((),),) * operands, (), {}, complete_gradient=complete_gradient)


_TOKEN = re.compile(r"\.\.\.|\(|\)|[A-Za-z_]\w*|1")


def make_rule(
    spec: str,
    shapes: Sequence[Sequence[int]],
    output: Sequence[int],
    *,
    whole: Iterable[str] = (),
    **options: Any,
) -> Rule:
    """The rule written as ``spec``.

    Args:
        spec: the rule's text. It may have more operands than the call, such as a bias that the call
            lacks.
        shapes: the global shape of each operand.
        output: the global shape of the result.
        whole: factors that must not be split; ``"..."`` stands for all leading dims.
        options: fields of :class:`Rule`. ``sizes`` needs only the factors that the shapes do not
            tell.

    Raises:
        ValueError: the text does not fit the shapes.
    """
    left, right = spec.split("->")
    texts, terms = _parse_operands(left, len(shapes))
    parsed = [_parse_dims(text) for text in texts]
    sizes: dict[str, int] = dict(options.pop("sizes", {}))
    out_dims = _bind(_parse_dims(right), output, sizes)
    bound = [_bind(dims, shape, sizes) for dims, shape in zip(parsed, shapes, strict=True)]
    operands = [_unbroadcast(dims, shape, sizes) for dims, shape in zip(bound, shapes, strict=True)]
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


def _parse_operands(text: str, count: int) -> tuple[list[str], list[frozenset[int]]]:
    """The texts of the first ``count`` operands, and the operands of each term."""
    texts: list[str] = []
    terms: list[frozenset[int]] = []
    for term in text.split("+"):
        members = []
        for operand in term.split(","):
            if len(texts) == count:
                break
            if not operand.strip().startswith("~"):
                members.append(len(texts))
            texts.append(operand.strip().lstrip("~ "))
        if members:
            terms.append(frozenset(members))
    return texts, terms


def _parse_dims(text: str) -> list[Any]:
    """The dims of one operand: factors, ``()`` for ``1``, and ``"..."``."""
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
    """The dims with names for the leading ones; adds the sizes of factors to ``sizes``."""
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
            sizes[factors[0]] = n  # the operands before have this factor broadcast
    return tuple(bound)


def _unbroadcast(
    dims: tuple[Dim, ...], shape: Sequence[int], sizes: dict[str, int]
) -> tuple[Dim, ...]:
    """The dims without factors of size 1, and without the factors of broadcast dims."""
    return tuple(
        () if n == 1 else tuple(f for f in d if sizes[f] != 1)
        for d, n in zip(dims, shape, strict=True)
    )
