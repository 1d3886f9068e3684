"""The objective: how seconds and bytes in each stage are weighed, and what a solution costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np


class NodeWeights(NamedTuple):
    """What a second or a byte of one node counts, in all stages where the node occurs together.

    Attributes:
        forward, backward: for a second of the forward, or the backward, of one microbatch, without
            conversions.
        converting: for a second of conversions of one microbatch.
        step: for a second once a step.
        send: for a second of sending between stages, in one microbatch.
        saved: for a byte that is saved for each microbatch in flight.
        state: for a byte that lasts from step to step.
    """

    forward: float
    backward: float
    converting: float
    step: float
    send: float
    saved: float
    state: float


@dataclass(frozen=True)
class CostWeights:
    """What a second and a byte count in each stage. Arrays are [stage].

    Attributes:
        forward, backward: for a second of the forward, or the backward, of one microbatch, without
            conversions.
        converting: for a second of conversions of one microbatch.
        step: for a second once a step.
        send: for a second of sending between stages, in one microbatch.
        price: seconds for each byte.
        flight: the microbatches in flight, for each of which activations are saved.
    """

    forward: np.ndarray
    backward: np.ndarray
    converting: np.ndarray
    step: np.ndarray
    send: np.ndarray
    price: np.ndarray
    flight: np.ndarray

    @staticmethod
    def of_one_stage(microbatches: int = 1, price: float = 0.0, flight: float = 1.0) -> CostWeights:
        """The weights of a problem with one stage."""
        micro = float(microbatches)
        weights = (micro, micro, micro, 1.0, 1.0, price, flight)
        return CostWeights(*(np.array([weight]) for weight in weights))

    def of(self, count: np.ndarray) -> NodeWeights:
        """The weights of a node that occurs ``count`` times, [stage]."""
        return NodeWeights(*(count @ self._by_stage).tolist())

    @cached_property
    def _by_stage(self) -> np.ndarray:
        """The weights of a node that occurs once, [stage, weight]."""
        seconds = self.forward, self.backward, self.converting, self.step, self.send
        return np.stack([*seconds, self.price * self.flight, self.price], axis=1)


@dataclass(frozen=True)
class CostBreakdown:
    """What a solution costs. Arrays are [stage].

    Attributes:
        forward, backward: seconds of a microbatch, on one rank. All conversions count to
            ``backward``.
        recomputation: the part of ``backward`` that recomputes results.
        copying: the part of ``forward`` and ``backward`` that copies results to the host and back.
        converting: the part of ``backward`` that converts tensors for the first time.
        converting_again: the part of ``recomputation`` that converts tensors again.
        send: seconds of sending between stages, of a microbatch.
        step: seconds once a step.
        kept: bytes that are saved for each microbatch in flight.
        state: bytes that last from step to step.
    """

    forward: np.ndarray
    backward: np.ndarray
    recomputation: np.ndarray
    copying: np.ndarray
    converting: np.ndarray
    converting_again: np.ndarray
    send: np.ndarray
    step: np.ndarray
    kept: np.ndarray
    state: np.ndarray

    def cost(self, weights: CostWeights) -> float:
        """The objective, in seconds."""
        conversions = self.converting + self.converting_again
        seconds = (
            weights.forward @ self.forward
            + weights.backward @ (self.backward - conversions)
            + weights.converting @ conversions
            + weights.step @ self.step
            + weights.send @ self.send
        )
        return float(seconds + weights.price @ self.nbytes(weights))

    def seconds(self, weights: CostWeights) -> float:
        """The objective where bytes cost nothing."""
        return self.cost(replace(weights, price=np.zeros_like(weights.price)))

    def nbytes(self, weights: CostWeights) -> np.ndarray:
        """Bytes of a device, [stage]."""
        return self.state + weights.flight * self.kept


def price_bytes(price: float, nbytes: np.ndarray) -> np.ndarray:
    """What bytes cost at a price. Infinite bytes, which must not be saved, cost infinitely much
    even where bytes are free.
    """
    return np.where(np.isfinite(nbytes), price * np.where(np.isfinite(nbytes), nbytes, 0.0), np.inf)
