"""A device mesh without processes, on which kernels and conversions run with meta tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from autopar.runtime.measure.step_recorder import StepRecorder


@dataclass(frozen=True)
class FakeMesh:
    """A mesh of the given axis sizes, seen from its first rank.

    ``recorder`` records no step; kernels expect a mesh to have one.
    """

    sizes: tuple[int, ...]
    recorder: StepRecorder = field(
        default_factory=lambda: StepRecorder(torch.device("cpu")), compare=False, repr=False
    )

    @property
    def coordinate(self) -> tuple[int, ...]:
        return (0,) * len(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.sizes))))

    def count(self, axes: Iterable[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Iterable[int]) -> int:
        return 0

    def group(self, axis: int) -> FakeGroup:
        return self.axes_group((axis,))

    def axes_group(self, axes: Iterable[int]) -> FakeGroup:
        key = tuple(axes)
        return FakeGroup(self.count(key), ",".join(map(str, key)))


@dataclass(frozen=True)
class FakeGroup:
    """A process group of this many ranks, named after its mesh axes."""

    ranks: int
    group_name: str

    def size(self) -> int:
        return self.ranks
