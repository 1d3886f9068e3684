"""A vertex of the problem: a node of the graph with its choices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout, Type
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.space.recompute_policy import FREED, OFFLOADED, SAVED
from autopar.search.space.strategies import Choice, types_by_axis

COSTS = ("forward", "backward", "copying", "send", "step", "kept", "state")
Label = tuple[Layout, bool]  # a layout, and whether the tensor is available in the backward


@dataclass
class Vertex:
    """A node and its choices. Arrays are [choice] and hold for one occurrence on one rank.

    Attributes:
        node: the node of the graph, a representative.
        count: how often the node occurs in each stage, [stage].
        choices: the strategies. A strategy stands several times, once for each state.
        states: FREED, SAVED, RECOMPUTED or OFFLOADED.
        available: whether the result is available in the backward.
        needs: for each operand, whether it must be available in the backward.
        forward, backward: seconds of a microbatch; ``backward`` includes recomputation, and both
            include the copies to the host and back.
        copying: their part that copies to the host and back.
        send: seconds of sending between stages, of a microbatch.
        step: seconds once a step.
        kept: bytes that are saved for each microbatch in flight.
        state: bytes that last from step to step.
        result: bytes of the result.
        out_labels: the distinct labels of the result.
        out_label_of: the number of the result's label.
        in_labels: for each operand, the distinct labels.
        in_label_of: for each operand, the number of its label.
    """

    node: fx.Node
    count: np.ndarray
    choices: Sequence[Choice]
    states: np.ndarray
    available: np.ndarray
    needs: list[np.ndarray]
    forward: np.ndarray
    backward: np.ndarray
    send: np.ndarray
    step: np.ndarray
    copying: np.ndarray
    kept: np.ndarray
    state: np.ndarray
    result: np.ndarray
    out_labels: list[Label] = field(init=False)
    out_label_of: np.ndarray = field(init=False)
    in_labels: list[list[Label]] = field(init=False)
    in_label_of: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.out_labels, self.out_label_of = _distinct(
            [(c.out, bool(a)) for c, a in zip(self.choices, self.available, strict=True)]
        )
        ports = [
            _distinct([(c.ins[p], bool(n)) for c, n in zip(self.choices, need, strict=True)])
            for p, need in enumerate(self.needs)
        ]
        self.in_labels = [labels for labels, _ in ports]
        self.in_label_of = [numbers for _, numbers in ports]

    @cached_property
    def costs(self) -> np.ndarray:
        """The seconds and bytes of the names COSTS, [choice, name]."""
        return np.stack([getattr(self, name) for name in COSTS], axis=1)

    def cost(self, weights: CostWeights) -> np.ndarray:
        """What each choice costs in all occurrences together, [choice]."""
        w = weights.of(self.count)
        # In the order of COSTS. Forward and backward contain the copies.
        of_costs = w.forward, w.backward, 0.0, w.send, w.step, w.saved, w.state
        return (self.costs * of_costs).sum(axis=1)

    def of_node(self, node: fx.Node, count: np.ndarray) -> Vertex:
        """The vertex of another node with the same choices and costs, which occurs ``count``
        times, [stage].
        """
        other = copy.copy(self)
        other.node, other.count = node, count
        return other

    @cached_property
    def freed_choices(self) -> dict[int, int]:
        """For each choice that saves the result, on the device or on the host, the choice of the
        same strategy that frees it.
        """
        freed = {id(c): k for k, c in enumerate(self.choices) if self.states[k] == FREED}
        return {
            k: freed[id(c)]
            for k, c in enumerate(self.choices)
            if self.states[k] in (SAVED, OFFLOADED) and id(c) in freed
        }

    @cached_property
    def axis_types(self) -> tuple[np.ndarray, dict[tuple[Type, ...], int]]:
        """The types of all tensors of each choice along each axis as a number, [choice, axis]; and
        the number of each combination of types.
        """
        number_of: dict[tuple[Type, ...], int] = {}
        of_choice: dict[int, list[int]] = {}  # a strategy stands several times
        for choice in self.choices:
            if id(choice) not in of_choice:
                by_axis = types_by_axis(choice)
                of_choice[id(choice)] = [number_of.setdefault(t, len(number_of)) for t in by_axis]
        numbers = [of_choice[id(choice)] for choice in self.choices]
        return np.array(numbers, dtype=np.int32), number_of

    def with_choices(self, numbers: Sequence[int] | np.ndarray) -> Vertex:
        """The vertex with only the choices of these numbers."""
        left = np.asarray(numbers)
        other = copy.copy(self)
        for name in ("costs", "freed_choices", "axis_types"):
            other.__dict__.pop(name, None)
        for name in (*COSTS, "states", "available", "result"):
            setattr(other, name, getattr(self, name)[left])
        other.choices = [self.choices[i] for i in left]
        other.needs = [need[left] for need in self.needs]
        other.out_labels, other.out_label_of = _labels_left(
            self.out_labels, self.out_label_of[left]
        )
        ports = [
            _labels_left(labels, label_of[left])
            for labels, label_of in zip(self.in_labels, self.in_label_of, strict=True)
        ]
        other.in_labels = [labels for labels, _ in ports]
        other.in_label_of = [numbers for _, numbers in ports]
        return other


def _distinct(labels: list[Label]) -> tuple[list[Label], np.ndarray]:
    """The distinct labels, and the number of each label among them."""
    places: dict[Label, int] = {}
    numbers = np.array([places.setdefault(label, len(places)) for label in labels], dtype=np.int64)
    return list(places), numbers


def _labels_left(labels: list[Label], numbers: np.ndarray) -> tuple[list[Label], np.ndarray]:
    """The labels of these numbers, each once, and the number of each among them."""
    left = list(dict.fromkeys(numbers.tolist()))
    place = np.zeros(len(labels), dtype=np.int64)
    place[left] = np.arange(len(left))
    return [labels[i] for i in left], place[numbers]
