"""Strategies: how a node runs on a mesh, and how a parameter is kept on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.layout import Layout, Type, format_layout


@dataclass(frozen=True)
class Strategy:
    """One way to run a node.

    Attributes:
        ins: the layout of each operand.
        out: the layout of the result.
        factors: the factor that each mesh axis splits; None for an axis that splits nothing.
        kernels: the kernel that each mesh axis needs; None for the operator itself.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[str | None, ...] = ()
    kernels: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(format_layout, self.ins))} -> {format_layout(self.out)}"


@dataclass(frozen=True)
class ParameterStrategy:
    """One way to keep a parameter: its stored layout (between steps), its used layout (in the
    graph), and whether the state that the optimizer has of it is in the memory of the host between
    steps.
    """

    stored: Layout
    used: Layout
    offloaded: bool = False

    @property
    def out(self) -> Layout:
        """The layout that readers in the graph get."""
        return self.used

    @property
    def ins(self) -> tuple[Layout, ...]:
        """A parameter has no operands."""
        return ()


Choice = Strategy | ParameterStrategy
AxisTypes = tuple[tuple[Type, ...], ...]  # [axis, tensor]


def types_by_axis(choice: Choice) -> AxisTypes:
    """For each axis, what tells choices apart along it: the types of all tensors."""
    layouts = (
        (choice.stored, choice.used)
        if isinstance(choice, ParameterStrategy)
        else (*choice.ins, choice.out)
    )
    return tuple(zip(*layouts, strict=True))


def work_share(strategy: Strategy, sizes: Sequence[int]) -> float:
    """The part of the node's work that one rank does."""
    return 1.0 / math.prod(n for f, n in zip(strategy.factors, sizes, strict=True) if f is not None)
