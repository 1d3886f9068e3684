"""The types along a mesh axis that operands and results of a ``torch.autograd.Function`` may have,
from the operators of its forward and its backward.

Types along an axis are possible where each operator takes the types that follow from them without a
conversion, and where the gradients have the dual types. Chunks must be computed by the same
operators with the same numbers as the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from autopar.capture.function_graph import FunctionGraph, is_switch, trace_function
from autopar.ir.layout import I, P, R, S, Type
from autopar.ir.links import Links
from autopar.ir.nodes import arguments, operands, result_tensors
from autopar.passes.canonical.decompose import decompose
from autopar.passes.canonical.functionalise import functionalise
from autopar.passes.canonical.normal_form import write_normal_form
from autopar.passes.canonical.simplify import REWRITTEN, simplify
from autopar.passes.canonical.split_to_slices import SPLITS, split_to_slices
from autopar.rules.registry import rule_of
from autopar.rules.rule import Option

Place = tuple[fx.Node, int]  # a dim of a node's result
Shapes = Sequence[Sequence[int]]
# The type of a gradient where it is not that of its tensor. R is all that is the same on all ranks.
_DUAL = {R: P, P: R}


@dataclass(frozen=True)
class Cut:
    """Dims that may be split alike, all of one size.

    Attributes:
        operands, results: for each operand and each result the dim; None for those that lack it.
        size: of the dims.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    size: int


class FunctionTypes:
    """The types of one call of a Function.

    Args:
        call: the node.

    Raises:
        Exception: what the Function raises without data.
    """

    def __init__(self, call: fx.Node) -> None:
        self._call = call
        self._found = _canonical(call, operand_shapes(call), result_shapes(call))
        self._rules = {n: rule_of(n) for n in self._found.graph.nodes if n.op == "call_function"}

    @property
    def flops(self) -> float:
        """Of the forward and the backward."""
        return sum(rule.flops for rule in self._rules.values() if rule is not None)

    @property
    def is_backward_linear(self) -> bool:
        """Whether the backward is linear in the gradients of the results."""
        found = self._found
        return self._types([R] * len(found.operands), [R] * len(found.results)) is not None

    @property
    def linear_operands(self) -> frozenset[int]:
        """The operands in which the forward is linear while the others are held."""
        count, results = len(self._found.operands), [P] * len(self._found.results)
        each = ([P if k == own else R for k in range(count)] for own in range(count))
        return frozenset(k for k, ins in enumerate(each) if self._types(ins, results) is not None)

    def cuts(self) -> list[Cut]:
        """The dims that ranks may have chunks of."""
        return [cut for cut in self._linked_dims() if self._can_split(cut)]

    def _linked_dims(self) -> Iterator[Cut]:
        """The groups of dims of operands and results that operators link."""
        found, links = self._found, Links[Place]()
        for node, rule in self._rules.items():
            if rule is not None:
                tensors = [*(n for n, _ in operands(node)), node]
                for _, places in rule.dims_by_factor(tensors):
                    links.link(places)
        pairs = [
            *zip(found.gradients, found.results, strict=True),
            *zip(found.operand_gradients, found.operands, strict=True),
        ]
        for gradient, tensor in pairs:
            if gradient is not None:
                for d in range(_val(tensor).dim()):
                    links.link([(tensor, d), (gradient, d)])
        met = set[Place]()
        for tensor in (*found.operands, *found.results):
            for place in ((tensor, d) for d in range(_val(tensor).dim())):
                if place not in met:
                    met |= (group := links.reached([place]))
                    if (cut := self._cut(group)) is not None:
                        yield cut

    def _cut(self, group: set[Place]) -> Cut | None:
        """A group of dims as a cut; None where a tensor has two of them, or sizes differ."""
        tensors = (*self._found.operands, *self._found.results)
        dims = [[d for d in range(_val(t).dim()) if (t, d) in group] for t in tensors]
        sizes = {int(_val(t).shape[ds[0]]) for t, ds in zip(tensors, dims, strict=True) if ds}
        if len(sizes) != 1 or sizes == {1} or any(len(ds) > 1 for ds in dims):
            return None
        each = [ds[0] if ds else None for ds in dims]
        count = len(self._found.operands)
        return Cut(tuple(each[:count]), tuple(each[count:]), sizes.pop())

    def _can_split(self, cut: Cut) -> bool:
        """Whether ranks may compute the Function on chunks of their own: of the results too, or
        else of sums.
        """
        ins = [R if d is None else S(d) for d in cut.operands]
        types = self._types(ins, [P if d is None else S(d) for d in cut.results])
        return types is not None and all(
            self._is_alike(cut, types, size) for size in _other_sizes(cut.size)
        )

    def _types(self, ins: Sequence[Type], results: Sequence[Type]) -> Mapping[fx.Node, Type] | None:
        """The type of each node where operands and results have these types; None where they cannot
        have them.
        """
        found = self._found
        given = dict(zip(found.operands, ins, strict=True))
        for gradient, t in zip(found.gradients, results, strict=True):
            if gradient is not None:
                given[gradient] = _DUAL.get(t, t)
        types = self._propagated(given)
        if types is None or [types[n] for n in found.results] != list(results):
            return None
        pairs = zip(found.operand_gradients, ins, strict=True)
        is_dual = all(types[n] == _DUAL.get(t, t) for n, t in pairs if n is not None)
        return types if is_dual else None

    def _propagated(self, given: Mapping[fx.Node, Type]) -> dict[fx.Node, Type] | None:
        """The types that follow from those of the placeholders; None where an operator would need a
        conversion.
        """
        types: dict[fx.Node, Type] = {}
        for node in self._found.graph.nodes:
            if node.op == "placeholder":
                types[node] = given[node]
            elif node.op == "call_function" and result_tensors(node):
                ins = [types[n] for n, _ in operands(node)]
                made = self._type(node, ins)
                if made is None:
                    return None
                types[node] = made
            elif node.op != "output" and not is_switch(node):
                return None
        return types

    def _type(self, node: fx.Node, ins: Sequence[Type]) -> Type | None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        rule = self._rules[node]
        if rule is not None and rule.writes:
            return None
        if all(t is R for t in ins):
            return R
        options = rule.options() if rule is not None else []
        return next((_plain(o.out) for o in options if _takes(o, ins)), None)

    def _is_alike(self, cut: Cut, types: Mapping[fx.Node, Type], size: int) -> bool:
        """Whether the Function computes alike where the dims of a cut have another size."""
        other = self._same_calls(
            _resized(self._found.operands, cut.operands, size),
            _resized(self._found.results, cut.results, size),
        )
        return other is not None and all(
            _has_size(a, b, types[a], cut.size, size)
            for a, b in zip(self._found.graph.nodes, other.nodes, strict=True)
            if a in types
        )

    def has_same_calls(self, shapes: Shapes, results: Shapes) -> bool:
        """Whether the Function calls the same operators with the same numbers on operands of other
        shapes.
        """
        return self._same_calls(shapes, results) is not None

    def _same_calls(self, shapes: Shapes, results: Shapes) -> fx.Graph | None:
        """The graph on operands of other shapes; None if it does not have the same calls."""
        try:
            other = _canonical(self._call, shapes, results).graph
        except Exception:  # the Function does not take these shapes
            return None
        own, others = list(self._found.graph.nodes), list(other.nodes)
        number = {n: i for nodes in (own, others) for i, n in enumerate(nodes)}
        is_same = len(own) == len(others) and all(
            a.op == b.op
            and (a.op == "placeholder" or a.target == b.target)
            and self._numbers(a, a, number) == self._numbers(b, a, number)
            for a, b in zip(own, others, strict=True)
        )
        return other if is_same else None

    def _numbers(self, node: fx.Node, like: fx.Node, number: Mapping[fx.Node, int]) -> Any:
        """The arguments of a node without the shape of its result. ``like`` has its rule."""
        rule, found = self._rules.get(like), dict[Any, Any](enumerate((node.args, node.kwargs)))
        if rule is not None and rule.shape_argument is not None:
            found = {k: v for k, v in arguments(node).items() if k != rule.shape_argument}
        return map_arg(found, lambda n: ("node", number[n]))


def operand_shapes(call: fx.Node) -> Shapes:
    """The shape of each operand that is a tensor."""
    return [tuple(result_tensors(n)[0].shape) for n, _ in operands(call)]


def result_shapes(call: fx.Node) -> Shapes:
    """The shape of each result that is a tensor."""
    return [tuple(t.shape) for t in result_tensors(call)]


def _canonical(call: fx.Node, shapes: Shapes, results: Shapes) -> FunctionGraph:
    """:func:`trace_function`, with operators in the forms that rules know."""
    found = trace_function(call, shapes, results)
    for node in found.graph.nodes:
        node.meta = {**call.meta, **node.meta}
    decompose(found.graph, REWRITTEN | SPLITS)
    split_to_slices(found.graph)
    functionalise(found.graph, set(), {})
    simplify(found.graph, set())
    write_normal_form(found.graph)
    return found


def _val(node: fx.Node) -> torch.Tensor:
    return result_tensors(node)[0]


def _plain(of_axis: Type) -> Type:
    """A type without the difference of I and R, which is one of gradients."""
    return R if of_axis is I else of_axis


def _takes(option: Option, ins: Sequence[Type]) -> bool:
    """Whether an option of the operator itself takes operands of these types."""
    return option.kernel is None and list(map(_plain, option.ins)) == list(ins)


def _other_sizes(size: int) -> list[int]:
    """Sizes at which a Function is traced again: twice the size, and the largest chunk of it."""
    prime = next(p for p in range(2, size + 1) if size % p == 0)
    return [2 * size, *([size // prime] if size > prime else [])]


def _resized(nodes: Sequence[fx.Node], cut: Sequence[int | None], size: int) -> list[list[int]]:
    """The shapes of nodes where the dims of a cut have another size."""
    return [
        [size if d == dim else n for d, n in enumerate(_val(node).shape)]
        for node, dim in zip(nodes, cut, strict=True)
    ]


def _has_size(node: fx.Node, other: fx.Node, of_axis: Type, size: int, other_size: int) -> bool:
    """Whether the results of ``other`` have the shapes that a cut of another size gives them."""
    for t, o in zip(result_tensors(node), result_tensors(other), strict=True):
        shape = list(t.shape)
        if of_axis.is_shard:
            shape[of_axis.dim] = shape[of_axis.dim] * other_size // size
        if shape != list(o.shape):
            return False
    return True
