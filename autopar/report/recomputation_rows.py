"""Rows of the tensors that the backward computes again, and of those that the host keeps: the bytes
that this frees, its seconds.

The rows add up the tensors by part of the model.
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
from autopar.search.space.recompute_policy import OFFLOADED, RECOMPUTED, SAVED
from autopar.search.space.strategies import Strategy

Row = list[Any]
_KEPT_FOR_OTHERS = "kept to make the others again"


@dataclass(frozen=True)
class _Item:
    """A recomputed result or conversion of one node, or a result that the host keeps.

    Attributes:
        node: the node.
        name: the operator, and the layout after a conversion.
        nbytes: bytes of one microbatch that the device need not keep.
        seconds: seconds to compute it again, or to copy it to the host and back, for one
            microbatch.
    """

    node: fx.Node
    name: str
    nbytes: float
    seconds: float


def recomputation_rows(found: PricedPlan, names: ModulePaths) -> list[Row]:
    """``rows["recomputed"]`` of a plan."""
    items = _Recomputation(found).items()
    return [*_sums(found, names, items), *_kept_for_recomputation(found)]


def offload_rows(found: PricedPlan, names: ModulePaths) -> list[Row]:
    """``rows["offloaded"]`` of a plan."""
    return list(_sums(found, names, _Recomputation(found).on_host()))


# the prefix of the block, the module in it, the operator, its number in the module
_Key = tuple[str, str, str, int]


def _sums(found: PricedPlan, names: ModulePaths, items: Iterator[_Item]) -> Iterator[Row]:
    # times, bytes and seconds of each operator in all blocks with the same prefix
    sums: dict[_Key, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    numbers: dict[_Key, set[int]] = defaultdict(set)
    seen: Counter[tuple] = Counter()
    in_flight = found.configuration.microbatches_in_flight()
    for item in items:
        instance, module = names.split(item.node)
        seen[instance, module, item.name] += 1
        prefix = instance[0] if instance else ""
        key = prefix, module, item.name, seen[instance, module, item.name]
        if instance:
            numbers[key].add(instance[1])
        stages = found.stage_of[item.node]
        sums[key][0] += found.microbatches * len(stages)
        sums[key][1] += item.nbytes * sum(in_flight[stage] for stage in stages)
        sums[key][2] += item.seconds * found.microbatches * len(stages)
    yield from _rows_by_module(sums, numbers, names)


def _rows_by_module(
    sums: dict[_Key, list[float]], numbers: dict[_Key, set[int]], names: ModulePaths
) -> Iterator[Row]:
    """One row for all operators of a module that the same blocks recompute or offload."""
    rows: dict[tuple, tuple[dict[str, None], list[list[float]]]] = defaultdict(lambda: ({}, []))
    for key, added in sums.items():
        prefix, module, operator, _ = key
        operators, parts = rows[prefix, frozenset(numbers[key]), module]
        operators[operator] = None
        parts.append(added)
    for (prefix, members, module), (operators, parts) in rows.items():
        name = ": ".join(filter(None, (module, ", ".join(operators))))
        times, nbytes, seconds = (sum(column) for column in zip(*parts, strict=True))
        yield [names.label(prefix, members) if prefix else "", name, int(times), nbytes, seconds]


def _kept_for_recomputation(found: PricedPlan) -> Iterator[Row]:
    """A row for the tensors that are kept only because others are computed from them."""
    memory, microbatches_in_flight = (
        _Recomputation(found),
        found.configuration.microbatches_in_flight(),
    )
    times, nbytes = 0, 0.0
    for node, each in memory.kept_for_others():
        times += found.microbatches * len(found.stage_of[node])
        nbytes += each * sum(microbatches_in_flight[stage] for stage in found.stage_of[node])
    if times:
        yield ["", _KEPT_FOR_OTHERS, times, -nbytes, 0.0]


class _Recomputation:
    """Compares the tensors that a plan keeps with those that it would keep without
    recomputation.
    """

    def __init__(self, found: PricedPlan) -> None:
        self._found, self._costs = found, found.costs
        self._kept: dict[fx.Node, bool] = {}
        self._readers: dict[fx.Node, list[tuple[fx.Node, int]]] = defaultdict(list)
        for node in found.analysis.graph.nodes:
            if node.op == "call_function":
                for k, (operand, _) in enumerate(operands(node)):
                    self._readers[operand].append((node, k))

    def items(self) -> Iterator[_Item]:
        """The recomputed results in the order of the graph, then the recomputed conversions."""
        for node in self._calls():
            v, k = self._chosen(node)
            if v.states[k] == RECOMPUTED:
                choice = v.choices[k]
                assert isinstance(choice, Strategy)
                nbytes = float(v.result[k]) if self._keeps_result(node) else 0.0
                nbytes += self._costs.internal_bytes(node, choice)
                yield _Item(node, self._name(node), nbytes, float(v.forward[k]))
        for node, target, recomputed, seconds, nbytes in self._conversions():
            if recomputed:
                kept = nbytes if self._keeps_converted(node, target) else 0.0
                yield _Item(node, f"{self._name(node)} -> {format_layout(target)}", kept, seconds)

    def on_host(self) -> Iterator[_Item]:
        """The results that the host keeps, in the order of the graph."""
        for node in self._calls():
            v, k = self._chosen(node)
            if v.states[k] == OFFLOADED:
                yield _Item(node, self._name(node), float(v.result[k]), float(v.copying[k]))

    def kept_for_others(self) -> Iterator[tuple[fx.Node, float]]:
        """The tensors that are kept only for recomputation, with their bytes."""
        for node in self._calls():
            v, k = self._chosen(node)
            if (
                v.states[k] == SAVED
                and self._costs.saved(node).alias is None
                and not self._keeps_result(node)
            ):
                yield node, float(v.result[k])
        for node, target, recomputed, _, nbytes in self._conversions():
            if not recomputed and not self._keeps_converted(node, target):
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
        """The conversions that allocate memory and whose results the backward needs, or makes
        because they are in a ZeRO bucket with such.

        Yields the node, the layout after the conversion, whether it is recomputed, the seconds to
        recompute it, and the bytes of its result.
        """
        problem, solution = self._found.problem, self._found.solution
        for node, g in problem.tensor_of.items():
            tensor = problem.tensors[g]
            s = tensor.sources[problem.made(tensor, solution.chosen)[0]]
            for target, needed in problem.wanted(tensor, solution.chosen).items():
                t = tensor.targets[target]
                joined = (g, target) in self._found.gathered_again
                if (needed or joined) and tensor.moves[s, t]:
                    yield (
                        node,
                        target,
                        joined or (g, target) in solution.recomputed,
                        float(tensor.recompute_seconds[s, t]),
                        # Not the problem's: those are infinite where it may not be saved.
                        float(self._costs.local_bytes(node, [target])[0]),
                    )

    def _keeps_result(self, node: fx.Node) -> bool:
        """Whether autograd would keep a call's result without recomputation."""
        if node not in self._kept:
            self._kept[node] = self._costs.saved(node).output or any(
                self._backward_reads(reader, k)
                for reader, k in self._readers[node]
                if not self._is_converted(node, reader, k)
            )
        return self._kept[node]

    def _keeps_converted(self, node: fx.Node, target: Layout) -> bool:
        """Whether autograd would keep the converted tensor without recomputation."""
        return any(
            self._backward_reads(reader, k)
            for reader, k in self._readers[node]
            if self._found.choice(reader).ins[k] == target
        )

    def _backward_reads(self, reader: fx.Node, k: int) -> bool:
        """Whether the backward reads operand ``k`` of the call ``reader``."""
        saved = self._costs.saved(reader)
        if reader.target is send:
            return self._costs.is_differentiable(reader)
        return k in saved.operands or (saved.alias == k and self._keeps_result(reader))

    def _is_converted(self, node: fx.Node, reader: fx.Node, k: int) -> bool:
        """Whether a conversion allocates operand ``k`` of ``reader``, which is made from
        ``node``.
        """
        problem = self._found.problem
        tensor = problem.tensors[problem.tensor_of[node]]
        source, target = self._found.choice(node).out, self._found.choice(reader).ins[k]
        return bool(tensor.moves[tensor.sources[source], tensor.targets[target]])
