"""The analysis of a captured graph: the rule of each node, the tensors that have gradients, and the
dims that carry the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.fx as fx

from autopar.capture.function_operator import FunctionOperator
from autopar.ir.captured import BatchDivision, CapturedModel
from autopar.ir.links import Links
from autopar.ir.nodes import needing_grad, operands
from autopar.rules import Rule, rules_of, whole_rule

TensorDim = tuple[fx.Node, int]  # a dim of a node's result
T = TypeVar("T")
ResizedNode = tuple[Any, tuple[Any, ...]]  # the value and the arguments of a node


class Analysis:
    """What search and lowering both need to know of a captured graph.

    Attributes:
        captured, graph: the captured model and its graph.
        rules: the rule of each call; None for a call without one.
        state: the placeholders of parameters, buffers and constants.
        inputs: the placeholders of the user's inputs.
        hoisted: the placeholders of values that are computed once a step.
        differentiable: the nodes through which a gradient flows back to a parameter that requires
            one.
        batch: the dims and factors that carry the batch.
        resized: for two batch sizes, from and to, the nodes and rules that resizing the graph
            changes; filled by the search.
    """

    def __init__(self, captured: CapturedModel, like: Analysis | None = None) -> None:
        """``like`` is the analysis of a graph that has the same nodes under the same names. Its
        rules are taken over.
        """
        kinds = {i.name: i for i in captured.inputs}
        nodes = list(captured.graph.nodes)
        self.captured, self.graph = captured, captured.graph
        known = {n.name: rule for n, rule in like.rules.items()} if like is not None else {}
        made = rules_of(n for n in nodes if n.name not in known)
        self.rules: dict[fx.Node, Rule | None] = {
            n: made[n] if n in made else known[n.name] for n in nodes if n.op == "call_function"
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
        self.resized: dict[
            tuple[int, int], tuple[dict[fx.Node, ResizedNode | None], dict[fx.Node, Rule | None]]
        ] = {}
        self._cache: dict[tuple[Any, int], Any] = {}

    def rule_or_whole(self, node: fx.Node) -> Rule:
        """The rule of a call. A call without one stays whole; the backward of a
        ``torch.autograd.Function`` is not known to be linear then.
        """
        rule, is_function = self.rules.get(node), isinstance(node.target, FunctionOperator)
        return whole_rule(len(operands(node)), is_function) if rule is None else rule

    def cached(self, make: Callable[[Analysis], T]) -> T:
        """``make(self)``, computed once for each batch size."""
        key = make, self.batch.size
        if key not in self._cache:
            self._cache[key] = make(self)
        return self._cache[key]

    @cached_property
    def may_require_grad(self) -> frozenset[fx.Node]:
        """The nodes that are differentiable if every parameter and every input requires a
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
        """The calls that each stage of a cut graph computes for itself instead of receiving their
        results: calls without a gradient that depend on inputs, buffers and cheap operators alone,
        such as masks, positions and RoPE tables.
        """
        return self._duplicated[0]

    @property
    def changing(self) -> dict[fx.Node, fx.Node]:
        """The buffers that the forward changes, each with the call that makes or writes its new
        value. Buffers whose new value is duplicated, such as a step counter, are left out.
        """
        return self._duplicated[1]

    @cached_property
    def _duplicated(self) -> tuple[frozenset[fx.Node], dict[fx.Node, fx.Node]]:
        written = {
            buffer: writer
            for buffer, writer in self._written().items()
            if writer.op == "call_function"
        }
        changing: dict[fx.Node, fx.Node] = {}
        while True:
            duplicated = self._duplicated_without(changing)
            found = {
                buffer: writer for buffer, writer in written.items() if writer not in duplicated
            }
            if len(found) == len(changing):
                return duplicated, changing
            changing = found

    def _duplicated_without(self, changing: Collection[fx.Node]) -> frozenset[fx.Node]:
        """The duplicated calls, if calls that read the buffers ``changing`` are not duplicated."""
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
        """Whether every rank has a tensor from the start: an input, a buffer or a constant."""
        return node.op == "placeholder" and (
            node not in self.state or self.state[node].kind != "parameter"
        )

    def _written(self) -> dict[fx.Node, fx.Node]:
        """The buffers that the forward changes, each with the node that makes or writes its new
        value.
        """
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
        """The nodes that the graph returns: the user's outputs, then the new values of buffers."""
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]

    @property
    def returned(self) -> list[fx.Node]:
        """The results of calls that the model returns besides its loss, each once."""
        own = dict.fromkeys(self.outputs[: self.captured.out_spec.num_leaves])
        calls = [n for n in own if isinstance(n, fx.Node) and n.op == "call_function"]
        return [n for n in calls if n is not self.loss]

    @property
    def loss(self) -> fx.Node:
        return self.outputs[self.captured.loss]


class Batch:
    """The dims and factors of a graph that carry the batch.

    A dim carries the batch if rules connect it with dim 0 of an input of the batch's size. In the
    graph of a microbatch, a dim carries the batch if the type along time cuts it.

    Attributes:
        size: the number of samples.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rules: Mapping[fx.Node, Rule | None],
        inputs: list[fx.Node],
        division: BatchDivision | None = None,
    ) -> None:
        self._rules = rules  # those of the size that the graph has now
        self.size, self._batch_dims = self._found(graph, inputs, division)
        self._first_dim: dict[fx.Node, int] = {}
        for node, d in self._batch_dims:
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._first_dim[node] = min(d, self._first_dim.get(node, d))

    def _found(
        self, graph: fx.Graph, inputs: list[fx.Node], division: BatchDivision | None
    ) -> tuple[int, set[TensorDim]]:
        """The number of samples, and the dims that carry them."""
        if division is not None:
            # The size is read off an input, because the graph may be resized.
            cut = ((n, n.meta["time"]) for n in inputs)
            size = next(
                (n.meta["val"].shape[t.dim] for n, t in cut if t.is_shard), division.samples
            )
            return size, {
                (n, n.meta["time"].dim)
                for n in graph.nodes
                if n.op != "output" and n.meta["time"].is_shard
            }
        links = Links[TensorDim]()
        for node in graph.nodes:
            if (rule := self._rules.get(node)) is not None:
                _link_dims(links, node, rule)
        heads = [(n, n.meta["val"].shape[0]) for n in inputs if len(n.meta["val"].shape)]
        samples = int(Counter(size for _, size in heads).most_common(1)[0][0]) if heads else 1
        return samples, links.reached((n, 0) for n, size in heads if size == samples)

    def is_batch_dim(self, node: fx.Node, dim: int) -> bool:
        """Whether ``dim`` of ``node``'s result carries the batch, alone or with other factors."""
        return (node, dim) in self._batch_dims

    def dim(self, node: fx.Node) -> int | None:
        """The dim of ``node``'s result that carries the batch, or None."""
        return self._first_dim.get(node)

    def has_samples(self, node: fx.Node) -> bool:
        """Whether an operand or the result of a call has a dim that carries the batch."""
        if self.size > 1 or self._rules.get(node) is None:
            return bool(self.factors(node))
        tensors = [*(n for n, _ in operands(node)), node]
        return any(self.dim(tensor) is not None for tensor in tensors)

    def factors(self, node: fx.Node) -> frozenset[str]:
        """The factors of ``node``'s rule that carry the batch; none where it is one sample.

        A dim of one sample has no factor, so that a dim of samples x tokens begins with the tokens.
        """
        if self.size == 1 or (rule := self._rules.get(node)) is None:
            return frozenset()
        return frozenset(
            f for f, dims in _factor_dims(node, rule) if not self._batch_dims.isdisjoint(dims)
        )


def _link_dims(links: Links[TensorDim], node: fx.Node, rule: Rule) -> None:
    """Link the dims of operands and result that begin with the same factor."""
    for _, linked in _factor_dims(node, rule):
        links.link(linked)


def _factor_dims(node: fx.Node, rule: Rule) -> Iterator[tuple[str, list[TensorDim]]]:
    """The factors with which dims of operands and result begin, each with these dims."""
    return rule.dims_by_factor([*(n for n, _ in operands(node)), node])
