"""The kernels of a program whose compiler fuses chains of pointwise operators and reductions.

A compiler such as inductor computes such a chain in one kernel, which reads each of its inputs once
and writes only what other kernels read. The backward computes the values between them again, so
these are not saved (Ansel et al., PyTorch 2, ASPLOS 2024). Products, attention, convolutions, norms
of channels and scattered writes stay kernels of their own. Two neighbours are in one chain where no
other kernel has to run between them.

This is a model of the bytes, and not the compiler's own decision: a chain counts as one kernel
however long it is, also across conversions of layouts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch.fx as fx

from autopar.ir.nodes import operands, result_tensors
from autopar.kernel_trace.kernel_launches import FUSED_READS, KernelLaunch, fuse
from autopar.memory.saved_tensors import SavedTensors
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.pricing.node_sizes import tensor_bytes


class FusedKernels:
    """The kernels of each node of a graph.

    Args:
        nodes: all nodes of the graph, in its order.
        differentiable: the nodes that need a gradient.
        saved: what autograd saves of each node, or of one of several equal nodes.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        differentiable: Collection[fx.Node],
        saved: Mapping[fx.Node, SavedTensors],
    ) -> None:
        nodes, self._differentiable, self._saved = list(nodes), differentiable, saved
        self._of_target: dict[Any, SavedTensors] = {}
        for node, each in saved.items():
            self._of_target.setdefault(node.target, each)
        calls = [n for n in nodes if n.op == "call_function" and n.target is not send]
        calls = [n for n in calls if not self._is_view(n)]
        self._fused = {n for n in calls if fuse(self._saved_of(n).forward)}
        self._fused_back = {n for n in calls if fuse(self._saved_of(n).backward)}
        self._depth = self._depths(nodes, self._fused, self._sources)
        self._backward_depth = self._depths(nodes[::-1], self._fused_back, self._gradient_readers)
        self._first, self._first_back = _FirstReaders(), _FirstReaders()
        for node in nodes:
            if node in self._fused:
                self._first.add(self._depth[node], node, self._forward_reads(node))
        for node in nodes[::-1]:
            if node in differentiable and node in self._fused_back:
                depth = self._backward_depth[node]
                self._first_back.add(depth, node, self._saved_reads(node))

    def launches(self, node: fx.Node) -> Iterator[tuple[bool, KernelLaunch]] | None:
        """The kernels of a node's forward and backward; with each, whether it belongs to the
        backward. None for a node whose kernels stay as they are without fusion.
        """
        forward, backward = node in self._fused, node in self._fused_back
        return self._launches(node, forward, backward) if forward or backward else None

    def _launches(
        self, node: fx.Node, forward: bool, backward: bool
    ) -> Iterator[tuple[bool, KernelLaunch]]:
        saved = self._saved_of(node)
        if forward:
            yield from _kernel(False, self._forward_touched(node))
        else:
            yield from ((False, launch) for launch in saved.forward)
        if node not in self._differentiable:
            return
        if backward:
            yield from _kernel(True, self._backward_touched(node))
        else:
            yield from ((True, launch) for launch in saved.backward)

    # What a kernel reads and writes: the place of a tensor, as in KernelLaunch, and its bytes.

    def _forward_touched(self, node: fx.Node) -> list[tuple[int, int]]:
        own = self._first.of(node)
        touched = [
            (place, min(nbytes, tensor_bytes(node)) if _picks(node) else nbytes)
            for source, (place, nbytes) in self._forward_reads(node).items()
            if source in own
        ]
        internal = int(self._saved_of(node).nbytes)
        if 0 < internal < tensor_bytes(operands(node)[0][0]):  # statistics, or a mask
            touched.append((0, internal))
        if self._is_written(node):
            touched.append((-1, tensor_bytes(node)))
        return touched

    def _backward_touched(self, node: fx.Node) -> list[tuple[int, int]]:
        own, saved = self._first_back.of(node), self._saved_of(node)
        parts = self._gradient_parts(node)
        arriving = [part for part in parts if not self._fuses_back(node, part[0])]
        touched = [(-1, tensor_bytes(node)) for _ in arriving]
        touched += [at for source, at in self._saved_reads(node).items() if source in own]
        if saved.nbytes:
            whole = tensor_bytes(operands(node)[0][0])
            touched.append((0, int(min(saved.nbytes, whole))))
        for k, (operand, _) in enumerate(operands(node)):
            source = self._behind_views(operand)
            if operand not in self._differentiable or self._fuses_back(source, node):
                continue
            if any(node is part[0] for part in self._gradient_parts(source)):
                touched.append((k, tensor_bytes(operand)))
        return touched

    def gradient_sums(self, node: fx.Node) -> int:
        """How many kernels add up the gradients of a node whose backward is not fused. (A fused
        backward adds them up as it reads them.)
        """
        if node in self._fused_back or self._is_view(node):
            return 0
        return max(len(self._gradient_parts(node)) - 1, 0)

    def _gradient_parts(self, node: fx.Node) -> list[list[fx.Node]]:
        """The readers whose backward returns a gradient of ``node``, kernel by kernel."""
        parts: dict[fx.Node | int, list[fx.Node]] = {}
        for reader in self._gradient_readers(node):
            is_fused = reader in self._fused_back
            key = self._backward_depth[reader] if is_fused else reader
            parts.setdefault(key, []).append(reader)
        return list(parts.values())

    def _forward_reads(self, node: fx.Node) -> dict[fx.Node, tuple[int, int]]:
        """The tensors in memory that a fused node reads, which other nodes of its chain may read,
        too.
        """
        found: dict[fx.Node, tuple[int, int]] = {}
        for k, (operand, _) in enumerate(operands(node)):
            source = self._behind_views(operand)
            if not self._fuses(source, node):
                found.setdefault(source, (k, tensor_bytes(operand)))
        return found

    def _saved_reads(self, node: fx.Node) -> dict[fx.Node, tuple[int, int]]:
        """The tensors in memory from which a node's backward has, or computes again, the values
        that autograd saves for it.
        """
        saved, tensors = self._saved_of(node), operands(node)
        found: dict[fx.Node, tuple[int, int]] = {}
        wanted = [(k, tensors[k][0]) for k in sorted(saved.operands)]
        for place, tensor in [*wanted, *([(-1, node)] if saved.output else [])]:
            for source in self._in_memory(self._behind_views(tensor)):
                found.setdefault(source, (place, min(tensor_bytes(source), tensor_bytes(tensor))))
        return found

    def _in_memory(self, node: fx.Node) -> dict[fx.Node, None]:
        """``node``, or, where it is never written, the written tensors that it is computed from."""
        found, seen, rest = dict[fx.Node, None](), {node}, [node]
        while rest:
            each = rest.pop()
            if each not in self._fused or self._is_written(each):
                found[each] = None
                continue
            before = [n for n in dict.fromkeys(self._sources(each)) if n not in seen]
            seen.update(before)
            rest += before
        return found

    # Which nodes are in one chain.

    def _fuses(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether the forward passes a tensor from ``source`` to ``reader`` inside a kernel."""
        return (
            source in self._fused
            and reader in self._fused
            and self._depth[source] == self._depth[reader]
        )

    def _fuses_back(self, source: fx.Node, reader: fx.Node) -> bool:
        """Whether the backward passes a gradient from ``reader`` to ``source`` inside a kernel."""
        return (
            source in self._fused_back
            and reader in self._fused_back
            and self._backward_depth[source] == self._backward_depth[reader]
        )

    def _is_written(self, node: fx.Node) -> bool:
        """Whether a fused node's result goes to memory: a kernel outside of its chain reads it, or
        nothing does.
        """
        readers = self._readers(node)
        return not readers or any(not self._fuses(node, reader) for reader in readers)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a call makes no tensor of its own."""
        if node.op != "call_function" or node.target is send:
            return False
        return node.target is operator.getitem or not self._saved_of(node).forward

    def _saved_of(self, node: fx.Node) -> SavedTensors:
        found = self._saved.get(node) or self._of_target.get(node.target)
        return found or SavedTensors(frozenset(), False, 0.0, None)

    def _behind_views(self, node: fx.Node) -> fx.Node:
        """The node whose storage ``node`` is a view of."""
        while self._is_view(node) and (tensors := operands(node)):
            alias = self._saved_of(node).alias
            node = tensors[alias if alias is not None and alias < len(tensors) else 0][0]
        return node

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [self._behind_views(n) for n, _ in operands(node)]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that read ``node`` or a view of it."""
        found, rest = list[fx.Node](), list(node.users)
        while rest:
            reader = rest.pop(0)
            if self._is_view(reader):
                rest += reader.users
            else:
                found.append(reader)
        return found

    def _gradient_readers(self, node: fx.Node) -> list[fx.Node]:
        """The readers whose backward returns a gradient of ``node``."""
        return [n for n in self._readers(node) if n in self._differentiable]

    def _depths(
        self,
        order: Iterable[fx.Node],
        fused: Collection[fx.Node],
        before: Callable[[fx.Node], list[fx.Node]],
    ) -> dict[fx.Node, int]:
        """For each node the most kernels that are not fused on a path to it. Fused nodes of one
        depth may share a kernel, since no other kernel runs between them.
        """
        found: dict[fx.Node, int] = {}
        for node in order:
            if not self._is_view(node):
                found[node] = max((found[n] + (n not in fused) for n in before(node)), default=0)
        return found


class _FirstReaders:
    """Of the nodes of one chain that read a tensor, the first one counts the bytes."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, fx.Node]] = set()
        self._own: dict[fx.Node, set[fx.Node]] = {}

    def add(self, depth: int, node: fx.Node, sources: Iterable[fx.Node]) -> None:
        own = {source for source in sources if (depth, source) not in self._seen}
        self._seen |= {(depth, source) for source in own}
        self._own[node] = own

    def of(self, node: fx.Node) -> set[fx.Node]:
        return self._own.get(node, set())


def _kernel(late: bool, touched: list[tuple[int, int]]) -> Iterator[tuple[bool, KernelLaunch]]:
    if touched:
        yield late, KernelLaunch("fused", "elementwise", tuple(touched), touched[-1][0])


def _picks(node: fx.Node) -> bool:
    """Whether a call reads no more than it writes."""
    return getattr(node.target, "__name__", "").split(".")[0] in FUSED_READS and bool(
        result_tensors(node)
    )
