"""A program of one rank as a graph that a compiler takes: it takes tensors alone, its random
kernels draw from one of them, and backwards begin at some of its results alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from autopar.capture.function_operator import FunctionOperator
from autopar.errors import RunError
from autopar.runtime.communication.arrivals import arrived
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.compilation import random_masks
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.pipeline.recompute import RecomputedOperator, operator_of

aten = torch.ops.aten

_SAVED, _RECOMPUTED = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


class CompilerGraph:
    """``program``, which takes the mesh and tensors, as a graph that takes the tensors alone.

    AOTAutograd's backward takes a gradient for each result that has one, and autograd fills in
    zeros where none arrives. It would take their memory, and parameters on which the loss does not
    depend would get gradients of zeros instead of None. So all results are detached but those at
    the places ``roots``, where backwards begin.

    Where two results are one memory, AOTAutograd takes one for a view of the other, and leaves out
    the backward of the call between them. So a result of a call with its own backward, which may
    return its operand, is copied.

    Attributes:
        module: the graph.
        first_draw: the number of the first call that draws random numbers; None where none does.
            If one does, the graph takes one more tensor, the moment: see
            :func:`random_masks.keep_mask`.

    Raises:
        RunError: the program has a kernel that is not compiled.
    """

    def __init__(self, program: fx.GraphModule, mesh: Mesh, roots: Collection[int]) -> None:
        # The tracer must not leave marks in the recorder of the running step.
        self._mesh = mesh.copy_for_program()
        nodes = list(program.graph.nodes)
        numbers = [_draw_number(node) for node in nodes if _draws(node)]
        self.first_draw = min(numbers, default=None)
        root = nn.Module()
        root.mesh = self._mesh  # type: ignore[assignment]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs[1:]:
            copies[node] = graph.placeholder(node.name)
        moment = graph.placeholder("moment") if numbers else None
        copies[inputs[0]] = graph.get_attr("mesh")
        for node in nodes:
            if node.target is arrived:
                copies[node] = copies[node.args[0]]  # type: ignore[index]
            elif node.op != "placeholder":
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
                copy.meta = _tags(node)
                copy.target = operator_of(node.target)
                if _draws(node):
                    assert moment is not None
                    self._draw_from(moment, node, copy)
        _write_results(graph, roots)
        self.module = fx.GraphModule(root, graph, "Program")

    def structure(self) -> Hashable:
        """Equal for graphs that compute the same with the same arguments."""
        nodes = self.module.graph.nodes
        number = {node: f"%{i}" for i, node in enumerate(nodes)}

        def text(arguments: Any) -> str:
            return repr(fx.map_arg(arguments, lambda node: _Name(number[node])))

        return tuple(
            (
                node.op,
                None if node.op == "placeholder" else node.target,
                text(node.args),
                text(node.kwargs),
                node.meta.get("recompute"),
            )
            for node in nodes
        )

    def _draw_from(self, moment: fx.Node, node: fx.Node, copy: fx.Node) -> None:
        """Replaces a random kernel by one that draws from the tensor ``moment``."""
        *operands, number, axes = copy.args
        draw = moment, number - self.first_draw, self._mesh.index(axes)  # type: ignore[operator, arg-type]
        if operator_of(node.target) is graph_kernels.dropout:
            copy.target, copy.args = random_masks.dropout, (*operands[:2], *draw)
        else:
            copy.target, copy.args = random_masks.attention, (*operands[:-1], *draw)


class _Name(str):
    """A node in the text of a call's arguments."""

    def __repr__(self) -> str:
        return str(self)


def _write_results(graph: fx.Graph, roots: Collection[int]) -> None:
    """Detaches the results of ``graph`` but those at the places ``roots``, and gives these memory
    of their own.
    """
    output = graph.output_node()
    results: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]

    def written(place: int, result: fx.Node) -> fx.Node:
        if place not in roots:
            return graph.call_function(aten.detach.default, (result,))
        if any(map(_may_return_operand, (result, *_through_views(result, _viewed)))):
            return graph.call_function(aten.clone.default, (result,))
        return result

    with graph.inserting_before(output):
        output.args = (tuple(written(i, n) for i, n in enumerate(results)),)


def is_free_conversion(node: fx.Node) -> bool:
    """Whether a call converts a tensor, and returns it as it is; its gradient may be another."""
    return operator_of(node.target) is redistribute and {*node.args[3:5]} <= {"I", "R"}


def _may_return_operand(node: fx.Node) -> bool:
    """Whether a call with its own backward may return its operand as it is."""
    return is_free_conversion(node) or isinstance(operator_of(node.target), FunctionOperator)


def _viewed(node: fx.Node) -> list[fx.Node]:
    """What a view is of."""
    return node.all_input_nodes if _is_view(node) else []


def _draws(node: fx.Node) -> bool:
    return node.op == "call_function" and graph_kernels.draws_random_numbers(
        operator_of(node.target), node.args
    )


def _draw_number(node: fx.Node) -> int:
    """The number from which a call's random numbers follow; RunError if none does."""
    kernel = operator_of(node.target)
    if kernel not in (graph_kernels.dropout, graph_kernels.attention):
        raise RunError(
            f'backend="inductor" compiles no {getattr(kernel, "__name__", kernel)} that draws '
            f'random numbers (node {node.name}): plan with backend="eager", or without it'
        )
    return node.args[-2]  # type: ignore[return-value]


def _tags(node: fx.Node) -> dict[str, Any]:
    """What AOTAutograd reads of a node when it divides forward and backward: whether the backward
    must have its result saved, or must recompute it. Without a tag the compiler decides; it
    recomputes only what is cheap.
    """
    if node.op != "call_function":
        return {}
    made_by = _through_views(node, lambda n: n.all_input_nodes)
    if _is_recomputed(node) or (_is_view(node) and any(map(_is_recomputed, made_by))):
        return {"recompute": _RECOMPUTED, "ac_graph_id": 0}
    if _is_view(node):
        return {}
    read_by = _through_views(node, lambda n: n.users)
    old_value = node.target is aten.clone.default and node.all_input_nodes[0].op == "placeholder"
    # Nothing is drawn twice that the plan does not recompute. A copy of a buffer is there because
    # the buffer has another value by the time of the backward. And what is next to a recomputed
    # call must be saved, or the compiler would recompute it from there, where the plan does not.
    saved = old_value or _draws(node) or any(map(_is_recomputed, (*made_by, *read_by)))
    return {"recompute": _SAVED} if saved else {}


def _is_recomputed(node: fx.Node) -> bool:
    """Whether the backward recomputes a call. It does not where the call reads or writes a buffer
    that has another value by then: its result is saved.
    """
    target = node.target
    return isinstance(target, RecomputedOperator) and not target.changing and not _is_view(node)


def _is_view(node: fx.Node) -> bool:
    """Whether a call makes no memory of its own. Its result is then where its operand is."""
    operator_ = operator_of(node.target)
    return operator_ is operator.getitem or getattr(operator_, "is_view", False)


def _through_views(node: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """The nodes that ``step`` leads to from ``node``, and from views among them."""
    found, rest = list[fx.Node](), list(step(node))
    while rest:
        found.append(other := rest.pop())
        if _is_view(other):
            rest += step(other)
    return found
