"""A backward in two parts, for zero-bubble schedules: first the gradients of inputs, for which the
stage before waits, later the gradients of parameters.

The nodes of autograd's graph that lead to the stage's inputs run first. Where an edge leaves them
towards parameters, the gradient that arrives at its node is kept. Later each such node runs again,
for its parameters only.

torch's own split (``torch.distributed.pipelining._backward``) is not used. It loses the gradients
of parameters that meet no input of the stage on their way to the output. It counts twice the
gradients of some parameters that several operators share. And it visits nodes in an order that may
differ between ranks, whose backwards communicate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

Arrived = tuple[torch.Tensor | None, ...]


class SplitBackward:
    """The backward from ``roots``, whose gradients are ``gradients``, to leaves and to ``inputs``,
    which are outputs of one node.

    :meth:`inputs` is called once, and :meth:`leaves` once after it.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[GradientEdge],
    ) -> None:
        self._inputs = list(inputs)
        (entry,) = {edge.node for edge in inputs}
        order = list(_children_first([root.node for root in roots]))
        self._path = _leading_to(order, {entry})
        starts = list(zip(roots, gradients, strict=True))
        self._first = [(root, gradient) for root, gradient in starts if root.node in self._path]
        self._rest = [(root, gradient) for root, gradient in starts if root.node not in self._path]
        self._exits = {
            node: leaves
            for node in order
            if node in self._path
            if (leaves := _leaves_of(node, self._path))
        }
        self._arrived: dict[Node, Arrived] = {}

    def inputs(self) -> list[torch.Tensor | None]:
        """The gradients of the inputs."""
        if not self._first:
            return [None] * len(self._inputs)
        handles = [node.register_prehook(self._keep(node)) for node in self._exits]
        try:
            edges, gradients = zip(*self._first, strict=True)
            return list(
                torch.autograd.grad(
                    edges, self._inputs, gradients, retain_graph=True, allow_unused=True
                )
            )
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, node: Node):  # type: ignore[no-untyped-def]  # of a private type
        arrived = self._arrived  # not self: the graph keeps the hook alive
        return lambda gradients: arrived.__setitem__(node, gradients)

    def leaves(self) -> None:
        """Accumulates the gradients of the leaves, and drops the graph."""
        running: list[Node] = []

        def hold(node: Node):  # type: ignore[no-untyped-def]
            # A gradient that comes from another node is already a part of the one that was kept.
            return lambda gradients: (
                None
                if running == [node]
                else tuple(g if g is None else torch.zeros_like(g) for g in gradients)
            )

        handles = [node.register_prehook(hold(node)) for node in self._exits]
        try:
            for node, arrived in self._arrived.items():
                running[:] = [node]
                edges = [(GradientEdge(node, i), g) for i, g in enumerate(arrived) if g is not None]
                self._run(edges, self._exits[node])
            running.clear()
            for edge, gradient in self._rest:
                self._run([(edge, gradient)], None)
        finally:
            for handle in handles:
                handle.remove()
        self._arrived, self._exits, self._rest, self._first, self._path = {}, {}, [], [], set()

    @staticmethod
    def _run(
        starts: Sequence[tuple[GradientEdge, torch.Tensor]], leaves: Sequence[torch.Tensor] | None
    ) -> None:
        if starts:
            edges, gradients = zip(*starts, strict=True)
            # The graph is retained: nodes may have to run again for other leaves.
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=leaves)


def _next(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _children_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node that ``roots`` lead to, after all nodes that it leads to; in the same order on all
    ranks that made the same graph.
    """
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root not in seen:
            seen.add(root)
            stack.append((root, iter(_next(root))))
        while stack:
            node, rest = stack[-1]
            for child in rest:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(_next(child))))
                    break
            else:
                stack.pop()
                yield node


def _leading_to(order: Sequence[Node], targets: Collection[Node]) -> set[Node]:
    """The nodes among ``order``, children first, that lead to ``targets``, and these."""
    found = set(targets)
    for node in order:
        if not found.isdisjoint(_next(node)):
            found.add(node)
    return found


def _leaves_of(node: Node, path: Collection[Node]) -> list[torch.Tensor]:
    """The leaves that ``node`` leads to by edges that leave ``path``."""
    leaves = (
        n.variable
        for n in _children_first([n for n in _next(node) if n not in path])
        if hasattr(n, "variable")
    )
    return [leaf for leaf in leaves if leaf is not None]
