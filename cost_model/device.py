"""One device: its speed and its memory. Each figure is validated when the object is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cost_model.checks import check_curve, check_positive
from autopar.cost_model.products import Product
from autopar.errors import PlanError

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
DEVICE_KINDS = ("cpu", "cuda")
# Kinds of kernels. The work of the first three counts FLOPs, the work of the others counts bytes.
KERNEL_KINDS = (
    "matmul",
    "attention",
    "conv",
    "elementwise",
    "transcendental",
    "normalisation",
    "reduction",
    "random",
    "indexing",
    "copy",
)
MAX_EFFICIENCY = 20.0  # may exceed 1 because data in a cache moves faster than data in memory
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Tile:
    """The part of a matrix product that one multiprocessor computes at a time.

    ``efficiency`` is the rate of kernels with this tile, relative to the device's fastest kernel.
    """

    rows: int
    columns: int
    efficiency: float = 1.0


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU rank).

    Attributes:
        peak: FLOP/s by dtype name; "tf32" is float32 data on tensor cores.
        memory_bandwidth: B/s.
        memory: bytes.
        efficiency: curves of points (work, fraction), by kind of kernel ("matmul", or
            "matmul.float32" for one dtype) or by ATen operator ("gelu_backward"). A fraction is the
            part of the peak that a kernel with this many FLOPs reaches, or the part of the memory
            bandwidth for a kernel that moves this many bytes.
        kind: torch's name of the device type. It decides which kernels run and which tensors these
            save for the backward.
        units: multiprocessors that work on the tiles of a product at the same time.
        tiles: the tile sizes of matrix products; empty where tiling does not affect the speed.
        inner: summands of each element at which a product reaches half of its rate.
        products: the rates of measured matrix products. Where there are any, they take the place
            of ``tiles``, ``inner`` and the efficiency of products, for each dtype: a product is
            taken to reach the same share of the peak in another dtype.
        unaligned: the rate of a half-precision product on a GPU in which a row of a matrix is no
            whole number of 16 bytes long, relative to the rate of others. A compiler that joins
            kernels pads such matrices.
        ranks_per_core: ranks that shared one core, all busy, while the kernels were measured.
        host_bandwidth: B/s of a copy to the memory of the host, and of one back, while all devices
            of the machine copy; None where it is not known, and nothing moves to the host.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory: int
    efficiency: Mapping[str, Curve] = field(hash=False)
    kind: str = "cuda"
    units: int = 1
    tiles: tuple[Tile, ...] = ()
    inner: float = 0.0
    products: tuple[Product, ...] = ()
    unaligned: float = 1.0
    ranks_per_core: float = 1.0
    host_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise PlanError(
                f"device.kind is {self.kind!r}: give {' or '.join(DEVICE_KINDS)}, torch's name of "
                "such "
                "devices"
            )
        if not isinstance(self.peak, Mapping):
            raise PlanError(
                f"device.peak is {self.peak!r}: give FLOP/s for each dtype of {', '.join(DTYPES)}"
            )
        if "float32" not in self.peak or not set(self.peak) <= set(DTYPES):
            raise PlanError(
                f"device {self.name!r} gives peak FLOP/s for {sorted(self.peak)}: float32 is "
                f"required, the others known are {DTYPES}"
            )
        for dtype, value in self.peak.items():
            check_positive(f"device.peak.{dtype}", value)
        for name in ("memory_bandwidth", "memory", "units", "unaligned", "ranks_per_core"):
            check_positive(f"device.{name}", getattr(self, name))
        check_positive("device.inner", self.inner, zero=True)
        if self.host_bandwidth is not None:
            check_positive("device.host_bandwidth", self.host_bandwidth)
        for tile in self.tiles:
            for name in ("rows", "columns", "efficiency"):
                check_positive(f"device.tiles.{name}", getattr(tile, name))
        _check_efficiency(self.efficiency)


def _check_efficiency(efficiency: Any) -> None:
    """Raises PlanError unless these are curves of kinds of kernels or operators."""
    is_mapping = isinstance(efficiency, Mapping)
    if not is_mapping or not {"matmul", "elementwise"} <= set(efficiency):
        found = sorted(efficiency) if is_mapping else repr(efficiency)
        raise PlanError(
            f"device.efficiency gives {found}: give points for matmul and elementwise at least"
        )
    for name, curve in efficiency.items():
        operator, dot, dtype = name.partition(".")
        if not operator.isidentifier() or (dot and dtype not in DTYPES):
            kinds = f"a kind of kernel ({', '.join(KERNEL_KINDS)}) or an ATen operator"
            raise PlanError(
                f"device.efficiency.{name}: give {kinds}; after a dot one of {', '.join(DTYPES)}"
            )
        check_curve(f"device.efficiency.{name}", curve, most=MAX_EFFICIENCY)
