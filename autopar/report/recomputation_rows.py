"""What a plan makes again in the backward, what that frees and what it costs, added up by part of
the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.ir.layout import Layout, format_layout
from autopar.ir.nodes import operands
from autopar.report.module_paths import ModulePaths
from autopar.rules.registry import operator_name
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.recompute_policy import RECOMPUTED, SAVED
from autopar.search.space.strategies import Strategy

Row = list[Any]
BESIDES = "kept to make the others again"


@dataclass(frozen=True)
class _Item:
    """A result or a conversion of one node: bytes that its being made again frees of a microbatch,
    and the seconds it takes.
    """

    node: fx.Node
    what: str
    nbytes: float
    seconds: float


def recomputed(found: PricedPlan, names: ModulePaths) -> list[Row]:
    """``rows["recomputed"]`` of a plan."""
    return [*_made_again(found, names), *_besides(found)]


def _made_again(found: PricedPlan, names: ModulePaths) -> Iterator[Row]:
    sums: dict[tuple[str, str, str, int], list[float]] = defaultdict(
        lambda: [0, 0.0, 0.0]
    )  # of each operator of a block's module
    numbers: dict[tuple[str, str, str, int], set[int]] = defaultdict(set)
    seen: Counter[tuple] = Counter()
    for item in _Memory(found).items():
        instance, module = names.split(item.node)
        seen[instance, module, item.what] += 1  # a module may have several of one operator
        key = (
            instance[0] if instance else "",
            module,
            item.what,
            seen[instance, module, item.what],
        )
        if instance:
            numbers[key].add(instance[1])
        stages = found.stage_of[item.node]
        sums[key][0] += found.microbatches * len(stages)
        sums[key][1] += item.nbytes * sum(
            found.configuration.microbatches_in_flight()[stage] for stage in stages
        )
        sums[key][2] += item.seconds * found.microbatches * len(stages)
    rows: dict[tuple, tuple[dict[str, None], list[list[float]]]] = defaultdict(lambda: ({}, []))
    for (prefix, module, what, number), added in sums.items():
        whats, parts = rows[prefix, frozenset(numbers[prefix, module, what, number]), module]
        whats[what] = None
        parts.append(added)
    for (prefix, members, module), (whats, parts) in rows.items():
        name = ": ".join(filter(None, (module, ", ".join(whats))))
        times, nbytes, seconds = (sum(column) for column in zip(*parts, strict=True))
        yield [names.label(prefix, members) if prefix else "", name, int(times), nbytes, seconds]


def _besides(found: PricedPlan) -> Iterator[Row]:
    """What would not be kept but for what is made again from it."""
    memory, microbatches_in_flight = _Memory(found), found.configuration.microbatches_in_flight()
    times, nbytes = 0, 0.0
    for node, each in memory.extra():
        times += found.microbatches * len(found.stage_of[node])
        nbytes += each * sum(microbatches_in_flight[stage] for stage in found.stage_of[node])
    if times:
        yield ["", BESIDES, times, -nbytes, 0.0]


class _Memory:
    """What would be kept of a plan's tensors if nothing was made again, and what is."""

    def __init__(self, found: PricedPlan) -> None:
        self._found, self._costs = found, found.costs
        self._plain: dict[fx.Node, bool] = {}
        self._readers: dict[fx.Node, list[tuple[fx.Node, int]]] = defaultdict(list)
        for node in found.analysis.graph.nodes:
            if node.op == "call_function":
                for k, (operand, _) in enumerate(operands(node)):
                    self._readers[operand].append((node, k))

    def items(self) -> Iterator[_Item]:
        """What is made again, in the order of the graph."""
        for node in self._calls():
            v, k = self._chosen(node)
            if v.states[k] == RECOMPUTED:
                choice = v.choices[k]
                assert isinstance(choice, Strategy)
                nbytes = float(v.result[k]) if self._keeps(node) else 0.0
                nbytes += self._costs.internal_bytes(node, choice)
                yield _Item(node, self._name(node), nbytes, float(v.forward[k]))
        for node, target, recomputed, seconds, nbytes in self._conversions():
            if recomputed:
                kept = nbytes if self._wants(node, target) else 0.0
                yield _Item(node, f"{self._name(node)} -> {format_layout(target)}", kept, seconds)

    def extra(self) -> Iterator[tuple[fx.Node, float]]:
        """What is kept only because something else is made again from it, with its bytes."""
        for node in self._calls():
            v, k = self._chosen(node)
            if (
                v.states[k] == SAVED
                and self._costs.saved(node).alias is None
                and not self._keeps(node)
            ):
                yield node, float(v.result[k])
        for node, target, recomputed, _, nbytes in self._conversions():
            if not recomputed and not self._wants(node, target):
                yield node, nbytes

    def _name(self, node: fx.Node) -> str:
        """The operator, or the last part of a parameter's name."""
        state = self._found.analysis.state.get(node)
        return (
            operator_name(node.target).rpartition(".")[2]
            if state is None
            else state.target.rpartition(".")[2]
        )

    def _calls(self) -> Iterator[fx.Node]:
        return (n for n in self._found.analysis.graph.nodes if n.op == "call_function")

    def _chosen(self, node: fx.Node) -> tuple[Any, int]:
        v = self._found.problem.vertex_of[node]
        return self._found.problem.vertices[v], self._found.solution.chosen[v]

    def _conversions(self) -> Iterator[tuple[fx.Node, Layout, bool, float, float]]:
        """Those whose results the backward needs and that make memory: of what, to which layout,
        whether again, seconds and bytes.
        """
        problem, solution = self._found.problem, self._found.solution
        for node, g in problem.tensor_of.items():
            tensor = problem.tensors[g]
            s = tensor.sources[problem.made(tensor, solution.chosen)[0]]
            for target, needed in problem.wanted(tensor, solution.chosen).items():
                t = tensor.targets[target]
                if needed and tensor.moves[s, t]:
                    yield (
                        node,
                        target,
                        (g, target) in solution.recomputed,
                        float(tensor.recompute_seconds[s, t]),
                        float(tensor.nbytes[t]),
                    )

    def _keeps(self, node: fx.Node) -> bool:
        """Whether autograd alone would keep a call's result."""
        if node not in self._plain:
            self._plain[node] = self._costs.saved(node).output or any(
                self._reads(reader, k)
                for reader, k in self._readers[node]
                if not self._moved(node, reader, k)
            )
        return self._plain[node]

    def _wants(self, node: fx.Node, target: Layout) -> bool:
        """Whether autograd alone would keep a tensor in the layout to which it is converted."""
        return any(
            self._reads(reader, k)
            for reader, k in self._readers[node]
            if self._found.choice(reader).ins[k] == target
        )

    def _reads(self, reader: fx.Node, k: int) -> bool:
        saved = self._costs.saved(reader)
        if reader.target is send:
            return self._costs.is_differentiable(reader)
        return k in saved.operands or (saved.alias == k and self._keeps(reader))

    def _moved(self, node: fx.Node, reader: fx.Node, k: int) -> bool:
        problem = self._found.problem
        tensor = problem.tensors[problem.tensor_of[node]]
        source, target = self._found.choice(node).out, self._found.choice(reader).ins[k]
        return bool(tensor.moves[tensor.sources[source], tensor.targets[target]])
