"""Types along time: what each microbatch has of every tensor of the whole batch's graph.

R: all of it. S(d): its chunk of dim ``d``; S(d)/p: its chunk of each of ``p`` equal parts of it. P:
a value that adds up to it. The types follow from the operators' rules, on the whole batch's shapes,
and are proofs: whatever is typed is exact. Where a reader wants another type than a tensor has by
nature, it gets another version of it. What depends on the batch alone, and on nothing that is
trained, drawn or
changed, may be computed before the first microbatch ("hoisted"): it is then there whole, and can be
    cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from autopar.ir.layout import I, P, R, S, Type, strided
from autopar.ir.nodes import arguments, operands
from autopar.rules import Dim, Option, Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels import graph_kernels

aten = torch.ops.aten

TypedNode = tuple[fx.Node, Type]

HOIST, AGAIN, SHARE = (
    100,
    1,
    1,
)  # what a version costs, in no unit: as little as possible is hoisted
NEVER = 1 << 30
_DEEPEST = 100  # calls that a version is made of anew
# Kernels that do in time what they do in space, or nothing: others send to ranks of an axis.
_KERNELS = (None, "attention", "drawn", "dropout", "mean")
NUMBER = "number"  # the operator itself, with a share of its number
_STATISTICS = "batch_norm"  # of a part they are others
_SUMS = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
)  # with a number, of which a pending sum takes a share


class NotTypedError(Exception):
    """A node that has no type along time."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node


@dataclass(frozen=True)
class Derivation:
    """How a version is made: by a rule's option, with a ``number`` to share out, or otherwise than
    by computing it (``option`` is None): ``how`` is "given" (a placeholder), "hoisted" or
    "share"."""

    how: str
    option: Option | None = None
    max_chunks: int = 0  # into so many chunks the split may go; 0: any


class TimeTypes:
    """The types of a graph, for given inputs that are cut.

    Args:
        cut: the inputs of which a microbatch has a chunk, each with its type.
        shares: of how many equal parts of the batch a microbatch has chunks.

    Attributes:
        natural: each node's type.
        ways: how each version is made, of those that were asked for.
        approximate: nodes that are taken of each microbatch although that is not exact.
        gathered: nodes that are hoisted because their operands' types are of no use.

    Raises:
        NotTypedError: an operator mixes samples.
    """

    def __init__(self, analysis: Analysis, cut: Mapping[fx.Node, Type], parts: int = 1) -> None:
        self.analysis, self.parts = analysis, parts
        self.inferred: dict[fx.Node, Type] = {}
        self.ways: dict[TypedNode, Derivation] = {}
        self.inexact_operators: list[fx.Node] = []
        self.gathered: list[fx.Node] = []
        self._costs: dict[TypedNode, int] = {}
        self._depth = 0
        self._given = _given(analysis)
        for node in analysis.graph.nodes:
            if node.op == "placeholder":
                self._settle(node, cut.get(node, R), Derivation("given"))
            elif node.op == "call_function":
                self._type(node)

    def _settle(self, node: fx.Node, found: Type, way: Derivation) -> None:
        self.inferred[node] = found
        self._costs[node, found], self.ways[node, found] = 0, way

    def _type(self, node: fx.Node) -> None:
        found = [self.inferred[t] for t, _ in operands(node)]
        if all(t is R for t in found):
            self._settle(node, R, Derivation("computed", Option((R,) * len(found), R)))
            if (rule := self.analysis.rules.get(node)) is not None and rule.writes:
                self.inexact_operators.append(node)  # each microbatch writes
            return
        best, _ = self._best(node, None)
        if best is None and node in self._given:
            self._settle(node, R, Derivation("hoisted"))
            self.gathered.append(node)
            return
        if best is None or best.option is None:
            raise NotTypedError(node)
        if best.option.kernel == _STATISTICS:
            self.inexact_operators.append(node)
        self._settle(node, best.option.out, best)

    def _best(self, node: fx.Node, wanted: Type | None) -> tuple[Derivation | None, int]:
        """The cheapest way to compute a node with a result of the type wanted (None: of any)."""
        tensors = [t for t, _ in operands(node)]
        best, least = None, NEVER
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
        """What a version costs; ``NEVER`` where there is none."""
        key = node, wanted
        if key not in self._costs:
            if self._depth > _DEEPEST:
                return NEVER
            self._depth += 1
            way, cost = self._way(node, wanted)
            self._depth -= 1
            self._costs[key] = NEVER
            if way is not None and cost < NEVER:
                self._costs[key], self.ways[key] = cost, way
        return self._costs[key]

    def _way(self, node: fx.Node, wanted: Type) -> tuple[Derivation | None, int]:
        inferred, value = self.inferred[node], node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None, NEVER
        if wanted is P:
            shared = inferred is R and (value.is_floating_point() or value.is_complex())
            return (Derivation("share"), SHARE) if shared else (None, NEVER)
        again: tuple[Derivation | None, int] = (None, NEVER)
        if wanted.is_shard and node.op == "call_function":
            way, cost = self._best(node, wanted)
            again = way, cost + AGAIN
        if again[1] >= HOIST and node in self._given:
            return Derivation("hoisted"), HOIST
        return again

    def options(self, node: fx.Node, wanted: Type | None = None) -> Iterator[tuple[Option, int]]:
        """The ways to compute a node for a microbatch that its operands' types, or the one wanted,
        suggest; each with the number of chunks into which its split may go."""
        rule = self.analysis.rules.get(node)
        if rule is None:
            return
        yield from ((option, 0) for option in rule.unsplit() if option.out is not I)
        yield from _with_number(node)
        yield from _side_by_side(node, [self.inferred[t] for t, _ in operands(node)])
        types = [*(self.inferred[t] for t, _ in operands(node)), wanted or R]
        splits = {
            s: None
            for t, dims in zip(types, (*rule.operands, rule.output), strict=True)
            for s in _splits(rule, t, dims)
        }
        for factor, parts in splits:
            for option in rule.split(factor):
                if option.kernel in _KERNELS or option.kernel == _STATISTICS:
                    yield _in_parts(rule, option, factor, parts), rule.sizes[factor] // parts

    @property
    def cut_flops(self) -> float:
        """The arithmetic that microbatches share."""
        rules = self.analysis.rules
        return sum(
            1.0 + rule.flops
            for n, t in self.inferred.items()
            if t is not R and (rule := rules.get(n)) is not None
        )


def _splits(rule: Rule, t: Type, dims: Sequence[Dim]) -> Iterator[tuple[str, int]]:
    """The factors that may be split for a tensor to have type ``t``, and in how many equal parts
    each.
    """
    for place, factor in enumerate(dims[t.dim] if t.is_shard else ()):
        parts, rest = divmod(t.pieces, math.prod(rule.sizes[f] for f in dims[t.dim][:place]))
        if parts and not rest and rule.sizes[factor] % parts == 0 and rule.sizes[factor] > parts:
            yield factor, parts


def _in_parts(rule: Rule, option: Option, factor: str, parts: int) -> Option:
    """An option that splits a factor, with each of ``parts`` equal parts of the factor split: of a
    dim in which other factors are before it each of their parts is."""

    def turned(t: Type, dims: Sequence[Dim]) -> Type:
        if not t.is_shard:
            return t
        majors = dims[t.dim][: dims[t.dim].index(factor)]
        pieces = parts * math.prod(rule.sizes[f] for f in majors)
        return strided(t.dim, pieces) if pieces > 1 else S(t.dim)

    ins = tuple(turned(t, dims) for t, dims in zip(option.ins, rule.operands, strict=True))
    return replace(option, ins=ins, out=turned(option.out, rule.output))


def _with_number(node: fx.Node) -> Iterator[tuple[Option, int]]:
    """A number joins a pending sum with a share of itself."""
    if node.target in _SUMS and len(operands(node)) == 1 and node.meta["val"].is_floating_point():
        other = node.args[1] if isinstance(node.args[0], fx.Node) else None
        if isinstance(other, (int, float)):
            yield Option((P,), P, kernel=NUMBER), 0


def _side_by_side(node: fx.Node, found: Sequence[Type]) -> Iterator[tuple[Option, int]]:
    """Tensors of one shape put side by side along the dim that is cut: each is a part of the
    result, cut by itself.
    """
    if (
        node.target is not aten.cat.default
        or len({tuple(n.meta["val"].shape) for n, _ in operands(node)}) > 1
    ):
        return
    dim, size = arguments(node)["dim"], operands(node)[0][0].meta["val"].shape
    for t in {t: None for t in found if t.is_shard and t.dim == dim}:
        yield Option((t,) * len(found), strided(dim, t.pieces * len(found))), size[dim] // t.pieces


def _given(analysis: Analysis) -> set[fx.Node]:
    """What may be hoisted: what depends on inputs, on buffers that the forward does not change and
    on constants alone, and is not drawn.
    """
    names = set(analysis.captured.updates)
    written = {
        operands(n)[k][0]
        for n, rule in analysis.rules.items()
        if rule is not None
        for k in rule.writes
    }
    found: set[fx.Node] = set()
    for node in analysis.graph.nodes:
        if node.op == "placeholder":
            state = analysis.state.get(node)
            fixed = state is None or (state.kind != "parameter" and state.target not in names)
            if fixed and node not in written and not node.meta["val"].requires_grad:
                found.add(node)
        elif node.op == "call_function":
            reads = node.all_input_nodes
            if (
                node.target is graph_kernels.target_count
            ):  # its class weights have no gradient, be they a parameter
                reads = reads[:1]
            rule = analysis.rules.get(node)
            if (
                all(n in found for n in reads)
                and not is_random(node)
                and not (rule is not None and rule.writes)
            ):
                found.add(node)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    if node.target is aten.dropout.default:
        return bool(node.args[2])
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(arguments(node)["dropout_p"])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
