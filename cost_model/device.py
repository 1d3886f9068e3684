"""One device and one level of links. Each figure is validated when the object is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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
        launch: seconds from the start of one kernel to the start of the next, even for the
            smallest kernels.
        efficiency: curves of points (work, fraction), by kind of kernel ("matmul", or
            "matmul.float32" for one dtype) or by ATen operator ("gelu_backward"). A fraction is the
            part of the peak that a kernel with this many FLOPs reaches, or the part of the memory
            bandwidth for a kernel that moves this many bytes.
        kind: torch's name of the device type. It decides which kernels run and which tensors these
            save for the backward.
        units: multiprocessors that work on the tiles of a product at the same time.
        tiles: the tile sizes of matrix products; empty where tiling does not affect the speed.
        inner: summands of each element at which a product reaches half of its rate.
        overhead: seconds of a step outside its kernels, for example to read the loss and for the
            optimizer's work on the host.
        overlap: the part of the gradients' collectives that the last backward hides, 0 to 1.
        ranks_per_core: ranks that shared one core, all busy, while the kernels were measured.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory: int
    launch: float
    efficiency: Mapping[str, Curve] = field(hash=False)
    kind: str = "cuda"
    units: int = 1
    tiles: tuple[Tile, ...] = ()
    inner: float = 0.0
    overhead: float = 0.0
    overlap: float = 0.5
    ranks_per_core: float = 1.0

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
            _positive(f"device.peak.{dtype}", value)
        for name in ("memory_bandwidth", "memory", "units", "ranks_per_core"):
            _positive(f"device.{name}", getattr(self, name))
        for name in ("launch", "inner", "overhead", "overlap"):
            _positive(f"device.{name}", getattr(self, name), zero=True)
        if self.overlap > 1:
            raise PlanError(
                f"device.overlap is {self.overlap!r}: give the part of collectives that is "
                "hidden, 0 to 1"
            )
        for tile in self.tiles:
            for name in ("rows", "columns", "efficiency"):
                _positive(f"device.tiles.{name}", getattr(tile, name))
        _check_efficiency(self.efficiency)


@dataclass(frozen=True)
class Level:
    """Links that connect ``size`` consecutive devices (None: any number).

    Attributes:
        latency: seconds for one message.
        bandwidth: B/s in one direction. Where ``shared``, it is the bandwidth of one unit of the
            level below (all NICs of a node together), divided among the groups that use it.
            Otherwise each device has this bandwidth.
        efficiency: the fraction of the bandwidth that collectives reach.
        startup: seconds that a collective takes before its first message.
        by_ranks: the bandwidth by the number of ranks in a group, for links that join only some
            pairs of devices.
        measured: points (bytes, seconds) by collective and number of ranks. They take precedence
            over the formulas.
    """

    name: str
    size: int | None
    latency: float
    bandwidth: float
    efficiency: float = 1.0
    shared: bool = False
    startup: float = 0.0
    by_ranks: Mapping[str, float] = field(default_factory=dict, hash=False)
    measured: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.size is not None and (
            isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1
        ):
            raise PlanError(
                f"links.{self.name}.size is {self.size!r}: give how many consecutive devices it "
                "connects, null for any number"
            )
        for name in ("latency", "startup"):
            _positive(f"links.{self.name}.{name}", getattr(self, name), zero=True)
        _positive(f"links.{self.name}.bandwidth", self.bandwidth)
        _fraction(f"links.{self.name}.efficiency", self.efficiency)
        for ranks, bandwidth in self.by_ranks.items():
            _positive(f"links.{self.name}.by_ranks.{ranks}", bandwidth)
        for kind, curves in self.measured.items():
            for ranks, curve in curves.items():
                _curve(f"links.{self.name}.measured.{kind}.{ranks}", curve)


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
        _curve(f"device.efficiency.{name}", curve, most=MAX_EFFICIENCY)


def _curve(name: str, curve: Any, most: float = math.inf) -> None:
    """Raises PlanError unless ``curve`` is a tuple of points with growing work."""
    pairs = (
        isinstance(curve, tuple)
        and curve
        and all(isinstance(point, tuple) and len(point) == 2 for point in curve)
    )
    if not pairs:
        raise PlanError(f"{name} is {curve!r}: give a list of points [work, value], at least one")
    for work, value in curve:
        _positive(f"{name}: the work of a point", work)
        _positive(f"{name} at {work:g}", value)
        if value > most:
            raise PlanError(f"{name} at {work:g} is {value!r}: at most {most:g}")
    if any(a[0] >= b[0] for a, b in pairwise(curve)):
        raise PlanError(f"{name}: the work of its points must grow")


def _positive(name: str, value: Any, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and (value >= 0 if zero else value > 0)):
        raise PlanError(
            f"{name} is {value!r}: give a number {'of at least' if zero else 'above'} 0"
        )


def _fraction(name: str, value: Any) -> None:
    _positive(name, value)
    if value > 1:
        raise PlanError(f"{name} is {value!r}: give a fraction of the peak, at most 1")
