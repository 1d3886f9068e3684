"""What problems of one graph have in common: a vertex or a tensor of one problem serves the others
in which all is equal that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.fx as fx

from autopar.rules import Rule
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.pricing.costs import NodeCosts
from autopar.search.space.strategies import Choice, ParameterStrategy

Part = TypeVar("Part")
Choices = Sequence[Choice]


class Kept(Protocol):
    """The values used last, by key."""

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``; ``make`` makes a value that is absent."""


class Parts(Protocol):
    """The parts of a problem, of which some may be the same object."""

    @property
    def graph(self) -> ProblemGraph:
        """The vertices and tensors without choices."""

    def vertex(
        self,
        node: fx.Node,
        rule: Rule | None,
        choices: Choices,
        states: tuple[int, ...],
        returned: float,
        price: Callable[[], NodeCosts],
        make: Callable[[NodeCosts], Vertex],
    ) -> Vertex:
        """As :meth:`ProblemParts.vertex`."""

    def tensor(
        self,
        producer: int,
        ports: tuple[Port, ...],
        choices: Sequence[Choices],
        of_backward: tuple[bool, bool, bool],
        make: Callable[[], TensorConversions],
    ) -> TensorConversions:
        """As :meth:`ProblemParts.tensor`."""


@dataclass(frozen=True)
class ProblemParts:
    """The parts of the problem of one mesh.

    The choices of a node are the same list in all problems in which they are equal, so a list
    stands for all that choices depend on: the axes, the constraints, for a call the samples, and
    for a parameter the storage that the options ask for.

    Attributes:
        kept: the parts of all problems of one graph on one cluster.
        graph: the vertices and tensors without choices.
        samples: of a microbatch, on which the costs of parameters do not depend.
        devices: whose seconds the costs have, and the links of the axes.
        state: what the costs of parameters depend on besides.
        conversions: what the conversions of parameters depend on besides.
    """

    kept: Kept
    graph: ProblemGraph
    samples: int
    devices: tuple[Hashable, Hashable]
    state: Hashable
    conversions: Hashable

    def vertex(
        self,
        node: fx.Node,
        rule: Rule | None,
        choices: Choices,
        states: tuple[int, ...],
        returned: float,
        price: Callable[[], NodeCosts],
        make: Callable[[NodeCosts], Vertex],
    ) -> Vertex:
        """The vertex of a node, whose result may have these states.

        Args:
            returned: how many results of earlier microbatches the model returns, with this one.
            price: the costs of the choices, which do not depend on the states.
            make: the vertex with these costs.
        """
        pace, _ = self.devices
        depends: tuple[Hashable, ...] = (self.samples, pace)
        if isinstance(choices[0], ParameterStrategy):
            depends = self.devices, self.state
        elif rule is not None and rule.composed:  # there are collectives inside its kernels
            depends = self.samples, self.devices
        return self._part(
            (node, states, returned, depends),
            [choices],
            lambda: make(self._part((node, depends), [choices], price)),
        )

    def tensor(
        self,
        producer: int,
        ports: tuple[Port, ...],
        choices: Sequence[Choices],
        of_backward: tuple[bool, bool, bool],
        make: Callable[[], TensorConversions],
    ) -> TensorConversions:
        """A tensor with its conversions.

        Args:
            choices: those of the vertices that make and read it.
            of_backward: whether results of conversions may be saved, and recomputed, and whether
                computation hides sums of gradients.
        """
        depends: tuple[Hashable, ...] = (self.samples, self.devices)
        if isinstance(choices[0][0], ParameterStrategy):
            depends = self.devices, self.conversions
        return self._part((producer, ports, of_backward, depends), choices, make)

    def _part(
        self, key: tuple[Hashable, ...], choices: Sequence[Choices], make: Callable[[], Part]
    ) -> Part:
        # The lists are kept with the part, so that their ids stay their own.
        found: tuple[Part, Any] = self.kept.of(
            (key, *map(id, choices)), lambda: (make(), list(choices))
        )
        return found[0]
