"""What a mode of tensor or sequence parallelism is: the mesh axes that the ranks of a tensor group
form, and the splits that each operator may have along them.

A mode restricts the search space: its axes are axes of the mesh, and of the strategies that an
operator has on this mesh the mode leaves some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.layout import Type
from autopar.rules import Option, Rule

# The option that an operator takes along each axis of a mode, by the axis's name. Axes of one rank
# are left out.
Split = Mapping[str, Option]
# the ranks of one rank's group along each axis, by the axis's name
Groups = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Operation:
    """One operator call of the graph, as a mode sees it.

    Attributes:
        name: the operator's name, such as "aten.linear".
        rule: the operator's factor rule; None where it has none.
        batch: the factors of the rule that are samples; empty in a microbatch of one sample.
        parameters: the numbers of the operands that are parameters of the model, or views of them.
        trains: whether the result has a gradient.
        has_samples: whether an operand or the result has a dim of samples.
    """

    name: str
    rule: Rule | None
    batch: frozenset[str]
    parameters: frozenset[int]
    trains: bool
    has_samples: bool

    @property
    def weight(self) -> int | None:
        """The number of the operand of a matrix product that is a parameter; None without one."""
        multiplied = (
            self.parameters & {0, 1} if self.rule is not None and self.rule.kind == "matmul" else ()
        )
        return min(multiplied, default=None)

    @property
    def features(self) -> frozenset[str]:
        """The factors that parameters have."""
        if self.rule is None:
            return frozenset()
        return frozenset(f for k in self.parameters for dim in self.rule.operands[k] for f in dim)

    @property
    def is_given(self) -> bool:
        """Whether the call computes from inputs and constants only, such as a mask or positions."""
        return not self.trains and not self.parameters

    @property
    def views_parameter(self) -> bool:
        """Whether the result is only a view of a parameter, such as its transpose."""
        return (
            bool(self.parameters)
            and self.rule is not None
            and self.rule.kind == "view"
            and not self.has_samples
        )

    @property
    def is_activation(self) -> bool:
        """Whether the result depends on samples and has a gradient."""
        return self.trains and self.has_samples


class Mode:
    """The base class of every mode.

    The keywords of its constructor beside ``size``, the number of ranks of a tensor group, are
    those that users write into ``parallel["tensor"]``. The constructor raises :class:`ValueError`
    where the keywords do not go together, and the message says which would.

    Attributes:
        name: the name that users write; :func:`register_mode` sets it.
        within: names of axes that cut stored parameters inside the chunks that the other axes make
            of a dim. A mode needs this to gather along an axis before another axis that cuts the
            same dim.
        zigzag: names of axes along which tensors may be cut in zigzag order.
        plain: whether the meshes that are searched where no mode is named already hold all
            strategies that the mode allows.
        fixed_ranks: whether :meth:`groups` says the very ranks of the program. Otherwise the search
            may put the axes elsewhere in the rank numbering, in the same order.
    """

    name: ClassVar[str] = ""
    within: frozenset[str] = frozenset()
    zigzag: frozenset[str] = frozenset()
    plain: bool = False
    fixed_ranks: bool = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, vars(self).items())))

    def groups(self, rank: int, world_size: int, data: int, pipeline: int, tensor: int) -> Groups:
        """The ranks of ``rank``'s group along each axis, by the axis's name. Together the groups
        form a grid of ``tensor`` ranks.

        Args:
            rank: a number below ``world_size``.
            data, pipeline, tensor: the sizes that the user gave or that were inferred; their
                product is ``world_size``.
        """
        return grid(rank, {self.name: tensor})

    def allows(self, operation: Operation, split: Split) -> bool:
        """Whether an operator may be split so."""
        return True

    def prefers(self, operation: Operation, split: Split) -> bool:
        """Whether an operator should be split so. Only preferred splits are searched where the
        operator's sizes allow at least one of them.
        """
        return True

    def stores(self, stored: Mapping[str, Type], used: Mapping[str, Type]) -> bool:
        """Whether a parameter should have these stored and used types, by axis. Only such
        parameters are searched where the parameter's sizes allow at least one of them.
        """
        return True

    def alternatives(self) -> Sequence[Mode]:
        """The modes that the search chooses from where the keywords leave something open."""
        return (self,)


def grid(rank: int, sizes: Mapping[str, int]) -> Groups:
    """The groups of ``rank`` where each ``prod(sizes)`` consecutive ranks form a grid of these
    axes, the slowest axis first.
    """
    groups = dict[str, Sequence[int]]()
    stride = math.prod(sizes.values())
    for name, n in sizes.items():
        stride //= n
        first = rank - rank // stride % n * stride
        groups[name] = range(first, first + n * stride, stride)
    return groups
