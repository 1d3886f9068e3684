"""What a plan does, in the field's words, as rows of plain data: made while the graph is at hand, so that a loaded plan reports the same.

``rows["model"]``
    [name, value]: samples of the global batch, trainable parameters.
``rows["blocks"]``
    [block, count, module, operator, shape, words]: one row for each distinct operator that a reader looks for, in the order they run.
    ``block`` is the repeated part of the module path, with "*" for its number ("" outside blocks), ``count`` how often it occurs,
    ``words`` one word for each mesh axis.
``rows["collectives"]``
    [part, collective, axis, phase, block, modules, times, bytes, seconds]: what is sent in a step, largest first. ``part`` is the kind
    of :attr:`Plan.seconds` that it belongs to: the rows of "conversions" and of "gradient synchronisation" add up to these. ``axis`` is
    the mesh axis's number (-1 for local copies), ``bytes`` and ``seconds`` are one rank's, of all ``times`` together.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import networkx as nx
import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.cost_model import seconds as collective_seconds
from autopar.cost_model.conversion import STEP, Term
from autopar.graph import numel, operands, shape
from autopar.layout import Layout, P
from autopar.plan import Plan
from autopar.rules.registry import operator_name
from autopar.rules.rule import Dim, Rule
from autopar.search.problem import Vertex
from autopar.search.search import Found
from autopar.search.strategies import Storage, Strategy

Row = list[Any]

_NUMBER = re.compile(r"^(.*?\b)(\d+)\b\.?(.*)$")
_PASSING = ("aten.to", "aten._to_copy", "aten.clone", "aten.contiguous")  # a weight that went through these is still the weight
_NORMS = ("aten.layer_norm", "aten.rms_norm", "aten.batch_norm", "aten.group_norm")
_PRODUCTS = ("matmul", "conv", "attention")


def describe(plan: Plan, analysis: Analysis, found: Found) -> Plan:
    """``plan`` with the rows that its report shows.

    Args:
        plan: what the search wrote down.
        analysis: of the graph it was made for.
        found: the search's answer, with its prices.
    """
    names, words = _Names(analysis, found), _Words(analysis)
    trainable = [n for n in analysis.state if n in analysis.differentiable]
    rows = {
        "model": [["samples", analysis.batch.size * plan.microbatches], ["parameters", sum(map(numel, trainable))]],
        "blocks": [row for v in found.problem.vertices if (row := _block(v, found, names, words)) is not None],
        "collectives": _collectives(analysis, found, names),
    }
    return dataclasses.replace(plan, rows=rows, notes=tuple(dict.fromkeys(plan.notes)))


class _Names:
    """Module paths, with one name for all blocks that share their decisions."""

    def __init__(self, analysis: Analysis, found: Found) -> None:
        self._state = {n: i.target.rpartition(".")[0] or i.target for n, i in analysis.state.items()}
        self._numbers: dict[str, set[int]] = defaultdict(set)
        self._members: dict[int, set[int]] = defaultdict(set)
        for node, v in found.problem.vertex_of.items():
            if match := _NUMBER.match(self._path(node)):
                self._numbers[match[1]].add(int(match[2]))
                self._members[v].add(int(match[2]))
        self._vertex_of = found.problem.vertex_of

    def split(self, node: fx.Node) -> tuple[str, str]:
        """``("model.layers.*", "self_attn.q_proj")``; ``("", path)`` outside numbered blocks."""
        path = self._path(node)
        match = _NUMBER.match(path)
        if match is None:
            return "", path
        members = self._members[self._vertex_of[node]]
        every = members == self._numbers[match[1]] and len(members) > 1
        return match[1] + ("*" if every else _ranges(members)), match[3]

    def _path(self, node: fx.Node) -> str:
        return self._state.get(node, node.meta.get("module", "")) or ""


def _ranges(numbers: Iterable[int]) -> str:
    """``{1, 2, 3, 7}`` as ``1-3,7``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _block(vertex: Vertex, found: Found, names: _Names, words: _Words) -> Row | None:
    """The row of a node, or None for one that a reader does not look for."""
    node, choice = vertex.node, found.choice(vertex.node)
    operator = words.operator(node)
    if operator is None or not isinstance(choice, Strategy):
        return None
    weights = words.weights(node)
    largest = max(weights, key=lambda k: numel(weights[k]), default=None)
    text = [words.word(node, factor, choice.out[axis].kind) for axis, factor in enumerate(choice.factors)]
    storage = found.choice(weights[largest]) if largest is not None else None
    if isinstance(storage, Storage):
        parts = [s.is_shard and not u.is_shard for s, u in zip(storage.stored, storage.used, strict=True)]
        text = [f"{word}, ZeRO" if part else word for word, part in zip(text, parts, strict=True)]
    shown = node if largest is None and not _is_loss(node) else operands(node)[largest or 0][0]
    block, module = names.split(node)
    if vertex.count == 1:
        block, module = "", ".".join(filter(None, (block, module))) or "(root)"
    return [block, vertex.count, module, operator, "x".join(map(str, shape(shown))), text]


class _Words:
    """What splitting a factor of a node's rule is called. Nothing is read from module names: only rules, weights and connected dims."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.rules = analysis, analysis.rules
        self._links: nx.utils.UnionFind = nx.utils.UnionFind()
        self._normalised = {n.meta.get("module") for n in self.rules if operator_name(n.target) == "aten.rsqrt"}
        for node, rule in self.rules.items():
            for tensor, dims in _operands(node, rule) if rule is not None else ():
                for d, factors in enumerate(dims):
                    if factors:
                        self._links.union((node, factors[0]), (tensor, d))
        self._vocabulary = {self._links[n, "v"] for n in self.rules if _is_loss(n)}
        self._sequence = {self._links[place] for place in self._sequences()}
        images = [
            n
            for n, rule in self.rules.items()
            if rule is not None and (rule.kind == "conv" or operator_name(n.target) == "aten.batch_norm")
        ]
        self._channel = {self._links[n, 1] for n in images}
        self._space = {self._links[n, d] for n in images for d in range(2, len(shape(n)))}

    def _sequences(self) -> Iterator[tuple[fx.Node, int]]:
        """Dim 1 of inputs [batch, sequence(, features)], and of what is normalised as such."""
        batch = self.analysis.batch
        for node in self.analysis.inputs:
            if len(shape(node)) in (2, 3) and batch.dim(node) == 0:
                yield node, 1
        for node in self.rules:
            if (operator_name(node.target) in _NORMS or self._scales(node)) and len(shape(node)) == 3 and batch.dim(node) == 0:
                yield node, 1

    def operator(self, node: fx.Node) -> str | None:
        """What the report calls the operator, if it shows it."""
        rule = self.rules.get(node)
        if rule is None:
            return None if node.op != "call_function" or not self.weights(node) else operator_name(node.target).removeprefix("aten.")
        name = operator_name(node.target)
        if rule.kind == "view" or self._weight(node) is not None:
            return None
        if rule.kind == "attention":
            return "attention"
        if self._scales(node):
            return "rms_norm"
        if _is_loss(node) or rule.kind in _PRODUCTS or name in _NORMS or self.weights(node):
            return name.rpartition(".")[2]
        return "residual" if self._is_residual(node) else None

    def weights(self, node: fx.Node) -> dict[int, fx.Node]:
        """The parameters that a node reads, by operand."""
        found = {k: self._weight(n) for k, (n, _) in enumerate(operands(node))}
        return {k: w for k, w in found.items() if w is not None}

    def word(self, node: fx.Node, factor: str | None, out: str) -> str:
        """The word for one axis along which ``factor`` is split and the output has a type of kind ``out``."""
        rule = self.rules.get(node)
        if factor is None or rule is None:
            return "partial sums" if out == P.kind else "replicated"
        if factor in self.analysis.batch.factors(node):
            return "data-parallel"
        if self._links[node, factor] in self._vocabulary:
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
            return {"g": "group-parallel", "o": "output-channel-parallel"}.get(factor, "input-channel-parallel")
        if rule.kind != "matmul":
            return self._of_activation(rule, node, factor)
        if not _has(rule.output, factor):
            return "row-parallel"
        both = all(_has(dims, factor) for dims in rule.operands[:2])
        return "expert-parallel" if both else "column-parallel"

    def _of_activation(self, rule: Rule, node: fx.Node, factor: str) -> str:
        tensor, dims = next((t, dims) for t, dims in reversed(list(_operands(node, rule))) if _has(dims, factor))
        d, rank = next(d for d, dim in enumerate(dims) if factor in dim), len(shape(tensor))
        if self._links[node, factor] in self._sequence:
            return "sequence-sharded"
        if rule.kind in ("matmul", "attention") and not _has(rule.output, factor):
            return "contraction-split"
        if rule.kind == "matmul" and rank == 4 and d == 1:
            return "head-parallel"
        if self._links[node, factor] in self._space:
            return "spatially sharded"
        if d == rank - 1:
            return "feature-sharded"
        if self._links[node, factor] in self._channel:
            return "channel-sharded"
        # Positions of activations [batch, sequence, features] and [batch, heads, sequence, features].
        return "sequence-sharded" if (d, rank) in ((1, 3), (2, 4)) else f"dim {d} sharded"

    def _weight(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a node holds, perhaps transposed or in another dtype."""
        while node.op == "call_function":
            rule, inputs = self.rules.get(node), operands(node)
            if rule is None or len(inputs) != 1 or (rule.kind != "view" and operator_name(node.target) not in _PASSING):
                return None
            node = inputs[0][0]
        entry = self.analysis.state.get(node)
        return node if entry is not None and entry.kind == "parameter" else None

    def _scales(self, node: fx.Node) -> bool:
        """Whether a product is the last step of a normalisation that the model spells out: ``weight * (x * rsqrt(...))``."""
        return operator_name(node.target) == "aten.mul" and node.meta.get("module") in self._normalised and bool(self.weights(node))

    def _is_residual(self, node: fx.Node) -> bool:
        """Whether a node adds to a tensor something that weights made of this tensor."""
        if operator_name(node.target) != "aten.add" or len(inputs := node.all_input_nodes) != 2 or shape(inputs[0]) != shape(inputs[1]):
            return False
        return any(len(skip.users) > 1 and self._leads(skip, branch) for skip, branch in (inputs, reversed(inputs)))

    def _leads(self, start: fx.Node, end: fx.Node) -> bool:
        """Whether ``end`` is made of ``start`` with a product among the steps."""
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
    """Each tensor of a call with its dims' factors, the output last."""
    yield from zip([*(n for n, _ in operands(node)), node], [*rule.operands, rule.output], strict=True)


def _is_loss(node: fx.Node) -> bool:
    return operator_name(node.target).endswith(".cross_entropy")


def _has(dims: Iterable[Dim], factor: str) -> bool:
    return any(factor in dim for dim in dims)


def _collectives(analysis: Analysis, found: Found, names: _Names) -> list[Row]:
    rows: dict[tuple, Row] = {}
    for part, node, term, times in _terms(analysis, found):
        block, module = names.split(node)
        key = (part, term.kind, term.axis, term.phase, block or module or "(root)")
        if term.kind == "copy":
            key, block = (part, "copy", -1, "", ""), ""
        row = rows.setdefault(key, [*key, [], 0, 0.0, 0.0])
        if block and module not in row[5]:
            row[5].append(module)
        row[6] += times if term.nbytes else 0
        row[7] += times * term.nbytes
        row[8] += times * term.seconds
    return sorted(rows.values(), key=lambda row: -row[8])


def _terms(analysis: Analysis, found: Found) -> Iterator[tuple[str, fx.Node, Term, int]]:
    """Every part of a step's communication: the kind of seconds it counts as, the tensor's node, the term and how often it occurs."""
    problem, microbatches = found.problem, found.costs.microbatches
    for v in problem.vertices:
        choice = found.choice(v.node)
        if isinstance(choice, Storage):
            for term in _synchronisation(found, v.node, choice):
                yield "gradient synchronisation", v.node, term, v.count
        else:
            for term in _in_kernels(analysis, found, v.node, choice):
                yield "compute", v.node, term, v.count * microbatches
    for g in problem.groups:
        node = problem.vertices[g.producer].node
        for wanted in dict.fromkeys(found.choice(problem.vertices[v].node).ins[p] for v, p in g.ports):
            for term in _path(found, node, found.choice(node).out, wanted):
                yield "conversions", node, term, g.count * microbatches


def _path(found: Found, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
    """The terms of a conversion, with what its steps cost besides as a copy of nothing."""
    value = node.meta["val"]
    if source == target or not isinstance(value, torch.Tensor):
        return []
    tensor = (tuple(value.shape), value.dtype.itemsize, found.costs.differentiable(node), source, target)
    steps = len(found.costs.conversion.path(*tensor))
    return [*found.costs.conversion.terms(*tensor), Term("copy", -1, 0.0, steps * STEP, "forward")]


def _synchronisation(found: Found, node: fx.Node, storage: Storage) -> list[Term]:
    """A parameter's terms, at the price that the search gives them in their buckets."""
    terms = _path(found, node, storage.stored, storage.used)
    alone = sum(t.seconds for t in terms)
    share = found.costs.synchronisation(node, storage) / alone if alone else 1.0
    return [dataclasses.replace(t, seconds=share * t.seconds) for t in terms]


def _in_kernels(analysis: Analysis, found: Found, node: fx.Node, strategy: Strategy) -> Iterator[Term]:
    """What kernels send by themselves, as the search prices it."""
    rule = analysis.rules.get(node)
    sizes = found.costs.sizes
    for axis, factor in enumerate(strategy.factors if rule is not None and rule.communication else ()):
        for sent in rule.communication.get(factor, ()) if factor and strategy.kernels[axis] else ():  # type: ignore[union-attr]
            parts = math.prod(n for f, n in zip(strategy.factors, sizes, strict=True) if f in sent.factors)
            nbytes = sent.elements * node.meta["val"].dtype.itemsize / parts
            yield Term(sent.collective, axis, nbytes, collective_seconds(sent.collective, nbytes, found.costs.axis(axis)), "kernel")
