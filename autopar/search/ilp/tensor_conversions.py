"""A tensor of the problem, and its conversions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.layout import Layout

Port = tuple[int, int]  # (vertex, operand)


@dataclass
class TensorConversions:
    """A tensor, the ports that read it, and its conversions. Tables are [source layout, target
    layout].

    Attributes:
        producer: the vertex that makes the tensor.
        ports: the ports that read it.
        count: how many tensors of equal blocks this one stands for in each stage, [stage].
        sources, targets: the numbers of the layouts that are made and wanted.
        seconds: of a conversion, forward and backward.
        beside: seconds of the readers' backward that a compiled program computes while ranks sum
            the gradient of the tensor, [target layout].
        recompute_seconds: of the forward of a conversion in the backward; infinite where the
            conversion must not be recomputed.
        moves: whether the result of a conversion has memory of its own.
        nbytes: of the tensor in each target layout, [target layout]; infinite where it must not
            be saved.
    """

    producer: int
    ports: tuple[Port, ...]
    count: np.ndarray
    sources: dict[Layout, int]
    targets: dict[Layout, int]
    seconds: np.ndarray
    beside: np.ndarray
    recompute_seconds: np.ndarray
    moves: np.ndarray
    nbytes: np.ndarray
