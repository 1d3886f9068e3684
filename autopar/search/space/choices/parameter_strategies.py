"""The strategies of a parameter or buffer: its stored and used layouts, as ZeRO allows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.ir.layout import I, Layout, R, S, Type, can_convert, inner, is_legal, strided
from autopar.search.space.strategies import ParameterStrategy


def parameter_strategies(
    shape: Sequence[int],
    kind: str,
    trainable: bool,
    sizes: Sequence[int],
    zero: int | None,
    may_split: Sequence[bool],
    within: Collection[int] = (),
    parts: Mapping[int, int] | None = None,
) -> list[ParameterStrategy]:
    """Every way to keep a tensor of the model's state.

    Args:
        shape: the shape of the whole tensor.
        kind: "parameter" or the kind of a buffer. Buffers are stored whole.
        trainable: whether the tensor has a gradient.
        sizes: the sizes of the mesh axes.
        zero: None leaves it to the search whether the stored layout is sharded. 0 forbids a
            stored layout that is more sharded than the used layout. 1 and 2 ask for it where one
            can be gathered to the used layout. 3 asks for a used layout that is as sharded as the
            stored layout.
        may_split: whether each axis may split the used layout.
        within: axes that cut the tensor inside the chunks of the other axes.
        parts: dims that may be cut, where the tensor is used, inside each of this many equal
            parts.
    """
    found: list[tuple[Layout, Layout]] = [((), ())]
    for axis, size in enumerate(sizes):
        dims = range(len(shape)) if size > 1 else range(0)
        shards = [inner(d) if axis in within else S(d) for d in dims]
        used = [(s, s) for s in shards] if may_split[axis] else []
        if used and trainable and axis not in within:
            used += [(S(d), strided(d, count)) for d, count in (parts or {}).items()]
        pairs = _axis_types(kind, trainable, zero, shards, used)
        found = [((*s, a), (*u, b)) for s, u in found for a, b in pairs]
    legal = [
        ParameterStrategy(s, u)
        for s, u in found
        if is_legal(shape, s, sizes) and is_legal(shape, u, sizes) and can_gather(s, u)
    ]
    samples_only = [size > 1 and not may for size, may in zip(sizes, may_split, strict=True)]
    return _as_zero_asks(legal, zero, samples_only)


def _axis_types(
    kind: str,
    trainable: bool,
    zero: int | None,
    shards: Sequence[Type],
    used: Sequence[tuple[Type, Type]],
) -> list[tuple[Type, Type]]:
    """The (stored, used) types along one axis.

    Args:
        shards: the types of a stored layout that is cut along the axis.
        used: the (stored, used) types of a used layout that is cut along the axis.
    """
    if kind != "parameter":
        return [(I, I), *((I, s) for _, s in used)]
    if not trainable:
        return [(I, I), *used]
    gathered = [(s, R) for s in shards] if zero not in (0, 3) else []
    return [(I, I), *used, *gathered, (I, R)]


def _as_zero_asks(
    legal: list[ParameterStrategy], zero: int | None, samples_only: Sequence[bool]
) -> list[ParameterStrategy]:
    """The strategies that the option ``zero`` leaves, where the tensor's sizes allow any.
    ``samples_only``: whether each axis splits samples and nothing else.
    """

    def cuts(strategy: ParameterStrategy) -> int:
        return sum(t.is_shard for t in strategy.stored)

    if zero == 3:
        most = max(map(cuts, legal), default=0)
        return [s for s in legal if cuts(s) == most]
    if zero and any(s.stored != s.used and cuts(s) for s in legal):
        kept = [s for s in legal if not _sums_whole_gradient(s)]
        split = {_gathered(s, samples_only) for s in kept if not _is_whole(s, samples_only)}
        return [
            s
            for s in kept
            if not _is_whole(s, samples_only) or _gathered(s, samples_only) not in split
        ] or legal
    return legal


def _sums_whole_gradient(strategy: ParameterStrategy) -> bool:
    """Whether ranks store the whole parameter and sum its whole gradient along some axis."""
    return any(a is I and b is R for a, b in zip(strategy.stored, strategy.used, strict=True))


def _is_whole(strategy: ParameterStrategy, samples_only: Sequence[bool]) -> bool:
    """Whether the stored layout is whole along an axis of samples. The graph then sums the whole
    gradient.
    """
    return any(t is I and of for t, of in zip(strategy.stored, samples_only, strict=True))


def _gathered(strategy: ParameterStrategy, samples_only: Sequence[bool]) -> Layout:
    """The used layout, gathered along the axes of samples."""
    return tuple(R if of else t for t, of in zip(strategy.used, samples_only, strict=True))


def can_gather(stored: Layout, used: Layout) -> bool:
    """Whether the stored layout becomes the used layout by steps along one axis each: first along
    the axes that cut inside the chunks of others, then from the last axis to the first.
    """
    layout = list(stored)
    for axis in sorted(range(len(stored)), key=lambda a: (not stored[a].is_inner, -a)):
        if stored[axis] is not used[axis] and not can_convert(tuple(layout), axis, used[axis]):
            return False
        layout[axis] = used[axis]
    return True
