"""Seconds of one kernel: the larger of its arithmetic time and its memory time, and its launch.

This is the roofline model of Williams, Waterman and Patterson (2009). The cluster's efficiency
curves give the part of the peak that a kernel reaches for its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.device import KERNEL_KINDS, Curve, Device
from autopar.cost_model.products import ProductRates
from autopar.errors import PlanError

FloatArray = npt.NDArray[np.float64]
_HALF, _ALIGNED = ("bfloat16", "float16"), 8  # whose elements, and how many, are 16 bytes
ARITHMETIC = KERNEL_KINDS[:3]  # kinds whose work counts in FLOPs; other kinds count bytes
# A fused kernel moves its bytes as fast as an addition does. (The mean of pointwise operators of a
# profile would contain copies of transposed tensors.)
_AS_FAST_AS = {"fused": "add"}


class ComputeCosts:
    """Seconds of local work on one device of a cluster.

    ``tf32`` says that float32 products run on tensor cores.
    """

    def __init__(self, cluster: Cluster, tf32: bool = False) -> None:
        self._device, self._software, self._tf32 = cluster.device, cluster.software, tf32
        products = cluster.device.products
        self._products = ProductRates(products) if products else None

    @property
    def overhead(self) -> float:
        """Seconds of a training step outside its kernels."""
        return self._software.overhead

    @property
    def device_kind(self) -> str:
        """The kind of the cluster's devices, "cpu" or "cuda"."""
        return self._device.kind

    @property
    def fuses(self) -> bool:
        """Whether a compiler joins pointwise kernels."""
        return self._software.fuses

    @property
    def overlap(self) -> float:
        """The part of a collective's seconds that overlapping computation hides, 0 to 1."""
        return self._software.overlap

    def peak(
        self, kind: str, dtype: str, work: FloatArray | float, operator: str = ""
    ) -> FloatArray:
        """The rate that kernels of a kind reach at this amount of ``work``.

        ``work`` counts FLOPs and the rate FLOP/s for kinds in ARITHMETIC, bytes and B/s for other
        kinds. A dtype that has no peak of its own (integers) uses the peak of float32.
        """
        if kind in ARITHMETIC:
            curve = self._curve(kind, self._rate_name(dtype), operator)
            return self._flops_per_second(dtype) * _at(curve, work)
        curve = self._curve(kind, dtype.removeprefix("torch."), operator)
        return self._device.memory_bandwidth * _at(curve, work)

    def _rate_name(self, dtype: str) -> str:
        """The name of the peak that products of this dtype have."""
        name = dtype.removeprefix("torch.")
        return "tf32" if self._tf32 and name == "float32" else name

    def _flops_per_second(self, dtype: str) -> float:
        """The peak of this dtype."""
        return self._device.peak.get(self._rate_name(dtype), self._device.peak["float32"])

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

        On a GPU the host launches kernels ahead of time, so a kernel takes its execution time or
        the time between two launches, whichever is longer. On a CPU a kernel takes the sum of both.

        Args:
            kind: one of ``device.KERNEL_KINDS``.
            dtype: "float32", "tf32", "bfloat16", ...
            flops: floating-point operations on this device (a multiply-add is two); numbers or
                arrays that broadcast.
            nbytes: bytes read and written.
            operator: the name of the kernel, which may have an efficiency curve of its own.
            product: for a matmul: the number of products in the batch, the rows and the columns of
                a result, the summands of one element and, if it is known, a number of elements
                that divides the rows of all matrices in memory. Without sizes the product takes
                the best rate that its shape could give.
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
            sizes = [np.asarray(n, dtype=np.float64) for n in product or ()]
            taken = np.maximum(taken, work / self._rate(kind, dtype, work, sizes, operator))
        return (
            np.maximum(taken, self._software.launch)
            if self._device.kind == "cuda"
            else taken + self._software.launch
        )

    def _rate(
        self, kind: str, dtype: str, work: FloatArray, sizes: Sequence[FloatArray], operator: str
    ) -> FloatArray:
        """FLOP/s of a kernel; ``sizes`` of a product, as for :meth:`seconds`."""
        shape, rest = sizes[:4], sizes[4:]
        if kind == "matmul" and self._products is not None:
            share = self._products.share(*shape) if shape else self._products.largest
            return self._flops_per_second(dtype) * np.asarray(share)
        rate = self.peak(kind, dtype, work, operator)
        if shape:
            rate = rate * tile_utilisation(self._device, *shape)
        for divisor in rest if dtype.removeprefix("torch.") in _HALF and not self.fuses else ():
            rate = np.where(divisor % _ALIGNED == 0, rate, rate * self._device.unaligned)
        return rate

    def optimizer_seconds(self, nbytes: float, copied: float = 0.0) -> float:
        """Seconds that an optimizer takes to move ``nbytes`` in total, as
        :func:`memory.optimizer_traffic` counts them, and to copy ``copied`` bytes of state from the
        memory of the host and back.

        On a CPU the copies and the update follow each other. On a GPU a bucket of the state comes
        in while the one before is updated and the one before that goes out, so that the slowest of
        the three counts: the first copy in and the last copy out are left out.

        Raises PlanError for ``copied`` bytes where the cluster has no ``host_bandwidth``.
        """
        update = float(nbytes / self.peak("elementwise", "float32", nbytes, "optimizer"))
        if not copied:
            return update
        if self._device.host_bandwidth is None:
            raise PlanError(f"device {self._device.name!r} has no host_bandwidth: add it")
        copy = copied / self._device.host_bandwidth
        return update + 2 * copy if self._device.kind == "cpu" else max(update, copy)

    def host_copy_seconds(self, nbytes: FloatArray) -> FloatArray:
        """Seconds of a copy to the memory of the host, or back; infinite where the cluster does not
        say how fast it is.

        On a GPU the copy runs beside kernels, which are taken to hide the part ``overlap`` of it.
        On a CPU it is a kernel as others.
        """
        bandwidth = self._device.host_bandwidth
        if bandwidth is None:
            return np.full(np.shape(nbytes), np.inf)
        if self._device.kind == "cuda":
            return np.asarray(nbytes / bandwidth * (1 - self.overlap))
        return np.asarray(nbytes / bandwidth + self._software.launch)

    def _curve(self, kind: str, dtype: str, operator: str) -> Curve:
        curves, other = self._device.efficiency, "matmul" if kind in ARITHMETIC else "elementwise"
        alike = _AS_FAST_AS.get(operator, operator)
        names = (f"{name}{of}" for name in (alike, kind, other) for of in (f".{dtype}", ""))
        return next(curves[name] for name in names if name in curves)


def tile_utilisation(
    device: Device, count: FloatArray, rows: FloatArray, columns: FloatArray, inner: FloatArray
) -> FloatArray:
    """The rate of ``count`` matrix products, relative to the rate of one large product.

    A kernel cuts the result into tiles, and each multiprocessor computes one tile at a time. The
    last wave of tiles may leave most multiprocessors idle, and a tile at the edge computes elements
    that do not exist (NVIDIA, "Matrix Multiplication Background User's Guide"). The best of the
    device's tile sizes counts. With few summands (``inner``) the start and the end of a tile
    dominate its time.
    """
    best = np.zeros(np.broadcast_shapes(count.shape, rows.shape, columns.shape))
    for tile in device.tiles:
        tiles = count * np.ceil(rows / tile.rows) * np.ceil(columns / tile.columns)
        whole = np.ceil(tiles / device.units) * device.units * tile.rows * tile.columns
        best = np.maximum(best, tile.efficiency * count * rows * columns / whole)
    # A product without summands takes no time, so its rate does not matter.
    return (best if device.tiles else 1.0) * np.where(
        inner > 0, inner / np.maximum(inner + device.inner, 1), 1.0
    )


def _at(curve: Curve, work: FloatArray | float) -> FloatArray:
    """The curve's value at ``work``: linear in logarithms between points, constant outside."""
    return np.exp(np.interp(np.log(np.maximum(work, 1.0)), *_logarithms(curve)))


@lru_cache(maxsize=1024)
def _logarithms(curve: Curve) -> FloatArray:
    """The logarithms of a curve's points: those of the work, and those of the values."""
    return np.ascontiguousarray(np.log(np.array(curve)).T)
