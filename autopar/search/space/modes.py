"""Modes of tensor and sequence parallelism: how a tensor group's ranks form mesh axes, and what is
split along each.

A mode restricts the one search space: its axes are axes of the mesh, and of the strategies that
every operator has on such a mesh it leaves some. A user's own is a class like those here, see
:func:`register_mode`.

The layouts are those of Megatron-LM ("1d": arXiv 1909.08053, 2205.05198), Optimus ("2d": SUMMA,
arXiv 2104.05343), Tesseract ("2.5d": arXiv 2105.14500), Bian et al. ("3d": arXiv 2105.14450), ring
attention and DeepSpeed-Ulysses ("sequence": arXiv 2310.01889 and 2309.14509).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from autopar.errors import PlanError
from autopar.ir.layout import Type
from autopar.rules import Option, Rule

Split = Mapping[
    str, Option
]  # what is done along each of a mode's axes of more than one rank, by their names
Groups = dict[str, list[int]]


@dataclass(frozen=True)
class Operation:
    """One call of the graph, as a mode sees it.

    Attributes:
        name: of the operator: "aten.linear".
        rule: its factor rule; None where it has none.
        batch: those of the rule's factors that are samples.
        parameters: which operands are parameters of the model, or views of them.
        trains: whether its result has a gradient.
    """

    name: str
    rule: Rule | None
    batch: frozenset[str]
    parameters: frozenset[int]
    trains: bool

    @property
    def weight(self) -> int | None:
        """Which operand of a product of matrices is a parameter, if one is."""
        multiplied = (
            self.parameters & {0, 1} if self.rule is not None and self.rule.kind == "matmul" else ()
        )
        return min(multiplied, default=None)

    @property
    def features(self) -> frozenset[str]:
        """The factors that parameters have."""
        return (
            frozenset(f for k in self.parameters for dim in self.rule.operands[k] for f in dim)
            if self.rule
            else frozenset()
        )

    @property
    def is_given(self) -> bool:
        """Whether it works on inputs and constants only: masks, positions."""
        return not self.trains and not self.parameters

    @property
    def views_parameter(self) -> bool:
        """Whether it is nothing but another view of a parameter: its transpose."""
        return (
            bool(self.parameters)
            and self.rule is not None
            and self.rule.kind == "view"
            and not self.batch
        )

    @property
    def is_activation(self) -> bool:
        """Whether it makes something of samples that has a gradient."""
        return self.trains and bool(self.batch)


class Mode:
    """What a mode's class inherits. Its keywords beside ``size``, the ranks of a tensor group, are
    what users write into ``parallel["tensor"]``; it raises :class:`ValueError` where they do not go
    together, saying what would.

    Attributes:
        within: names of axes that cut stored parameters within the chunks that the other axes make
            of a dim, as is needed to gather them along an axis before another that cuts the same
            dim.
        zigzag: names of axes along which tensors may be cut in zigzag order.
        plain: whether the meshes that are searched where no mode is named hold all that it allows.
    """

    name: ClassVar[str] = ""
    within: frozenset[str] = frozenset()
    zigzag: frozenset[str] = frozenset()
    plain: bool = False

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, vars(self).items())))

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        """The ranks of ``rank``'s group along each axis, by the axis's name: together they are a
        grid of ``tensor`` ranks.

        Args:
            rank: of ``world_size``.
            data, pipeline, tensor: the sizes that were asked for or inferred; their product is
                ``world_size``.
        """
        return grid(rank, {self.name: tensor})

    def allows(self, operation: Operation, split: Split) -> bool:
        """Whether an operator may be split so."""
        return True

    def prefers(self, operation: Operation, split: Split) -> bool:
        """Whether it shall be, as long as there is such a split that its sizes allow."""
        return True

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        """Whether a parameter shall lie so between steps, and be used so in the graph, as long as
        its sizes allow.
        """
        return True

    def alternatives(self) -> Sequence[Mode]:
        """What a search chooses from where the keywords leave it open."""
        return (self,)


def grid(rank: int, sizes: Mapping[str, int]) -> Groups:
    """The groups of ``rank`` where each ``prod(sizes)`` ranks in a row are a grid of these axes,
    the first the slowest.
    """
    groups: Groups = {}
    stride = math.prod(sizes.values())
    for name, n in sizes.items():
        stride //= n
        first = rank - rank // stride % n * stride
        groups[name] = [first + i * stride for i in range(n)]
    return groups


_MODES: dict[str, type[Mode]] = {}
_Class = TypeVar("_Class", bound=type[Mode])


def register_mode(name: str) -> Callable[[_Class], _Class]:
    """Let ``parallel=dict(tensor=dict(size=..., mode=name, ...))`` use the decorated class, a
    :class:`Mode`; what else the dict holds are keywords of its constructor. Where none are needed,
    the planner tries it, too, where neither ``parallel`` nor ``mesh`` is given, and
    :func:`autopar.compare_modes` lists it. A later registration of a name replaces an earlier one.

    Raises:
        PlanError: the name is none, or the class is no :class:`Mode`.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(
            f"register_mode({name!r}): give the mode a name, for example register_mode('my_mode')"
        )

    def register(mode: _Class) -> _Class:
        if not isinstance(mode, type) or not issubclass(mode, Mode):
            raise PlanError(
                f"register_mode({name!r}) decorates {mode!r}: write a class that inherits from "
                "autopar.Mode"
            )
        mode.name = name
        _MODES[name] = mode
        return mode

    return register


def modes() -> tuple[str, ...]:
    """The names of all modes."""
    return tuple(_MODES)


def make_mode(name: str, size: int, keywords: Mapping[str, Any]) -> Mode:
    """The mode of that name.

    Raises:
        PlanError: there is none, it does not take such keywords, or the sizes do not go together.
    """
    if not isinstance(name, str) or name not in _MODES:
        raise PlanError(f"tensor mode {name!r} is not available: the modes are {', '.join(_MODES)}")
    try:
        inspect.signature(_MODES[name]).bind(size, **keywords)
    except TypeError as e:
        taken = [p for p in inspect.signature(_MODES[name]).parameters if p != "size"]
        raise PlanError(
            f"tensor mode {name!r}: {e}; beside size and mode it takes "
            f"{', '.join(taken) or 'nothing'}"
        ) from e
    try:
        return _MODES[name](size, **keywords)
    except ValueError as e:
        raise PlanError(f'parallel["tensor"]: {e}') from e


def alternatives(name: str, size: int) -> Sequence[Mode]:
    """The modes of that name that so many ranks can have where no keyword is given; none where it
    needs some, or another size.
    """
    try:
        return make_mode(name, size, {}).alternatives()
    except PlanError:
        return ()


_ATTENTION, _LOOKS_UP = "aten.scaled_dot_product_attention", ("aten.embedding",)
_OVER_FEATURES = (
    "aten.layer_norm",
    "autopar.cross_entropy",
)  # where these are cut a kernel sums over ranks


def _at_most_samples(operation: Operation, split: Split) -> bool:
    return all(o.factor is None or o.factor in operation.batch for o in split.values())


def _splits_samples(operation: Operation, option: Option) -> bool:
    """Rows, not features: samples, or parts of them that no parameter has."""
    return (
        option.factor not in operation.features or option.kernel == "summa" or not operation.batch
    )


@register_mode("1d")
class OneDimension(Mode):
    """Each weight is cut along one dim; the sequence may be cut where features are not."""

    plain = True

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, {"tensor": tensor})

    def allows(self, operation: Operation, split: Split) -> bool:
        return split["tensor"].factor not in operation.batch and split["tensor"].beside is None

    def prefers(self, operation: Operation, split: Split) -> bool:
        return operation.weight is None or split["tensor"].ins[operation.weight].is_shard


@register_mode("2d")
class TwoDimensions(Mode):
    """A square of ranks: samples are cut along its columns, features along its rows, and weights
    along both.

    Of a linear layer's X [M, K], W [K, N] and Y [M, N] rank (i, j) has the blocks (i, j); it runs
    as SUMMA.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.side = _root(size, 2, "'2d'", lambda q: f"size={q * q}")

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        return grid(rank, {"row": self.side, "column": self.side})

    def allows(self, operation: Operation, split: Split) -> bool:
        return split["row"].factor not in operation.batch and _splits_samples(
            operation, split["column"]
        )

    def prefers(self, operation: Operation, split: Split) -> bool:
        row, column = split["row"], split["column"]
        if operation.weight is not None:
            return row.kernel == column.kernel == "summa"
        if not operation.is_activation:
            return not operation.is_given or _at_most_samples(operation, split)
        whole = operation.name in _OVER_FEATURES and row.kernel is None
        return column.factor in operation.batch and row.factor is not None and not whole

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        return stored["row"].is_shard and stored["column"].is_shard


@register_mode("2.5d")
class TwoAndAHalfDimensions(TwoDimensions):
    """``depth`` squares of ranks that share the samples; each has all weights, whose gradients are
    summed over depth once a step. Unless it is given it is free, but two at least."""

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
        spread = not operation.is_activation or split["depth"].factor in operation.batch
        return spread and super().prefers(operation, split)

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        return not stored["depth"].is_shard and super().stores(stored, used)

    def alternatives(self) -> Sequence[Mode]:
        return (
            [TwoAndAHalfDimensions(self.size, depth) for depth in _depths(self.size)]
            if self.depth is None
            else (self,)
        )


@register_mode("3d")
class ThreeDimensions(Mode):
    """A cube of ranks (i, j, l): of a linear layer's X [M, K], W [K, N] and Y [M, N] rows are cut
    along "weight" (i) and features along "output" (l) before the layer and along "input" (j) after
    it; what X lacks for its product is gathered along "input", what W lacks along "weight", and Y
    is summed along "output". The next layer has "input" and "output" the other way round.
    """

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
            return not operation.is_given or _at_most_samples(operation, split)
        samples = [o for o in others if o.factor in operation.batch]
        if operation.weight is not None:
            return split["weight"].factor in operation.batch and all(
                o.factor is not None for o in others
            )
        features = [o for o in others if o.factor is not None and o.factor not in operation.batch]
        whole = operation.name in _OVER_FEATURES and any(o.kernel is None for o in features)
        return (
            split["weight"].factor in operation.batch
            and len(samples) == len(features) == 1
            and not whole
        )

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        """Gathered along "weight" once a step, or, where it is used as it lies, by each layer
        anew.
        """
        return all(t.is_shard for t in stored.values()) and (
            used["weight"].is_inner or used["weight"].kind == "R"
        )


@register_mode("sequence")
class SequenceParallel(Mode):
    """The sequence is cut, and weights are whole. In attention the ranks of a ring send keys and
    values round, while along the other axis each rank takes some of the heads of whole sequences.
    ``ring``: ranks in a ring; free unless given."""

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
        products = operation.weight is not None or operation.name in _LOOKS_UP
        held = operation.batch | (operation.features if products else frozenset())
        return all(o.factor not in held for o in split.values())

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
    """Into how many squares of four ranks or more so many can be divided."""
    return [
        d for d in _divisors(size) if least <= d < size and math.isqrt(size // d) ** 2 == size // d
    ]


def _root(size: int, power: int, name: str, fix: Callable[[int], str]) -> int:
    """The side of a square or cube of ``size`` ranks; ValueError with the nearest that are."""
    near = round(size ** (1 / power))
    if near**power == size > 1:
        return near
    below = near if near**power <= size else near - 1
    what = {2: "square", 3: "cube"}[power]
    fixes = " or ".join(fix(q) for q in (below, below + 1) if q > 1)
    raise ValueError(f"mode {name} needs a {what} of ranks, {size} is none; the nearest: {fixes}")
