"""The built-in modes of tensor and sequence parallelism.

The layouts are those of Megatron-LM ("1d": arXiv 1909.08053, 2205.05198), Optimus ("2d": SUMMA,
arXiv 2104.05343), Tesseract ("2.5d": arXiv 2105.14500), Bian et al. ("3d": arXiv 2105.14450), ring
attention and DeepSpeed-Ulysses ("sequence": arXiv 2310.01889 and 2309.14509).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from autopar.ir.layout import Type
from autopar.rules import Option
from autopar.search.space.modes.mode import Groups, Mode, Operation, Split, grid

_ATTENTION = "aten.scaled_dot_product_attention"
_LOOKUPS = ("aten.embedding",)  # operators that look rows of a parameter up
# Operators that reduce over features: split along features, they need a kernel that sums over
# ranks.
_REDUCE_FEATURES = ("aten.layer_norm", "autopar.cross_entropy")


def _splits_only_samples(operation: Operation, split: Split) -> bool:
    return all(o.factor is None or o.factor in operation.batch for o in split.values())


def _splits_rows(operation: Operation, option: Option) -> bool:
    """Whether an option splits no features: it splits samples, or dims of a sample that no
    parameter has, such as the sequence. A SUMMA kernel splits features and rows together.
    """
    return (
        option.factor not in operation.features or option.kernel == "summa" or not operation.batch
    )


class OneDimension(Mode):
    """Each weight is cut along one dim. The sequence may be cut where features are not."""

    name = "1d"
    fixed_ranks = False
    plain = True

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, {"tensor": tensor})

    def allows(self, operation: Operation, split: Split) -> bool:
        return split["tensor"].factor not in operation.batch and split["tensor"].beside is None

    def prefers(self, operation: Operation, split: Split) -> bool:
        return operation.weight is None or split["tensor"].ins[operation.weight].is_shard


class TwoDimensions(Mode):
    """A square of ranks. Samples are cut along the axis "column", features along the axis "row",
    and weights along both.

    A linear layer runs as SUMMA: rank (i, j) has the blocks (i, j) of X [M, K], W [K, N] and
    Y [M, N].
    """

    name = "2d"
    fixed_ranks = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.side = _root(size, 2, "'2d'", lambda q: f"size={q * q}")

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, {"row": self.side, "column": self.side})

    def allows(self, operation: Operation, split: Split) -> bool:
        return split["row"].factor not in operation.batch and _splits_rows(
            operation, split["column"]
        )

    def prefers(self, operation: Operation, split: Split) -> bool:
        row, column = split["row"], split["column"]
        if operation.weight is not None:
            return row.kernel == column.kernel == "summa"
        if not operation.is_activation:
            return not operation.is_given or _splits_only_samples(operation, split)
        needs_kernel = operation.name in _REDUCE_FEATURES and row.kernel is None
        return column.factor in operation.batch and row.factor is not None and not needs_kernel

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        return stored["row"].is_shard and stored["column"].is_shard


class TwoAndAHalfDimensions(TwoDimensions):
    """``depth`` squares of ranks, each with its part of the samples and with all weights. The
    gradients of weights are summed along depth once a step. A depth that is not given is free, and
    at least two.
    """

    name = "2.5d"

    def __init__(self, size: int, depth: int | None = None) -> None:
        Mode.__init__(self, size)
        if depth is not None and (not isinstance(depth, int) or depth < 1 or size % depth):
            fits = _depths(size, 1)
            fix = (
                f"depth={fits[0]} does"
                if fits
                else "no depth does: use a size of 4, 8 or another square times its depth"
            )
            raise ValueError(
                f"mode '2.5d' with depth={depth!r} does not divide size={size} into squares; {fix}"
            )
        if depth is None and not _depths(size):
            near = (
                next((n for n in range(size, 0, -1) if _depths(n)), None),
                next(n for n in itertools.count(size) if _depths(n)),
            )
            fixes = " or ".join(f"size={n}" for n in near if n)
            raise ValueError(
                f"mode '2.5d' needs two or more squares of ranks, {size} are not; the nearest: "
                f"{fixes}"
            )
        self.depth, squares = depth, depth or _depths(size)[0]
        self.side = _root(
            size // squares,
            2,
            f"'2.5d' with depth={depth} of '2d'",
            lambda q: f"size={q * q * squares}",
        )

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, {"depth": tensor // self.side**2, "row": self.side, "column": self.side})

    def allows(self, operation: Operation, split: Split) -> bool:
        return split["depth"].factor in (None, *operation.batch) and super().allows(
            operation, split
        )

    def prefers(self, operation: Operation, split: Split) -> bool:
        splits_samples = not operation.is_activation or split["depth"].factor in operation.batch
        return splits_samples and super().prefers(operation, split)

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        return not stored["depth"].is_shard and super().stores(stored, used)

    def alternatives(self) -> Sequence[Mode]:
        return (
            [TwoAndAHalfDimensions(self.size, depth) for depth in _depths(self.size)]
            if self.depth is None
            else (self,)
        )


class ThreeDimensions(Mode):
    """A cube of ranks with the axes "weight", "input" and "output".

    Of a linear layer's X [M, K], W [K, N] and Y [M, N] the rows are cut along "weight". Features
    are cut along "output" before the layer and along "input" after it. X is gathered along
    "input", W is gathered along "weight", and Y is summed along "output". The next layer has
    "input" and "output" exchanged.
    """

    name = "3d"
    fixed_ranks = False
    within = frozenset({"weight"})

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.side = _root(size, 3, "'3d'", lambda q: f"size={q**3}")

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, dict.fromkeys(("weight", "input", "output"), self.side))

    def allows(self, operation: Operation, split: Split) -> bool:
        if operation.batch and split["weight"].factor not in (None, *operation.batch):
            return False
        if operation.weight is not None:
            factors = [split["input"].factor, split["output"].factor]
            return all(f is None or f in operation.features for f in factors) and (
                None in factors or len(set(factors)) > 1
            )
        return True

    def prefers(self, operation: Operation, split: Split) -> bool:
        others = [split["input"], split["output"]]
        if operation.views_parameter:
            return split["weight"].out.kind == "R" and all(o.factor is not None for o in others)
        if not operation.is_activation:
            return not operation.is_given or _splits_only_samples(operation, split)
        samples = [o for o in others if o.factor in operation.batch]
        if operation.weight is not None:
            return split["weight"].factor in operation.batch and all(
                o.factor is not None for o in others
            )
        features = [o for o in others if o.factor is not None and o.factor not in operation.batch]
        needs_kernel = operation.name in _REDUCE_FEATURES and any(
            o.kernel is None for o in features
        )
        return (
            split["weight"].factor in operation.batch
            and len(samples) == len(features) == 1
            and not needs_kernel
        )

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        """A parameter is cut along all axes. It is gathered along "weight" once a step, or in each
        layer where its used layout is its stored layout.
        """
        return all(t.is_shard for t in stored.values()) and (
            used["weight"].is_inner or used["weight"].kind == "R"
        )


class SequenceParallel(Mode):
    """The sequence is cut, and weights are whole. In attention the ranks of a ring pass keys and
    values on (ring attention). Along the other axis each rank has some heads of whole sequences
    (DeepSpeed-Ulysses). ``ring`` is the number of ranks in a ring; it is free unless given.
    """

    name = "sequence"
    fixed_ranks = False
    zigzag = frozenset({"ring"})

    def __init__(self, size: int, ring: int | None = None) -> None:
        super().__init__(size)
        if ring is not None and (not isinstance(ring, int) or ring < 1 or size % ring):
            raise ValueError(
                f"mode 'sequence' with ring={ring!r} does not divide size={size}; rings of "
                f"{_divisors(size)} do"
            )
        self.ring, self.plain = ring, ring == 1

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        ring = self.ring or tensor
        return grid(rank, {"ring": ring, "heads": tensor // ring})

    def allows(self, operation: Operation, split: Split) -> bool:
        products = operation.weight is not None or operation.name in _LOOKUPS
        whole = operation.batch | (operation.features if products else frozenset())
        return all(o.factor not in whole for o in split.values())

    def prefers(self, operation: Operation, split: Split) -> bool:
        if operation.name == _ATTENTION and operation.is_activation:
            return all(
                o.kernel == "ring" if name == "ring" else o.factor in ("n", "g")
                for name, o in split.items()
            )
        return not operation.is_activation or all(o.factor is not None for o in split.values())

    def alternatives(self) -> Sequence[Mode]:
        return (
            [SequenceParallel(self.size, ring) for ring in _divisors(self.size)]
            if self.ring is None
            else (self,)
        )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _depths(size: int, least: int = 2) -> list[int]:
    """The numbers of squares, at least ``least``, of four ranks or more each, that ``size`` ranks
    can be divided into.
    """
    return [
        d for d in _divisors(size) if least <= d < size and math.isqrt(size // d) ** 2 == size // d
    ]


def _root(size: int, power: int, name: str, fix: Callable[[int], str]) -> int:
    """The side of a square (``power`` 2) or cube (3) of ``size`` ranks.

    Raises:
        ValueError: ``size`` is no square or cube; ``fix`` writes the nearest ones into the
            message.
    """
    near = round(size ** (1 / power))
    if near**power == size > 1:
        return near
    below = near if near**power <= size else near - 1
    figure = {2: "square", 3: "cube"}[power]
    fixes = " or ".join(fix(q) for q in (below, below + 1) if q > 1)
    raise ValueError(f"mode {name} needs a {figure} of ranks, {size} is none; the nearest: {fixes}")
