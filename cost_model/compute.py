"""Seconds of one node's local work: the larger of arithmetic and memory traffic (the roofline of Williams, Waterman and Patterson,
2009), each at the efficiency that such kernels reach, and the time to launch it."""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster

FloatArray = npt.NDArray[np.float64]
KINDS = ("matmul", "attention", "conv", "elementwise", "view")


class Compute:
    """Prices of local work on one device of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._device = cluster.device

    def peak(self, kind: str, dtype: str) -> float:
        """FLOP/s that a large kernel reaches. A dtype without a figure (integers, say) computes as float32, and so does what is not
        a product: tensor cores do not serve it."""
        device = self._device
        if kind == "elementwise":
            return device.peak["float32"]
        efficiency = {"matmul": device.matmul_efficiency, "attention": device.attention_efficiency, "conv": device.conv_efficiency}[kind]
        return device.peak.get(dtype.removeprefix("torch."), device.peak["float32"]) * efficiency

    @overload
    def seconds(self, flops: float, nbytes: float, kind: str, dtype: str) -> float: ...
    @overload
    def seconds(self, flops: FloatArray, nbytes: FloatArray, kind: str, dtype: str) -> FloatArray: ...
    def seconds(self, flops: float | FloatArray, nbytes: float | FloatArray, kind: str, dtype: str) -> float | FloatArray:
        """Seconds of one kernel, forward or backward.

        A matmul of f FLOPs runs at f/(f + half) of the best rate, so that one split very finely gains ever less.

        Args:
            flops: floating-point operations on this device (a multiply-add is two); numbers or arrays that broadcast.
            nbytes: bytes read and written.
            kind: one of KINDS; a "view" costs nothing.
            dtype: "float32", "tf32", "bfloat16", ...
        """
        arrays = isinstance(flops, np.ndarray) or isinstance(nbytes, np.ndarray)
        work, traffic = np.broadcast_arrays(np.asarray(flops, dtype=np.float64), np.asarray(nbytes, dtype=np.float64))
        if kind == "view":
            total = np.zeros(work.shape)
        else:
            started = np.where(work > 0, work + self._device.matmul_half, 0.0) if kind == "matmul" else work
            total = np.maximum(started / self.peak(kind, dtype), self._memory_seconds(traffic)) + self._device.launch
        return total if arrays else float(total)

    def optimizer_seconds(self, nbytes: float) -> float:
        """Seconds of a fused optimizer step that reads and writes ``nbytes`` in all (:func:`memory.optimizer_traffic`)."""
        return float(self._memory_seconds(np.float64(nbytes))) + self._device.launch

    def _memory_seconds(self, nbytes: FloatArray | np.float64) -> FloatArray | np.float64:
        return nbytes / (self._device.memory_bandwidth * self._device.memory_efficiency)
