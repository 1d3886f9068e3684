"""The calls of a plan on one rank: what memory each reads, makes, and saves for its backward. The plan is not lowered for it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.autograd import Autograd, Strided, contiguous, substituted, with_grad
from autopar.graph import arguments, operands, signature
from autopar.layout import Layout, local_shape, parse_type, show
from autopar.plan import NodePlan, Step
from autopar.rules import Rule
from autopar.runtime.kernels import send
from autopar.stand_ins import cross_entropy_vocabulary


@dataclass(eq=False)
class Memory:
    """One storage, made by a call or a conversion."""

    nbytes: int
    call: Call


@dataclass(eq=False)
class Call:
    """A call or a conversion, on one rank.

    Attributes:
        order: its place in the program: that of the tensor, and that among its conversions.
        stage: None if each stage has its own.
        reads: the memory of its operands; None for parameters, buffers and inputs, which are there anyway.
        saved: what its backward reads of that, and of its results.
        internal: bytes of what else its backward reads.
        cloned: bytes of buffers that are written to, which computing it again needs as they were.
        made: its results' memory.
        later: conversions that go on from this one.
        read: whether anything but a further conversion reads it.
    """

    name: str
    order: tuple[int, int]
    stage: int | None
    reads: list[Memory] = field(default_factory=list)
    saved: list[Memory] = field(default_factory=list)
    internal: int = 0
    cloned: int = 0
    made: list[Memory] = field(default_factory=list)
    later: list[Call] = field(default_factory=list)
    read: bool = True


Memories = tuple[Memory | None, ...]


class Program:
    """One plan's ``calls`` on one rank, in their order, conversions among them.

    Args:
        analysis: of the graph of one microbatch; one that is cut into stages says so by ``meta["stage"]``.
        nodes, conversions: as in a plan.
        sizes: of the mesh of one stage.
        autograd: asked for the device type where the program will run.
    """

    def __init__(
        self,
        analysis: Analysis,
        nodes: Mapping[str, NodePlan],
        conversions: Mapping[str, Mapping[str, tuple[Step, ...]]],
        sizes: Sequence[int],
        autograd: Autograd,
    ) -> None:
        self._analysis, self._nodes, self._conversions, self._sizes, self._autograd = analysis, nodes, conversions, sizes, autograd
        self._values: dict[fx.Node, Any] = {}
        self._memories: dict[fx.Node, Memories] = {}
        self._converted: dict[tuple[fx.Node, tuple[Step, ...]], tuple[Strided, Memory | None, Call]] = {}
        self._chains: dict[int, list[Call]] = {}  # conversions, by the place of what they convert
        self._place = {node: place for place, node in enumerate(analysis.graph.nodes)}
        self.calls: list[Call] = []
        updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        names = {i.target: n for n, i in analysis.state.items()}
        self._written = {names[target] for target, new in zip(analysis.captured.updates, updates, strict=True) if target in names}
        for node, place in self._place.items():
            self._visit(node, place)
        for chain in self._chains.values():
            for number, call in enumerate(chain, 1):
                call.order = call.order[0], number
                self.calls.append(call)
        self.calls.sort(key=lambda call: call.order)

    def _visit(self, node: fx.Node, place: int) -> None:
        if node.op == "placeholder":
            val, self._last_placeholder = node.meta["val"], place
            grad = node in self._analysis.differentiable
            self._values[node] = contiguous(self._local(node), val.dtype, grad) if isinstance(val, torch.Tensor) else val
            self._memories[node] = (None,)
        elif node.target is operator.getitem:
            source, index = node.args
            self._values[node], self._memories[node] = self._values[source][index], (self._memories[source][index],)  # type: ignore
        elif node.target is send:
            self._send(node, place)
        elif node.op == "call_function":
            self._call(node, place)

    def _call(self, node: fx.Node, place: int) -> None:
        chosen, grad, rule = self._nodes[node.name], node in self._analysis.differentiable, self._analysis.rules.get(node)
        call = Call(node.name, (place, 0), self._stage(node))
        tensors, memories = [], []
        for k, (operand, _) in enumerate(operands(node)):
            value, memory = self._operand(operand, chosen.ins[k])
            tensors.append(with_grad(value, grad and operand in self._analysis.differentiable))
            memories.append(memory)
            if operand in self._written or (rule is not None and k in rule.writes):
                call.cloned += _nbytes(value)
        args, kwargs = self._localised(node, rule, chosen, *substituted(node, tensors))
        target = cross_entropy_vocabulary if "cross_entropy_vocabulary" in chosen.kernels else node.target
        answer = self._autograd.ask(target, args, kwargs, self._like(node))  # type: ignore[arg-type]
        made = [memories[r.alias] if r.alias is not None else Memory(r.nbytes, call) for r in answer.results]
        self._values[node], self._memories[node] = answer.value, tuple(made)
        call.reads = [m for m in memories if m is not None]
        call.made = [m for m in made if m is not None and m.call is call]
        read = {memories[k] for k in answer.operands} | {m for m, r in zip(made, answer.results, strict=True) if r.saved}
        call.saved = [m for m in read if m is not None]
        call.internal = sum(answer.internal)
        self.calls.append(call)

    def _send(self, node: fx.Node, place: int) -> None:
        """What arrives in a stage is memory of its own there, and kept like any other that is there to start with."""
        value, _ = self._operand(node.all_input_nodes[0], self._nodes[node.name].ins[0])
        arrived = Memory(_nbytes(value), Call(node.name, (place, 0), self._stage(node)))
        self._values[node], self._memories[node] = contiguous(value.shape, value.dtype, value.grad), (arrived,)

    def _operand(self, node: fx.Node, wanted: Layout) -> tuple[Any, Memory | None]:
        found = self._nodes[node.name].out
        memories = self._memories[node]
        if wanted == found or not isinstance(self._values[node], Strided):
            return self._values[node], memories[0] if len(memories) == 1 else None
        steps, layout = self._conversions[node.name][show(wanted)], list(found)
        at: tuple[Strided, Memory | None, Call | None] = self._values[node], memories[0], None
        for i, (axis, src, dst) in enumerate(steps):
            layout[axis] = parse_type(dst)
            key = (node, tuple(steps[: i + 1]))
            if key not in self._converted:
                moves = self._sizes[axis] > 1 and {src, dst} != {"I", "R"}
                self._converted[key] = self._conversion(node, tuple(layout), *at, moves)
            at = self._converted[key]
        value, memory, last = at
        if last is not None:
            last.read = True
        return value, memory

    def _conversion(
        self, node: fx.Node, layout: Layout, value: Strided, memory: Memory | None, before: Call | None, moves: bool
    ) -> tuple[Strided, Memory | None, Call]:
        """One step, and what it makes: what moves has memory of its own."""
        # Each step stands right behind what it converts, all first steps of inputs behind the last input: before those made so far.
        place = max(self._place[node], self._last_placeholder)
        chain = self._chains.setdefault(place, [])
        call = Call(f"{node.name} -> {show(layout)}", (place, 0), self._stage(node), read=False)
        chain.insert(chain.index(before) + 1 if before is not None else 0, call)
        if before is not None:
            before.later.append(call)
        if not moves:
            return value, memory, call
        moved = contiguous(local_shape(node.meta["val"].shape, layout, self._sizes), value.dtype, value.grad)
        call.made = [Memory(_nbytes(moved), call)]
        call.reads = [memory] if memory is not None else []
        return moved, call.made[0], call

    def _localised(
        self, node: fx.Node, rule: Rule | None, chosen: NodePlan, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one rank's part of an operator (``localise``); a kernel saves what the operator saves on that part."""
        if rule is None or all(f is None for f in chosen.factors):
            return args, kwargs
        new: dict[str, Any] = {}
        if rule.shape_argument:
            new[rule.shape_argument] = list(self._local(node))
        kernel = next((k for k in chosen.kernels if k), None)
        if kernel == "layer_norm":
            new["normalized_shape"] = list(args[0].shape[len(args[0].shape) - len(args[1]) :])
        elif rule.localise and kernel is None:
            splits = [(f, math.prod(n for g, n in zip(chosen.factors, self._sizes, strict=True) if g == f)) for f in chosen.factors if f]
            new.update(rule.localise(arguments(node), dict(splits)))
        for place, (name, _, keyword_only) in enumerate(signature(node.target)):  # type: ignore[arg-type]
            if name in new and place < len(args) and not keyword_only:
                args[place] = new[name]
            elif name in new:
                kwargs[name] = new[name]
        return args, kwargs

    def _local(self, node: fx.Node) -> tuple[int, ...]:
        return local_shape(node.meta["val"].shape, self._nodes[node.name].out, self._sizes)

    def _like(self, node: fx.Node) -> Any:
        val = node.meta["val"]
        return torch.empty(self._local(node), dtype=val.dtype, device="meta") if isinstance(val, torch.Tensor) else val

    def _stage(self, node: fx.Node) -> int | None:
        return node.meta.get("stage", 0) if node.op == "call_function" else None


def _nbytes(value: Strided) -> int:
    return math.prod(value.shape) * value.dtype.itemsize
