"""The options to compute a call for a microbatch, from the rule of its operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from autopar.ir.layout import I, P, S, Type, strided
from autopar.ir.nodes import arguments, operands
from autopar.rules import Dim, Option, Rule

aten = torch.ops.aten

# Kernels that do not communicate: they do along time what they do along a mesh axis.
_LOCAL_KERNELS = (None, "attention", "drawn", "dropout", "mean")
STATISTICS = "batch_norm"  # a kernel for which a microbatch takes its own statistics
NUMBER = "number"  # the operator itself, where each microbatch adds 1 / microbatches of a number
_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)  # may add such a number


def time_options(node: fx.Node, rule: Rule, types: Sequence[Type]) -> Iterator[tuple[Option, int]]:
    """The options to compute a node, each with the largest number of chunks of its split dim
    (0: any).

    Args:
        rule: the rule of the node.
        types: the types along time of the operands, then the one that is wanted of the result.
    """
    yield from ((option, 0) for option in rule.unsplit() if option.out is not I)
    yield from _adding_number(node)
    yield from _concatenating(node, types[:-1])
    splits = {
        s: None
        for t, dims in zip(types, (*rule.operands, rule.output), strict=True)
        for s in _splits(rule, t, dims)
    }
    for factor, parts in splits:
        for option in rule.split(factor):
            if option.kernel in _LOCAL_KERNELS or option.kernel == STATISTICS:
                yield _in_parts(rule, option, factor, parts), rule.sizes[factor] // parts


def depends_on_arguments(node: fx.Node) -> bool:
    """Whether the options depend on more than the rule and the types: on the node's arguments."""
    return node.target in _SUMS or node.target is aten.cat.default


def _splits(rule: Rule, t: Type, dims: Sequence[Dim]) -> Iterator[tuple[str, int]]:
    """The factors of a rule whose split gives a tensor with these ``dims`` the type ``t``; each
    with the number of equal parts of the factor that are split.
    """
    for place, factor in enumerate(dims[t.dim] if t.is_shard else ()):
        parts, rest = divmod(t.pieces, math.prod(rule.sizes[f] for f in dims[t.dim][:place]))
        if parts and not rest and rule.sizes[factor] % parts == 0 and rule.sizes[factor] > parts:
            yield factor, parts


def _in_parts(rule: Rule, option: Option, factor: str, parts: int) -> Option:
    """The option with each of ``parts`` equal parts of the factor split. In a dim where other
    factors are major, each part of theirs is split, too.
    """

    def strided_type(t: Type, dims: Sequence[Dim]) -> Type:
        if not t.is_shard:
            return t
        majors = dims[t.dim][: dims[t.dim].index(factor)]
        pieces = parts * math.prod(rule.sizes[f] for f in majors)
        return strided(t.dim, pieces) if pieces > 1 else S(t.dim)

    ins = tuple(strided_type(t, dims) for t, dims in zip(option.ins, rule.operands, strict=True))
    return replace(option, ins=ins, out=strided_type(option.out, rule.output))


def _adding_number(node: fx.Node) -> Iterator[tuple[Option, int]]:
    """The option to add a number to a pending sum: each microbatch adds a part of the number."""
    if node.target in _SUMS and len(operands(node)) == 1 and node.meta["val"].is_floating_point():
        other = node.args[1] if isinstance(node.args[0], fx.Node) else None
        if isinstance(other, (int, float)):
            yield Option((P,), P, kernel=NUMBER), 0


def _concatenating(node: fx.Node, found: Sequence[Type]) -> Iterator[tuple[Option, int]]:
    """The options to concatenate tensors of one shape along the dim that is cut: each tensor
    becomes a part of the result, and each part is cut.
    """
    if (
        node.target is not aten.cat.default
        or len({tuple(n.meta["val"].shape) for n, _ in operands(node)}) > 1
    ):
        return
    dim, size = arguments(node)["dim"], operands(node)[0][0].meta["val"].shape
    for t in {t: None for t in found if t.is_shard and t.dim == dim}:
        yield Option((t,) * len(found), strided(dim, t.pieces * len(found))), size[dim] // t.pieces
