"""The costs of a problem at given weights, as tables over the choices of one or a few vertices.

A table does not tell all choices of a vertex apart: choices that make or want the same label are of
one class. The cost of a solution is the sum of the costs of its choices and of one entry of each
table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights, price_bytes
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.space.recompute_policy import OFFLOADED, SAVED

MOST_ENTRIES = 1e7  # of a table
Classes = dict[int, np.ndarray]  # the vertices of a table, each with the class of each choice


class TooWideError(Exception):
    """A table would be too large."""


@dataclass(frozen=True)
class CostTable:
    """Costs of the choices of a few vertices together.

    Attributes:
        classes: for each vertex the class of each of its choices, [choice].
        costs: [class of the first vertex, class of the second, ...]; infinite where choices do not
            go together.
    """

    classes: Classes
    costs: np.ndarray


@dataclass(frozen=True)
class EdgeCosts:
    """The costs of the edge from the producer of a tensor to one port, [label made, label wanted].

    Attributes:
        time: of the conversion; the ports that want one layout pay it together.
        in_backward: of the result in the backward; the ports that need one layout there pay it
            together. Infinite where two labels do not go together.
        sources, targets: the number of the layout of each label made, and of each label wanted.
        needed: whether each label wanted must be available in the backward.
    """

    time: np.ndarray
    in_backward: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    needed: np.ndarray


def vertex_costs(problem: Problem, weights: CostWeights) -> list[np.ndarray]:
    """What each choice of each vertex costs, [choice]; infinite for choices that are not needed."""
    costs = [v.cost(weights) for v in problem.vertices]
    if weights.price.any():
        return costs
    # Where bytes are free, what may be saved is: Problem.free_unneeded_results then frees what no
    # backward reads. A result that is recomputed or freed takes seconds where it is recomputed.
    return [
        np.where(v.available, cost, np.inf) if _may_be_freed(v) else cost
        for v, cost in zip(problem.vertices, costs, strict=True)
    ]


def _may_be_freed(vertex: Vertex) -> bool:
    """Whether the result of a vertex may be freed, and may also be saved."""
    saves = (vertex.states == SAVED) | (vertex.states == OFFLOADED)
    return not vertex.available.all() and bool(saves.any())


def edge_costs(
    problem: Problem, weights: CostWeights, tensor: TensorConversions, port: Port
) -> EdgeCosts:
    """The costs of one port. A conversion costs its time, and for its result in the backward the
    cheaper of saving and recomputing it.
    """
    pairs, weight = problem.label_pairs(tensor, port), weights.of(tensor.count)
    time, labels = weight.converting * pairs.seconds, (pairs.sources[:, 0], pairs.targets[0])
    if not pairs.needed.any():
        return EdgeCosts(time, np.zeros_like(time), *labels, pairs.needed[0])
    recompute = np.where(pairs.available, weight.converting * pairs.recompute_seconds, np.inf)
    save_or_recompute = np.minimum(price_bytes(weight.saved, pairs.nbytes), recompute)
    without_memory = np.where(pairs.available, 0.0, np.inf)
    in_backward = np.where(pairs.moves, save_or_recompute, without_memory)
    return EdgeCosts(time, np.where(pairs.needed, in_backward, 0.0), *labels, pairs.needed[0])


def tensor_tables(
    problem: Problem, weights: CostWeights, tensor: TensorConversions
) -> list[CostTable]:
    """The costs of all conversions of a tensor. A port whose conversions are free has a table of
    its own, if it has any, as it shares no cost with other ports.

    Raises:
        TooWideError: the table of the other ports would be too large.
    """
    edges = [edge_costs(problem, weights, tensor, port) for port in tensor.ports]
    tables: list[CostTable] = []
    shared: list[tuple[Port, EdgeCosts]] = []
    for port, edge in zip(tensor.ports, edges, strict=True):
        costs = edge.time + edge.in_backward
        if ((costs != 0) & (costs != np.inf)).any():
            shared.append((port, edge))
        elif costs.any():
            tables.append(port_table(problem, tensor, port, costs))
    if shared:
        tables.append(_shared_table(problem, tensor, *zip(*shared, strict=True)))
    return tables


def _shared_table(
    problem: Problem,
    tensor: TensorConversions,
    ports: Sequence[Port],
    edges: Sequence[EdgeCosts],
) -> CostTable:
    """The costs of a tensor's conversions for some of its ports, over its producer and the readers
    that have more than one label. Equal conversions, and equal results, are paid once.
    """
    # What has one label is no dim: a tensor may have a hundred readers that all want one layout.
    label_counts = [len(edges[0].sources), *(len(edge.targets) for edge in edges)]
    if math.prod(map(float, label_counts)) > MOST_ENTRIES:
        raise TooWideError
    dim_of = [sum(n > 1 for n in label_counts[:at]) for at in range(len(label_counts))]
    dims = sum(n > 1 for n in label_counts)
    total = np.zeros((1,) * dims)
    for at, edge in enumerate(edges, start=1):
        is_paid, is_kept = np.zeros((), dtype=bool), np.zeros((), dtype=bool)
        for before, other in enumerate(edges[: at - 1], start=1):
            same = other.targets[:, None] == edge.targets[None, :]
            pair = dim_of[before], dim_of[at]
            is_paid = is_paid | _spread(same, pair, dims)
            is_kept = is_kept | _spread(same & other.needed[:, None], pair, dims)
        own = dim_of[0], dim_of[at]
        time, in_backward = (_spread(c, own, dims) for c in (edge.time, edge.in_backward))
        total = total + np.where(is_paid, 0.0, time) + np.where(is_kept, 0.0, in_backward)
    return _of_different_vertices(problem, tensor, ports, total)


def port_table(
    problem: Problem, tensor: TensorConversions, port: Port, costs: np.ndarray
) -> CostTable:
    """A table of costs of one edge, [label made, label wanted]."""
    return _of_different_vertices(problem, tensor, (port,), costs)


def _of_different_vertices(
    problem: Problem, tensor: TensorConversions, ports: Sequence[Port], costs: np.ndarray
) -> CostTable:
    """The table with one dim for each vertex, where one vertex may own several dims of ``costs``,
    [label made, label wanted by the first port, ...], with or without the dims of size 1.
    """
    vertices = problem.vertices
    ends = [(tensor.producer, vertices[tensor.producer].out_label_of)]
    ends += [(v, vertices[v].in_label_of[p]) for v, p in ports]
    if costs.ndim < len(ends):
        ends = [(v, label_of) for v, label_of in ends if label_of.max() > 0]
    of_vertex: dict[int, list[np.ndarray]] = {}
    for v, label_of in ends:
        of_vertex.setdefault(v, []).append(label_of)
    classes = {v: joint_classes(each) for v, each in of_vertex.items()}
    if len(classes) == len(ends):
        return CostTable(classes, costs)
    order = list(classes)
    dims = [
        _spread(label_of[first_choices(classes[v])], (order.index(v),), len(order))
        for v, label_of in ends
    ]
    return CostTable(classes, costs[tuple(dims)])


def _spread(array: np.ndarray, dims: Sequence[int], count: int) -> np.ndarray:
    """An array of a few dims as an array of ``count`` dims; the others have size 1. A dim of
    size 1 is left out.
    """
    shape = [1] * count
    for dim, size in zip(dims, array.shape, strict=True):
        if size > 1:
            shape[dim] = size
    return array.reshape(shape)


def joint_classes(partitions: Sequence[np.ndarray]) -> np.ndarray:
    """The classes of the choices that all partitions put into one class, [choice]."""
    found = partitions[0]
    for other in partitions[1:]:
        if other is not found:
            pairs = found * (int(other.max()) + 1) + other
            found = np.unique(pairs, return_inverse=True)[1]
    return found


def first_choices(classes: np.ndarray) -> np.ndarray:
    """The first choice of each class, [class]."""
    first = np.empty(int(classes.max(initial=-1)) + 1, dtype=np.int64)
    # Of several choices of a class, the one that is written last stays.
    first[classes[::-1]] = np.arange(len(classes))[::-1]
    return first
