"""Split a lowered graph into one program for each pipeline stage, at the ``send`` nodes that
``cut_stages`` inserted.

A rank sends its local tensor to the rank at the same place of the next stage's mesh, and receives
the gradient from that rank. This is right for every layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.nodes import describe_node, gradient_sources
from autopar.runtime.kernels import graph_kernels


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that goes from a stage to the next one.

    Attributes:
        name: the name of the ``send`` node.
        shape: the local shape.
        dtype: of the tensor and of its gradient.
        differentiable: whether a gradient of the loss comes back for the tensor, if the parameters
            that require a gradient are those of the captured model.
        sources: the placeholders that may get a gradient of the loss through the tensor, by their
            places after the mesh.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    sources: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StageProgram:
    """The program of one stage on one rank.

    Attributes:
        graph: its placeholders are the mesh, ``used_placeholders`` and ``received``; its outputs
            are ``sent``, ``results`` and ``updates``.
        used_placeholders: the placeholders of the whole graph that the stage takes, by their places
            after the mesh.
        received, sent: the tensors that cross the boundaries before and after the stage, in order.
        trained: the placeholders among ``used_placeholders`` that the loss may have a gradient for.
        results, updates: the user's tensors and the new values of buffers that the stage makes, by
            their places in the whole program.
        sources: for each of ``results`` the placeholders, by their places after the mesh, that may
            get a gradient through it.
    """

    graph: fx.Graph
    used_placeholders: tuple[int, ...]
    received: tuple[BoundaryTensor, ...]
    sent: tuple[BoundaryTensor, ...]
    trained: tuple[int, ...]
    results: tuple[int, ...]
    updates: tuple[int, ...]
    sources: tuple[frozenset[int], ...] = ()


def split_stages(
    graph: fx.Graph,
    stages: int,
    results: int,
    loss: int,
    updates: Sequence[str],
    trained: Collection[str],
    may_train: Collection[str] = (),
) -> list[StageProgram]:
    """The programs of ``stages`` stages, from a lowered graph that :func:`cut_stages` marked.

    Args:
        results: how many of the first outputs are the user's tensors.
        loss: the place of the loss among them.
        updates: for each of the next outputs, which are new values of buffers, the name of the
            buffer's placeholder; "" for a buffer that nothing reads. Further outputs are left out.
        trained: names of the placeholders that require a gradient.
        may_train: names of further placeholders that may require a gradient at a later call.

    Raises:
        PlanError: a stage reads a tensor of another stage that is not sent.
    """
    return _Splitter(
        graph, stages, results, loss, updates, {*trained}, {*trained, *may_train}
    ).run()


class _Splitter:
    """Decides which stage makes each output and each update, then writes the stages' graphs."""

    def __init__(
        self,
        graph: fx.Graph,
        stages: int,
        results: int,
        loss: int,
        updates: Sequence[str],
        trained: set[str],
        may_train: set[str],
    ) -> None:
        """``may_train`` includes ``trained``."""
        self.graph, self.stages, self.buffers = graph, stages, updates
        outputs: tuple[fx.Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
        self.results, self.new_values = outputs[:results], outputs[results : results + len(updates)]
        self.sends: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.target is graph_kernels.send:
                self.sends[node.meta["stage"]].append(node)
        places = {n: i for i, n in enumerate([n for n in graph.nodes if n.op == "placeholder"][1:])}
        self.trained = {i for n, i in places.items() if n.name in trained}
        self.sources = gradient_sources(
            graph.nodes, {n: i for n, i in places.items() if n.name in may_train}
        )
        self.gradients = _nodes_with_gradient(outputs[loss], self.sources)

    def run(self) -> list[StageProgram]:
        makers = [self._maker(n) for n in self.results]
        results = [[i for i, maker in enumerate(makers) if maker == s] for s in range(self.stages)]
        needed = [
            self._needed(s, [self.results[i] for i in results[s]]) for s in range(self.stages)
        ]
        homes = [
            self._homes(value, buffer, needed)
            for value, buffer in zip(self.new_values, self.buffers, strict=True)
        ]
        updates = [[i for i, stages in enumerate(homes) if s in stages] for s in range(self.stages)]
        for s, places in enumerate(updates):
            needed[s] |= self._needed(s, [self.new_values[i] for i in places])
        return [self._stage(s, needed[s], results[s], updates[s]) for s in range(self.stages)]

    def _maker(self, node: fx.Node) -> int:
        """The stage that makes an output; the last stage if every stage could make it."""
        stage = node.meta.get("stage")
        return self.stages - 1 if stage is None else stage

    def _needed(self, stage: int, results: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes that the stage needs to make what it sends and ``results``, and to run calls
        that nothing reads: these write running statistics.
        """
        unread = [
            n
            for n in self.graph.nodes
            if n.op == "call_function" and n.meta.get("stage") == stage and not n.users
        ]
        rest: list[fx.Node] = [*self._sent(stage), *results, *unread]
        needed: set[fx.Node] = set()
        while rest:
            node = rest.pop()
            if node in needed:
                continue
            if node.meta.get("stage") not in (None, stage):
                raise PlanError(
                    f"{describe_node(node)} of stage {node.meta['stage']} is read in stage {stage} "
                    "without being sent: plan again"
                )
            needed.add(node)
            if node.target is not graph_kernels.send:
                rest += node.all_input_nodes
        return needed

    def _sent(self, stage: int) -> list[fx.Node]:
        return [n.args[0] for n in self.sends[stage + 1]]  # type: ignore[misc]

    def _homes(
        self, value: fx.Node, buffer: str, needed: Sequence[Collection[fx.Node]]
    ) -> list[int]:
        """The stages that update a buffer: the stage that computes the new value, or else all
        stages that read the buffer, or else the first stage of the same module.
        """
        if (made := value.meta.get("stage")) is not None:
            return [made]
        if readers := [s for s in range(self.stages) if any(n.name == buffer for n in needed[s])]:
            return readers
        near = [
            n.meta["stage"]
            for n in self.graph.nodes
            if n.meta.get("stage") is not None and n.meta["module"] == value.meta["module"]
        ]
        return [min(near, default=0)]

    def _stage(
        self, stage: int, needed: Collection[fx.Node], results: list[int], updates: list[int]
    ) -> StageProgram:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        mesh, *placeholders = (n for n in self.graph.nodes if n.op == "placeholder")
        used = [i for i, n in enumerate(placeholders) if n in needed]
        for node in (mesh, *(placeholders[i] for i in used), *self.sends[stage]):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = [
            *self._sent(stage),
            *(self.results[i] for i in results),
            *(self.new_values[i] for i in updates),
        ]
        graph.output(tuple(copies[n] for n in outputs))
        return StageProgram(
            graph,
            used_placeholders=tuple(used),
            received=tuple(map(self._boundary_tensor, self.sends[stage])),
            sent=tuple(map(self._boundary_tensor, self.sends[stage + 1])),
            trained=tuple(i for i in used if placeholders[i] in self.gradients),
            results=tuple(results),
            updates=tuple(updates),
            sources=tuple(self.sources.get(self.results[i], frozenset()) for i in results),
        )

    def _boundary_tensor(self, node: fx.Node) -> BoundaryTensor:
        sources = self.sources[node] if node in self.gradients else frozenset()
        shape, dtype = tuple(node.meta["local"]), node.meta["val"].dtype
        return BoundaryTensor(
            node.name, shape, dtype, not sources.isdisjoint(self.trained), sources
        )


def _nodes_with_gradient(loss: fx.Node, needing: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes among ``needing`` through which a gradient of the loss flows."""
    found: set[fx.Node] = set()
    rest = [loss]
    while rest:
        node = rest.pop()
        if node in needing and node not in found:
            found.add(node)
            rest += node.all_input_nodes
    return found
