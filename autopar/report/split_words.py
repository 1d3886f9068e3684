"""The field's words for the split of a node along one mesh axis, such as column-parallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx

from autopar.ir.layout import P
from autopar.ir.links import Links
from autopar.ir.nodes import operands, shape
from autopar.rules.analysis import Analysis
from autopar.rules.registry import operator_name
from autopar.rules.rule import Dim, Rule
from autopar.runtime.kernels.graph_kernels import send

# a weight is still the weight after these operators
_COPIES = ("aten.to", "aten._to_copy", "aten.clone", "aten.contiguous")
_NORMS = ("aten.layer_norm", "aten.rms_norm", "aten.batch_norm", "aten.group_norm")
_PRODUCTS = ("matmul", "conv", "attention")
_Place = tuple[fx.Node, str | int]  # a factor of a node's rule, or a dim of its result


class SplitWords:
    """Names the split of a factor of a node's rule.

    The words follow from rules, weights and connected dims, not from names of modules.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.rules = analysis, analysis.rules
        self._normalised = {
            n.meta.get("module") for n in self.rules if operator_name(n.target) == "aten.rsqrt"
        }
        links = self._linked_dims()
        self._vocabulary = links.reached((n, "v") for n in self.rules if is_loss(n))
        self._sequence = links.reached(self._sequences())
        images = [
            n
            for n, rule in self.rules.items()
            if rule is not None
            and (rule.kind == "conv" or operator_name(n.target) == "aten.batch_norm")
        ]
        self._channel = links.reached((n, 1) for n in images)
        self._space = links.reached((n, d) for n in images for d in range(2, len(shape(n))))

    def _linked_dims(self) -> Links[_Place]:
        """The factors of each node, linked with the dims of operands and result that begin with
        them.
        """
        links = Links[_Place]()
        for node, rule in self.rules.items():
            if rule is None:
                continue
            tensors = [*(n for n, _ in operands(node)), node]
            for factor, dims in rule.dims_by_factor(tensors):
                links.link([(node, factor), *dims])
        return links

    def _sequences(self) -> Iterator[tuple[fx.Node, int]]:
        """The places of sequence dims.

        These are dim 1 of inputs [batch, sequence] and [batch, sequence, features], and dim 1 of
        normalised tensors [batch, sequence, features].
        """
        batch = self.analysis.batch
        for node in self.analysis.inputs:
            if len(shape(node)) in (2, 3) and batch.dim(node) == 0:
                yield node, 1
        for node in self.rules:
            if (
                (operator_name(node.target) in _NORMS or self._scales(node))
                and len(shape(node)) == 3
                and batch.dim(node) == 0
            ):
                yield node, 1

    def operator(self, node: fx.Node) -> str | None:
        """The report's name for the operator; None for an operator that the report leaves out."""
        rule = self.rules.get(node)
        if rule is None:
            return (
                None
                if node.op != "call_function" or not self.weights(node)
                else operator_name(node.target).removeprefix("aten.")
            )
        name = operator_name(node.target)
        if rule.kind == "view" or self._weight(node) is not None:
            return None
        if rule.kind == "attention":
            return "attention"
        if self._scales(node):
            return "rms_norm"
        if is_loss(node) or rule.kind in _PRODUCTS or name in _NORMS or self.weights(node):
            return name.rpartition(".")[2]
        return "residual" if self._is_residual(node) else None

    def weights(self, node: fx.Node) -> dict[int, fx.Node]:
        """The parameters that a node reads, by number of the operand."""
        found = {k: self._weight(n) for k, (n, _) in enumerate(operands(node))}
        return {k: w for k, w in found.items() if w is not None}

    def word(self, node: fx.Node, factor: str | None, out: str) -> str:
        """The word for one mesh axis.

        Args:
            node: the node.
            factor: the factor that is split along the axis, None for no split.
            out: the kind of the output's type along the axis.
        """
        rule = self.rules.get(node)
        if factor is None or rule is None:
            return "partial sums" if out == P.kind else "replicated"
        if factor in self.analysis.batch.factors(node):
            return "data-parallel"
        if (node, factor) in self._vocabulary:
            return "vocabulary-parallel"
        if any(factor in dim for k in self.weights(node) for dim in rule.operands[k]):
            return self._of_weight(rule, node, factor)
        if rule.kind == "attention" and factor in ("n", "g"):
            return "head-parallel"
        return self._of_activation(rule, node, factor)

    def _of_weight(self, rule: Rule, node: fx.Node, factor: str) -> str:
        name = operator_name(node.target)
        if name == "aten.embedding":
            return "vocabulary-parallel" if factor == "v" else "feature-sharded"
        if rule.kind == "conv":
            return {"g": "group-parallel", "o": "output-channel-parallel"}.get(
                factor, "input-channel-parallel"
            )
        if rule.kind != "matmul":
            return self._of_activation(rule, node, factor)
        if not _has(rule.output, factor):
            return "row-parallel"
        both = all(_has(dims, factor) for dims in rule.operands[:2])
        return "expert-parallel" if both else "column-parallel"

    def _of_activation(self, rule: Rule, node: fx.Node, factor: str) -> str:
        tensor, dims = next(
            (t, dims) for t, dims in reversed(list(_operands(node, rule))) if _has(dims, factor)
        )
        d, rank = next(d for d, dim in enumerate(dims) if factor in dim), len(shape(tensor))
        if (node, factor) in self._sequence:
            return "sequence-sharded"
        if rule.kind in ("matmul", "attention") and not _has(rule.output, factor):
            return "contraction-split"
        if rule.kind == "matmul" and rank == 4 and d == 1:
            return "head-parallel"
        if (node, factor) in self._space:
            return "spatially sharded"
        if d == rank - 1:
            return "feature-sharded"
        if (node, factor) in self._channel:
            return "channel-sharded"
        # Positions of activations [batch, sequence, features] and [batch, heads, sequence,
        # features].
        return "sequence-sharded" if (d, rank) in ((1, 3), (2, 4)) else f"dim {d} sharded"

    def _weight(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a node's result is, perhaps transposed or in another dtype."""
        while node.op == "call_function":
            rule, inputs = self.rules.get(node), operands(node)
            if (
                rule is None
                or len(inputs) != 1
                or (rule.kind != "view" and operator_name(node.target) not in _COPIES)
            ):
                return None
            node = inputs[0][0]
        entry = self.analysis.state.get(node)
        return node if entry is not None and entry.kind == "parameter" else None

    def _scales(self, node: fx.Node) -> bool:
        """Whether a product is the last step of a normalisation that the model writes as ``weight *
        (x * rsqrt(...))``.
        """
        return (
            operator_name(node.target) == "aten.mul"
            and node.meta.get("module") in self._normalised
            and bool(self.weights(node))
        )

    def _is_residual(self, node: fx.Node) -> bool:
        """Whether a node adds a tensor and the result of a branch of products on this tensor."""
        inputs = [_made(n) for n in node.all_input_nodes]
        if (
            operator_name(node.target) != "aten.add"
            or len(inputs) != 2
            or shape(inputs[0]) != shape(inputs[1])
        ):
            return False
        return any(
            len(_readers(skip)) > 1 and self._leads(skip, branch)
            for skip, branch in (inputs, reversed(inputs))
        )

    def _leads(self, start: fx.Node, end: fx.Node) -> bool:
        """Whether ``end`` is computed from ``start`` with at least one product between them."""
        waiting, seen, product = [end], {start}, False
        reached = False
        while waiting:
            node = waiting.pop()
            reached = reached or start in node.all_input_nodes
            rule = self.rules.get(node)
            product = product or (rule is not None and rule.kind in _PRODUCTS)
            if reached and product:
                return True
            fresh = [n for n in node.all_input_nodes if n not in seen and n.op == "call_function"]
            seen.update(fresh)
            waiting += fresh
        return False


def _operands(node: fx.Node, rule: Rule) -> Iterator[tuple[fx.Node, tuple[Dim, ...]]]:
    """Each tensor of a call with the factors of its dims, the output last."""
    yield from zip(
        [*(n for n, _ in operands(node)), node], [*rule.operands, rule.output], strict=True
    )


def _made(node: fx.Node) -> fx.Node:
    """The node that computed a tensor, before it was sent from stage to stage."""
    while node.target is send:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read a tensor, in any stage."""
    return {
        reader
        for user in node.users
        for reader in (_readers(user) if user.target is send else (user,))
    }


def is_loss(node: fx.Node) -> bool:
    return operator_name(node.target).endswith(".cross_entropy")


def _has(dims: Iterable[Dim], factor: str) -> bool:
    return any(factor in dim for dim in dims)
