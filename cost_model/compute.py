"""Seconds of one kernel: the larger of arithmetic and memory traffic (the roofline of Williams,
Waterman and Patterson, 2009), each at the efficiency that such kernels reach for their size, and
the time to launch it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.device import KERNEL_KINDS, Curve, Device

FloatArray = npt.NDArray[np.float64]
ARITHMETIC = KERNEL_KINDS[:3]  # kinds whose work is FLOPs; of the others it is bytes


class Compute:
    """Prices of local work on one device of a cluster; ``tf32``: float32 products run on tensor
    cores.
    """

    def __init__(self, cluster: Cluster, tf32: bool = False) -> None:
        self._device, self._tf32 = cluster.device, tf32

    @property
    def overhead(self) -> float:
        """Seconds of a step besides its kernels."""
        return self._device.overhead

    @property
    def device_kind(self) -> str:
        """Of the cluster's devices: "cpu" or "cuda"."""
        return self._device.kind

    @property
    def overlap(self) -> float:
        """The part of a collective that costs nothing beside other work."""
        return self._device.overlap

    def peak(
        self, kind: str, dtype: str, work: FloatArray | float, operator: str = ""
    ) -> FloatArray:
        """FLOP/s, or B/s, that kernels of a kind with so much ``work`` reach. A dtype without a
        figure (integers) computes as float32.
        """
        name = dtype.removeprefix("torch.")
        if kind in ARITHMETIC:
            name = "tf32" if self._tf32 and name == "float32" else name
            return self._device.peak.get(name, self._device.peak["float32"]) * _at(
                self._curve(kind, name, operator), work
            )
        return self._device.memory_bandwidth * _at(self._curve(kind, name, operator), work)

    def seconds(
        self,
        kind: str,
        dtype: str,
        flops: float | FloatArray,
        nbytes: float | FloatArray,
        product: Sequence[float | FloatArray] | None = None,
        operator: str = "",
    ) -> FloatArray:
        """Seconds of one kernel.

        On a GPU the host launches kernels ahead: one takes its own time or that between two
        launches, whichever is longer. On a CPU it takes both.

        Args:
            kind: one of ``cluster.KERNEL_KINDS``.
            dtype: "float32", "tf32", "bfloat16", ...
            flops: floating-point operations on this device (a multiply-add is two); numbers or
                arrays that broadcast.
            nbytes: bytes read and written.
            operator: the kernel's name, which may have a curve of its own.
            product: of a matmul: how many there are, the rows and columns of the result, and the
                summands of each of its elements.
        """
        moved = np.asarray(nbytes, dtype=np.float64)
        taken = moved / self.peak(
            "elementwise" if kind in ARITHMETIC else kind,
            dtype,
            moved,
            "" if kind in ARITHMETIC else operator,
        )
        if kind in ARITHMETIC:
            work = np.asarray(flops, dtype=np.float64)
            rate = self.peak(kind, dtype, work, operator)
            if product is not None:
                rate = rate * tile_utilisation(
                    self._device, *(np.asarray(n, dtype=np.float64) for n in product)
                )
            taken = np.maximum(taken, work / rate)
        return (
            np.maximum(taken, self._device.launch)
            if self._device.kind == "cuda"
            else taken + self._device.launch
        )

    def optimizer_seconds(self, nbytes: float) -> float:
        """Seconds that an optimizer takes to read and write ``nbytes`` in all
        (:func:`memory.optimizer_traffic`).
        """
        return float(nbytes / self.peak("elementwise", "float32", nbytes, "optimizer"))

    def _curve(self, kind: str, dtype: str, operator: str) -> Curve:
        curves, other = self._device.efficiency, "matmul" if kind in ARITHMETIC else "elementwise"
        names = (f"{name}{of}" for name in (operator, kind, other) for of in (f".{dtype}", ""))
        return next(curves[name] for name in names if name in curves)


def tile_utilisation(
    device: Device, count: FloatArray, rows: FloatArray, columns: FloatArray, inner: FloatArray
) -> FloatArray:
    """What part of the rate of a large product of matrices ``count`` products have.

    The result is cut into tiles, of which each multiprocessor computes one at a time: the last wave
    may leave most of them idle, as tiles at the edge do a part of their work (NVIDIA, "Matrix
    Multiplication Background User's Guide"). Of the sizes of tiles that there are the best one
    counts. A short inner dim leaves a tile little to do between its start and its end.
    """
    best = np.zeros(np.broadcast_shapes(count.shape, rows.shape, columns.shape))
    for tile in device.tiles:
        tiles = count * np.ceil(rows / tile.rows) * np.ceil(columns / tile.columns)
        whole = np.ceil(tiles / device.units) * device.units * tile.rows * tile.columns
        best = np.maximum(best, tile.efficiency * count * rows * columns / whole)
    return (best if device.tiles else 1.0) * np.where(
        inner > 0, inner / np.maximum(inner + device.inner, 1), 1.0
    )  # nothing: in no time


def _at(curve: Curve, work: FloatArray | float) -> FloatArray:
    """The curve's value: straight between its points where work and value are logarithms, level
    outside. More work takes no less time.
    """
    points = np.log(np.array(curve))
    return np.exp(np.interp(np.log(np.maximum(work, 1.0)), points[:, 0], points[:, 1]))
