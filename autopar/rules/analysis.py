"""What a captured graph says of itself: each node's rule, which tensors have gradients, and which
dims carry the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, TypeVar

import networkx as nx
import torch.fx as fx

from autopar.ir.captured import BatchDivision, CapturedModel
from autopar.ir.nodes import needing_grad, operands
from autopar.rules import Rule, rule_of

Place = tuple[fx.Node, int]
T = TypeVar("T")
ResizedNode = tuple[Any, tuple[Any, ...]]  # a node's value and arguments


class Analysis:
    """What search and lowering both need to know of a captured graph."""

    def __init__(self, captured: CapturedModel, like: Analysis | None = None) -> None:
        """``like``: that of a graph whose nodes are among these, unchanged, and need not be looked
        up again.
        """
        known = {n.name: rule for n, rule in like.rules.items()} if like is not None else {}
        kinds = {i.name: i for i in captured.inputs}
        nodes = list(captured.graph.nodes)
        self.captured, self.graph = captured, captured.graph
        self.rules: dict[fx.Node, Rule | None] = {
            n: known[n.name] if n.name in known else rule_of(n)
            for n in nodes
            if n.op == "call_function"
        }
        self.state = {
            n: kinds[n.name]
            for n in nodes
            if n.op == "placeholder" and kinds[n.name].kind in ("parameter", "buffer", "constant")
        }
        self.inputs = [n for n in nodes if n.op == "placeholder" and kinds[n.name].kind == "input"]
        self.hoisted = [
            n for n in nodes if n.op == "placeholder" and kinds[n.name].kind == "hoisted"
        ]
        self.differentiable = needing_grad(
            nodes, {n for n, i in self.state.items() if captured.state[i.target].requires_grad}
        )
        self.batch = Batch(self.graph, self.rules, self.inputs, captured.division)
        # By the sizes from and to: what search.resize has found for a batch of another size.
        self.resized: dict[
            tuple[int, int], tuple[dict[fx.Node, ResizedNode | None], dict[fx.Node, Rule | None]]
        ] = {}
        self._once: dict[tuple[Any, int], Any] = {}

    def cached(self, make: Callable[[Analysis], T]) -> T:
        """What ``make`` makes of this alone, made once for each size that the batch takes."""
        key = make, self.batch.size
        if key not in self._once:
            self._once[key] = make(self)
        return self._once[key]

    @cached_property
    def may_require_grad(self) -> frozenset[fx.Node]:
        """What is ``differentiable`` once every parameter is unfrozen and every input requires a
        gradient.
        """
        given = {n for n, state in self.state.items() if state.kind == "parameter"}.union(
            self.inputs
        )
        sources = {
            n
            for n in given
            if n.meta["val"].dtype.is_floating_point or n.meta["val"].dtype.is_complex
        }
        return frozenset(needing_grad(self.graph.nodes, sources)) | self.differentiable

    @property
    def duplicated(self) -> frozenset[fx.Node]:
        """Calls without a gradient that need nothing but inputs, buffers and cheap operators
        (masks, positions, RoPE tables): what each part of a graph that is cut makes for itself
        rather than be sent it."""
        return self._shared[0]

    @property
    def changing(self) -> dict[fx.Node, fx.Node]:
        """The buffers that the forward changes, each with the call that makes or writes its new
        value; but for those (a counter) whose new values are ``duplicated``."""
        return self._shared[1]

    @cached_property
    def _shared(self) -> tuple[frozenset[fx.Node], dict[fx.Node, fx.Node]]:
        written = {
            buffer: writer
            for buffer, writer in self._written().items()
            if writer.op == "call_function"
        }
        changing: dict[fx.Node, fx.Node] = {}
        while True:
            duplicated = self._beside(changing)
            found = {
                buffer: writer for buffer, writer in written.items() if writer not in duplicated
            }
            if len(found) == len(changing):
                return duplicated, changing
            changing = found

    def _beside(self, changing: Collection[fx.Node]) -> frozenset[fx.Node]:
        """What would be shared if no one else had these buffers."""
        found: set[fx.Node] = set()
        for node, rule in self.rules.items():
            cheap = rule is not None and not rule.flops and not rule.writes
            given = (
                n in found or (n not in changing and self._is_given(n))
                for n in node.all_input_nodes
            )
            if cheap and node not in self.differentiable and all(given):
                found.add(node)
        return frozenset(found)

    def _is_given(self, node: fx.Node) -> bool:
        """Whether every rank has a tensor without asking: it is an input, a buffer or a
        constant.
        """
        return node.op == "placeholder" and (
            node not in self.state or self.state[node].kind != "parameter"
        )

    def _written(self) -> dict[fx.Node, fx.Node]:
        """The buffers that the forward changes, and what makes or writes the new value."""
        buffers = {state.target: node for node, state in self.state.items()}
        updates = self.captured.updates
        new_values = zip(updates, self.outputs[len(self.outputs) - len(updates) :], strict=True)
        written = {buffers[name]: value for name, value in new_values if name in buffers}
        for node, rule in self.rules.items():
            for k in rule.writes if rule is not None else ():
                written[operands(node)[k][0]] = node
        return written

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes returned: the user's outputs, then buffer updates."""
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]

    @property
    def loss(self) -> fx.Node:
        return self.outputs[self.captured.loss]


class Batch:
    """The batch's dims and factors in a graph.

    ``size`` is the number of samples. A dim is the batch's when rules connect it with dim 0 of an
    input of that size; in the graph of a microbatch, when its type along time says that it is cut.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rules: Mapping[fx.Node, Rule | None],
        inputs: list[fx.Node],
        division: BatchDivision | None = None,
    ) -> None:
        links: nx.utils.UnionFind = nx.utils.UnionFind()
        self._places: dict[fx.Node, dict[str, Place]] = {}
        for node in graph.nodes:
            rule = rules.get(node)
            if rule is None:
                continue
            places = self._places[node] = {}
            tensors = [n for n, _ in operands(node)]
            for tensor, dims in zip([*tensors, node], [*rule.operands, rule.output], strict=True):
                for d, factors in enumerate(dims):
                    if factors:
                        place = (tensor, d)
                        first = places.setdefault(factors[0], place)
                        if first is place:
                            links[place]  # known from now on
                        else:
                            links.union(first, place)
        if division is not None:
            cut = (
                (n, n.meta["time"]) for n in inputs
            )  # as they are now: a resized graph may be copied
            self.size = next(
                (n.meta["val"].shape[t.dim] for n, t in cut if t.is_shard), division.samples
            )
            self._is_batch = {
                (n, n.meta["time"].dim)
                for n in graph.nodes
                if n.op != "output" and n.meta["time"].is_shard
            }
            return
        heads = [(n, n.meta["val"].shape[0]) for n in inputs if len(n.meta["val"].shape)]
        self.size = int(Counter(size for _, size in heads).most_common(1)[0][0]) if heads else 1
        roots = {links[(n, 0)] for n, size in heads if size == self.size}
        self._is_batch = {place for place in list(links.parents) if links[place] in roots}

    def is_batch_dim(self, node: fx.Node, dim: int) -> bool:
        """Whether ``dim`` of ``node``'s output carries the batch, alone or with others."""
        return (node, dim) in self._is_batch

    def dim(self, node: fx.Node) -> int | None:
        """The dim of ``node``'s output that carries the batch, or None."""
        dims = range(len(node.meta["val"].shape)) if hasattr(node.meta.get("val"), "shape") else ()
        return next((d for d in dims if self.is_batch_dim(node, d)), None)

    def factors(self, node: fx.Node) -> frozenset[str]:
        """The factors of ``node``'s rule that are the batch."""
        return frozenset(
            f for f, place in self._places.get(node, {}).items() if place in self._is_batch
        )
