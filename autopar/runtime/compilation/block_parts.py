"""A program in parts that are compiled one by one, one for each block of the model.

The gradients of a block are there when the backward of its part ends. So ranks sum them while the
blocks before are still computed, as in an eager program. Parameters that are gathered in the graph
(ZeRO-3) are gathered between the parts, by eager code, which starts gathers ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from autopar.ir.model_blocks import number_blocks
from autopar.ir.nodes import with_operands
from autopar.runtime.communication.arrivals import arrived
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.zero_buckets import gather_bucket, start_gather
from autopar.runtime.compilation.compiler_graph import is_free_conversion
from autopar.runtime.pipeline.recompute import MarkedOperator, operator_of

# Runs a program for these arguments; backwards begin at the results at the last argument's places.
Run = Callable[[fx.GraphModule, Sequence[torch.Tensor], Collection[int]], Sequence[torch.Tensor]]


class Part(nn.Module):
    """Runs one part; ``program`` takes the mesh and tensors."""

    def __init__(self, program: fx.GraphModule, roots: Collection[int], run: Run) -> None:
        super().__init__()
        self.program, self._roots, self._run = program, roots, run

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """The results of the part that are read outside of it."""
        return self._run(self.program, inputs, self._roots)


def cut_into_parts(
    program: fx.GraphModule, roots: Collection[int], run: Run
) -> fx.GraphModule | None:
    """A program that computes what ``program`` computes, by its parts; None where it has one part.

    Args:
        roots: the places of the results at which backwards begin.
        run: runs the program of a part.
    """
    gathers = _gathers(program.graph)
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n not in gathers]
    parts: dict[int, dict[fx.Node, None]] = {}
    for node, number in number_blocks(calls).items():
        parts.setdefault(number, {})[node] = None
    for part in parts.values():
        _leave_conversions(part)
    parts = {number: part for number, part in parts.items() if part}
    _take_conversions(calls, parts)
    if len(parts) < 2:
        return None
    return _Cutter(program, roots, run).join([parts[number] for number in sorted(parts)])


def _leave_conversions(part: dict[fx.Node, None]) -> None:
    """Takes free conversions at the end of a part out of it. Between the parts they are no copies,
    as they are within: see :class:`CompilerGraph`.
    """
    for node in reversed([*part]):
        is_marked = isinstance(node.target, MarkedOperator)
        if is_free_conversion(node) and not is_marked and part.keys().isdisjoint(node.users):
            del part[node]


def _take_conversions(calls: Sequence[fx.Node], parts: Mapping[int, dict[fx.Node, None]]) -> None:
    """Adds each conversion between parts that one part alone reads to the front of that part: its
    backward communicates beside the end of the part's backward.
    """
    of_call = {node: number for number, part in parts.items() for node in part}
    for node in reversed([n for n in calls if n not in of_call]):
        readers = {of_call.get(user) for user in node.users}
        if len(readers) == 1 and (number := readers.pop()) is not None:
            of_call[node] = number
            part = parts[number]
            later = [*part]
            part.clear()
            part.update(dict.fromkeys([node, *later]))


def _gathers(graph: fx.Graph) -> set[fx.Node]:
    """The calls that gather parameters, wait for them, or convert them in another way. Not those
    that only sum the gradient: they belong to the parts that read the parameter.
    """
    placeholders = graph.find_nodes(op="placeholder")
    found = set(placeholders)
    for node in graph.nodes:
        target = operator_of(node.target)
        is_conversion = target in (redistribute, gather_bucket, start_gather, arrived)
        is_item = target is operator.getitem and node.args[0] in found
        is_gather = is_conversion and not is_free_conversion(node)
        if (is_gather or is_item) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found.difference(placeholders)


class _Cutter:
    """Writes the programs of parts, and the one that calls them."""

    def __init__(self, program: fx.GraphModule, roots: Collection[int], run: Run) -> None:
        self._source, self._run = program.graph, run
        self._mesh = self._source.find_nodes(op="placeholder")[0]
        self._results: Sequence[fx.Node] = self._source.output_node().args[0]  # type: ignore[assignment]
        self._roots = [self._results[i] for i in roots]
        self._with_gradient = with_operands(self._roots)
        self._graph, self._copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self._root = nn.Module()

    def join(self, parts: Sequence[Collection[fx.Node]]) -> fx.GraphModule:
        """The program that calls ``parts`` in their order, and gathers where the source does: each
        part is called where the last of its calls stands there.
        """
        waiting = list(enumerate(parts))
        last = {[*part][-1]: number for number, part in waiting}
        inside = {node for part in parts for node in part}
        for node in self._source.nodes:
            is_gather = node.op == "call_function" and node not in inside
            if node.op == "placeholder" or (is_gather and not is_free_conversion(node)):
                self._copy(node)
            while waiting and waiting[0][0] <= last.get(node, -1):
                self._call(*waiting.pop(0))
        self._graph.output(tuple(map(self._copy, self._results)))
        return fx.GraphModule(self._root, self._graph, "Parts")

    def _copy(self, node: fx.Node) -> fx.Node:
        """The copy of a gather, of an input, or of a conversion between parts, with those that it
        needs.
        """
        if node not in self._copies:
            self._copies[node] = self._graph.node_copy(node, self._copy)
        return self._copies[node]

    def _call(self, number: int, part: Collection[fx.Node]) -> None:
        """Calls a part in the joint program."""
        read = dict.fromkeys(n for node in part for n in node.all_input_nodes)
        inputs = [n for n in read if n not in part and n is not self._mesh]
        results = [n for n in part if any(user not in part for user in n.users)]
        roots = [i for i, n in enumerate(results) if self._is_root(n, part)]
        program = self._program(part, inputs, results)
        name = f"part_{number}"
        self._root.add_module(name, Part(program, roots, self._run))
        call = self._graph.call_module(name, tuple(map(self._copy, inputs)))
        for i, result in enumerate(results):
            self._copies[result] = self._graph.call_function(operator.getitem, (call, i))

    def _is_root(self, result: fx.Node, part: Collection[fx.Node]) -> bool:
        """Whether a gradient may come back for a result of a part."""
        readers = [user for user in result.users if user not in part]
        return result in self._roots or any(user in self._with_gradient for user in readers)

    def _program(
        self, part: Iterable[fx.Node], inputs: Iterable[fx.Node], results: Iterable[fx.Node]
    ) -> fx.GraphModule:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (self._mesh, *inputs):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in part:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in results))
        return fx.GraphModule(nn.Module(), graph, "Part")
