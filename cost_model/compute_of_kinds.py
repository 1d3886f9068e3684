"""Seconds of local work where devices are of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.compute import ComputeCosts, FloatArray

# Whose seconds a price has: those of the kind of this number, or for each kernel and collective
# those of the slowest or of the fastest kind.
Pace = int | Literal["slowest", "fastest"]


def compute_costs(cluster: Cluster, pace: Pace, tf32: bool = False) -> ComputeCosts:
    """Seconds of local work on a cluster; ``tf32`` as for :class:`ComputeCosts`."""
    kinds = [ComputeCosts(kind, tf32) for kind in cluster.kinds]
    if isinstance(pace, int):
        return kinds[pace]
    return kinds[0] if len(kinds) == 1 else ComputeOfKinds(kinds, pace == "slowest")


class ComputeOfKinds(ComputeCosts):
    """The same work on devices of several kinds: it takes as long as on the slowest of them, or
    else as on the fastest.
    """

    def __init__(self, kinds: Sequence[ComputeCosts], is_slowest: bool) -> None:
        self._kinds = kinds
        self._longest, self._lowest = (np.max, np.min) if is_slowest else (np.min, np.max)

    @property
    def overhead(self) -> float:
        return float(self._longest([kind.overhead for kind in self._kinds]))

    @property
    def device_kind(self) -> str:
        return self._kinds[0].device_kind

    @property
    def fuses(self) -> bool:
        return all(kind.fuses for kind in self._kinds)

    @property
    def overlap(self) -> float:
        return float(self._lowest([kind.overlap for kind in self._kinds]))

    def peak(
        self, kind: str, dtype: str, work: FloatArray | float, operator: str = ""
    ) -> FloatArray:
        rates = [each.peak(kind, dtype, work, operator) for each in self._kinds]
        found: FloatArray = self._lowest(rates, axis=0)
        return found

    def seconds(self, *args: Any, **kwargs: Any) -> FloatArray:
        taken: FloatArray = self._longest(
            [each.seconds(*args, **kwargs) for each in self._kinds], axis=0
        )
        return taken

    def optimizer_seconds(self, nbytes: float, copied: float = 0.0) -> float:
        each = [kind.optimizer_seconds(nbytes, copied) for kind in self._kinds]
        return float(self._longest(each))

    def host_copy_seconds(self, nbytes: FloatArray) -> FloatArray:
        taken: FloatArray = self._longest(
            [each.host_copy_seconds(nbytes) for each in self._kinds], axis=0
        )
        return taken
