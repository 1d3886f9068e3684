"""A lower bound of the cost of a problem without a solve, for many weights of one problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.tensor_conversions import TensorConversions
from autopar.search.ilp.vertex import Vertex


class LowerBound:
    """Every vertex takes its cheapest choice, with the result converted only for the reader whose
    cheapest label is the dearest to convert to.
    """

    def __init__(self, vertices: Sequence[Vertex], tensors: Sequence[TensorConversions]) -> None:
        self._counts = np.array([v.count for v in vertices])  # [vertex, stage]
        self._sizes = np.array([len(v.choices) for v in vertices])
        self._starts = np.cumsum([0, *self._sizes[:-1]])
        # Each array has the choices of all vertices, one vertex after the other.
        names = ("forward", "backward", "step", "send", "kept", "state")
        self._costs = [np.concatenate([getattr(v, name) for v in vertices]) for name in names]
        converting = [_least_seconds(vertices, tensor) for tensor in tensors]
        seconds = np.concatenate([np.zeros(0), *converting])
        # Where no conversion leads to a reader's layouts, no price makes the choice possible.
        self._possible = np.isfinite(seconds)
        self._converting = np.where(self._possible, seconds, 0.0)
        self._tensor_counts = np.array([t.count for t in tensors]).reshape(
            -1, self._counts.shape[1]
        )
        self._tensor_sizes = np.array([len(seconds) for seconds in converting], dtype=np.int64)
        self._converted = np.array(self._choices([t.producer for t in tensors]), dtype=np.int64)

    def _choices(self, vertices: Sequence[int]) -> list[int]:
        """The places of the choices of these vertices."""
        starts, sizes = self._starts.tolist(), self._sizes.tolist()
        return [i for v in vertices for i in range(starts[v], starts[v] + sizes[v])]

    def at(self, weights: CostWeights) -> float:
        """A cost that no solution is below at the weights."""
        saved = weights.price * weights.flight
        seconds = weights.forward, weights.backward, weights.step, weights.send
        of_vertex = self._counts @ np.array([*seconds, saved, weights.price]).T
        costs = np.zeros(int(self._sizes.sum()))
        for weight, values in zip(of_vertex.T, self._costs, strict=True):
            if weight.any():
                costs += np.repeat(weight, self._sizes) * values
        of_tensor = np.repeat(self._tensor_counts @ weights.converting, self._tensor_sizes)
        np.add.at(costs, self._converted, of_tensor * self._converting)
        costs[self._converted[~self._possible]] = np.inf
        return float(np.minimum.reduceat(costs, self._starts).sum())

    def least_bytes(self, in_flight: float, state: float) -> np.ndarray:
        """The least bytes of one occurrence of each vertex, [vertex].

        Args:
            in_flight: by which saved bytes are multiplied.
            state: by which bytes that last are.
        """
        kept, lasting = self._costs[-2:]
        least: np.ndarray = np.minimum.reduceat(kept * in_flight + lasting * state, self._starts)
        return least


def _least_seconds(vertices: Sequence[Vertex], tensor: TensorConversions) -> np.ndarray:
    """Seconds of one conversion that each choice of the producer makes necessary, [choice]."""
    producer = vertices[tensor.producer]
    dearest = np.zeros(len(tensor.sources))
    for v, p in tensor.ports:
        targets = [tensor.targets[layout] for layout, _ in vertices[v].in_labels[p]]
        dearest = np.maximum(dearest, tensor.seconds[:, targets].min(axis=1))
    sources = np.array([tensor.sources[layout] for layout, _ in producer.out_labels])
    return dearest[sources[producer.out_label_of]]
