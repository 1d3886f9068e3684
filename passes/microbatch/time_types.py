"""Types along time: which part of each tensor of the whole batch's graph a microbatch has.

====== =============================================================
type   what a microbatch has
====== =============================================================
R      the whole tensor, the same in every microbatch
S(d)   a chunk of dim ``d``
S(d)/p a chunk of each of ``p`` equal parts of dim ``d``
P      a tensor that adds up to the whole one over the microbatches
====== =============================================================

The types follow from the rules of the operators, on the shapes of the whole batch. They are proofs:
a graph with types along time computes exactly what the graph of the whole batch computes.

A node has one inferred type. Where a reader wants another type, the node is derived again with that
type, as another node of the microbatch's graph. A node that depends on the batch alone, and on
nothing that is trained, random or updated, may be *hoisted*: computed once, from the whole batch,
before the first microbatch. Microbatches then take the whole tensor or a chunk of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.ir.layout import P, R, Type
from autopar.ir.nodes import arguments, operands
from autopar.passes.microbatch.time_options import STATISTICS, depends_on_arguments, time_options
from autopar.rules import Option
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels import graph_kernels

aten = torch.ops.aten

TypedNode = tuple[fx.Node, Type]
"""A node of the whole batch's graph, with a type along time."""

# The costs of derivations, without unit. Hoisting costs most, so that as little as possible is
# hoisted.
HOIST_COST, RECOMPUTE_COST, DIVIDE_COST = 100, 1, 1
IMPOSSIBLE = 1 << 30
_MAX_DEPTH = 100  # the longest chain of calls that is computed again for one reader


class NotTypedError(Exception):
    """A node has no type along time: its operator mixes samples, or needs the gradients of all of
    them together.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node


@dataclass(frozen=True)
class Derivation:
    """How a microbatch gets a typed node.

    Attributes:
        kind: "given" (a placeholder), "computed" (a call, by ``option``), "hoisted" (computed once
            for all microbatches), or "divided" (a tensor of type R, divided by the number of
            microbatches, as P).
        option: the option of the operator's rule for a computed node.
        max_chunks: the largest number of chunks of the split dim that keeps combined samples
            together; 0 for any number.
    """

    kind: str
    option: Option | None = None
    max_chunks: int = 0


def needs_whole_gradient(analysis: Analysis, node: fx.Node) -> bool:
    """Whether a call that each microbatch repeats may have another gradient from the sum of the
    microbatches' gradients than from one after the other.
    """
    return node in analysis.may_require_grad and analysis.rule_or_whole(node).complete_gradient


class TimeTypes:
    """The types of a graph, for given inputs that are cut.

    Args:
        cut: the inputs of which a microbatch has a chunk, each with its type.
        parts: the number of equal parts into which the model takes the batch apart.

    Attributes:
        inferred: the type of each node.
        derivations: how each typed node that was asked for is derived.
        inexact_operators: the nodes that compute statistics of a microbatch in place of statistics
            of the whole batch.
        forced_hoists: the nodes that are hoisted because their rule has no option for the types of
            their operands.

    Raises:
        NotTypedError: an operator mixes samples.
    """

    def __init__(self, analysis: Analysis, cut: Mapping[fx.Node, Type], parts: int = 1) -> None:
        self.analysis, self.parts = analysis, parts
        self.inferred: dict[fx.Node, Type] = {}
        self.derivations: dict[TypedNode, Derivation] = {}
        self.inexact_operators: list[fx.Node] = []
        self.forced_hoists: list[fx.Node] = []
        self._costs: dict[TypedNode, int] = {}
        self._options_of: dict[tuple[int, tuple[Type, ...]], tuple[tuple[Option, int], ...]] = {}
        self._depth = 0
        self._hoistable = _hoistable(analysis)
        for node in analysis.graph.nodes:
            if node.op == "placeholder":
                self._settle(node, cut.get(node, R), Derivation("given"))
            elif node.op == "call_function":
                self._infer(node)

    def _settle(self, node: fx.Node, found: Type, derivation: Derivation) -> None:
        """Record the inferred type of a node."""
        self.inferred[node] = found
        self._costs[node, found], self.derivations[node, found] = 0, derivation

    def _infer(self, node: fx.Node) -> None:
        found = [self.inferred[t] for t, _ in operands(node)]
        if all(t is R for t in found):
            if needs_whole_gradient(self.analysis, node):
                raise NotTypedError(node)
            self._settle(node, R, Derivation("computed", Option((R,) * len(found), R)))
            if (rule := self.analysis.rules.get(node)) is not None and rule.writes:
                self.inexact_operators.append(node)  # each microbatch updates a buffer
            return
        best, _ = self._cheapest(node, None)
        if best is None and node in self._hoistable:
            self._settle(node, R, Derivation("hoisted"))
            self.forced_hoists.append(node)
            return
        if best is None or best.option is None:
            raise NotTypedError(node)
        if best.option.kernel == STATISTICS:
            self.inexact_operators.append(node)
        self._settle(node, best.option.out, best)

    def _cheapest(self, node: fx.Node, wanted: Type | None) -> tuple[Derivation | None, int]:
        """The cheapest way to compute a node with the type ``wanted`` (None: any type), and its
        cost.
        """
        tensors = [t for t, _ in operands(node)]
        best, least = None, IMPOSSIBLE
        for option, max_chunks in self.options(node, wanted):
            if wanted is not None and option.out is not wanted:
                continue
            cost = 0
            for tensor, t in zip(tensors, option.ins, strict=True):
                cost += self.cost(tensor, t)
                if cost >= least:
                    break
            if cost < least:
                best, least = Derivation("computed", option, max_chunks), cost
        return best, least

    def cost(self, node: fx.Node, wanted: Type) -> int:
        """The cost of deriving a node with the type ``wanted``; ``IMPOSSIBLE`` if it cannot be
        derived.
        """
        key = node, wanted
        if key not in self._costs:
            if self._depth > _MAX_DEPTH:
                return IMPOSSIBLE
            self._depth += 1
            derivation, cost = self._derive(node, wanted)
            self._depth -= 1
            self._costs[key] = IMPOSSIBLE
            if derivation is not None and cost < IMPOSSIBLE:
                self._costs[key], self.derivations[key] = cost, derivation
        return self._costs[key]

    def _derive(self, node: fx.Node, wanted: Type) -> tuple[Derivation | None, int]:
        """The cheapest derivation of a node with a type other than the inferred one."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None, IMPOSSIBLE
        if wanted is P:
            is_number = value.is_floating_point() or value.is_complex()
            divides = self.inferred[node] is R and is_number
            return (Derivation("divided"), DIVIDE_COST) if divides else (None, IMPOSSIBLE)
        derivation, cost = None, IMPOSSIBLE
        if wanted.is_shard and node.op == "call_function":
            derivation, cost = self._cheapest(node, wanted)
            cost += RECOMPUTE_COST
        if cost >= HOIST_COST and node in self._hoistable:
            return Derivation("hoisted"), HOIST_COST
        return derivation, cost

    def options(self, node: fx.Node, wanted: Type | None = None) -> Sequence[tuple[Option, int]]:
        """The options to compute a node for a microbatch, given the inferred types of its operands
        and the type ``wanted``; each with the largest number of chunks of its split dim (0: any).
        """
        rule = self.analysis.rules.get(node)
        if rule is None:
            return ()
        types = (*(self.inferred[t] for t, _ in operands(node)), wanted or R)
        if depends_on_arguments(node):
            return tuple(time_options(node, rule, types))
        # Equal calls share a rule.
        if (key := (id(rule), types)) not in self._options_of:
            self._options_of[key] = tuple(time_options(node, rule, types))
        return self._options_of[key]

    @property
    def split_flops(self) -> float:
        """The arithmetic that is split over microbatches, in floating-point operations. Each call
        counts one more, so that calls without arithmetic count, too.
        """
        rules = self.analysis.rules
        return sum(
            1.0 + rule.flops
            for n, t in self.inferred.items()
            if t is not R and (rule := rules.get(n)) is not None
        )


def _hoistable(analysis: Analysis) -> set[fx.Node]:
    """The nodes that may be hoisted: they depend on inputs, constants, and buffers that the forward
    does not change, and they are not random.
    """
    updated = set(analysis.captured.updates)
    rules = {n: rule for n, rule in analysis.rules.items() if rule is not None}
    written = {operands(n)[k][0] for n, rule in rules.items() for k in rule.writes}
    found: set[fx.Node] = set()
    for node in analysis.graph.nodes:
        if node.op == "placeholder":
            state = analysis.state.get(node)
            fixed = state is None or (state.kind != "parameter" and state.target not in updated)
            if fixed and node not in written and not node.meta["val"].requires_grad:
                found.add(node)
        elif node.op == "call_function":
            reads = node.all_input_nodes
            if node.target is graph_kernels.target_count:
                # No gradient flows to the class weights, even if they are a parameter.
                reads = reads[:1]
            writes = node in rules and rules[node].writes
            if all(n in found for n in reads) and not is_random(node) and not writes:
                found.add(node)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    if node.target is aten.dropout.default:
        return bool(node.args[2])
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(arguments(node)["dropout_p"])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
