"""What a machine can do: one device's speed and memory, and the links between devices, read from a data file.

Presets lie in ``clusters/``; every figure in a file names its source. A file is versioned by ``schema`` and written whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import PlanError

SCHEMA = 1
DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
KINDS = ("cpu", "cuda")
_PRESETS = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU rank). Efficiencies are fractions of the datasheet's figure that kernels reach."""

    name: str
    peak: Mapping[str, float] = field(hash=False)  # FLOP/s by dtype name; "tf32" is float32 data on tensor cores
    memory_bandwidth: float  # B/s
    memory: int  # bytes
    launch: float  # seconds from the start of one kernel to the start of the next, however small it is
    matmul_efficiency: float  # of a large matmul
    matmul_half: float  # FLOPs at which a matmul reaches half of that
    attention_efficiency: float  # of fused attention
    conv_efficiency: float
    memory_efficiency: float
    kind: str = "cuda"  # torch's name of such devices: which kernels run, and what these keep for the backward

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"device.kind is {self.kind!r}: give {' or '.join(KINDS)}, torch's name of such devices")
        if not isinstance(self.peak, Mapping):
            raise PlanError(f"device.peak is {self.peak!r}: give FLOP/s for each dtype of {', '.join(DTYPES)}")
        if "float32" not in self.peak or not set(self.peak) <= set(DTYPES):
            raise PlanError(
                f"device {self.name!r} gives peak FLOP/s for {sorted(self.peak)}: float32 is required, the others known are {DTYPES}"
            )
        for dtype, value in self.peak.items():
            _positive(f"device.peak.{dtype}", value)
        for name in ("memory_bandwidth", "memory"):
            _positive(f"device.{name}", getattr(self, name))
        for name in ("launch", "matmul_half"):
            _positive(f"device.{name}", getattr(self, name), zero=True)
        for name in ("matmul_efficiency", "attention_efficiency", "conv_efficiency", "memory_efficiency"):
            _fraction(f"device.{name}", getattr(self, name))


@dataclass(frozen=True)
class Level:
    """Links that connect ``size`` consecutive devices (None: any number). Where ``shared``, ``bandwidth`` is of one unit of the level
    below (a node's NICs together) and divided among the groups that use it; else it is each device's own. B/s in one direction."""

    name: str
    size: int | None
    latency: float  # seconds for one message
    bandwidth: float
    efficiency: float = 1.0  # the fraction of it that collectives reach
    shared: bool = False

    def __post_init__(self) -> None:
        if self.size is not None and (isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1):
            raise PlanError(f"links.{self.name}.size is {self.size!r}: give how many consecutive devices it connects, null for any number")
        _positive(f"links.{self.name}.latency", self.latency, zero=True)
        _positive(f"links.{self.name}.bandwidth", self.bandwidth)
        _fraction(f"links.{self.name}.efficiency", self.efficiency)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind and their links, fastest level first. ``sources`` says for each figure where it comes from."""

    name: str
    device: Device
    links: tuple[Level, ...]
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.links:
            raise PlanError(f"cluster {self.name!r} has no links: give at least one level, with size null for any number of devices")
        inner = 1
        for position, level in enumerate(self.links):
            last = position == len(self.links) - 1
            if level.size is None and not last:
                raise PlanError(f"cluster {self.name!r}: level {level.name!r} has no size, which only the last (slowest) level may lack")
            if level.size is not None:
                if level.size % inner:
                    nested = f"has {level.size} devices, no multiple of the {inner} of the level below"
                    raise PlanError(f"cluster {self.name!r}: level {level.name!r} {nested}")
                inner = level.size

    @property
    def capacity(self) -> float:
        """How many devices there are; infinity where the last level has no size."""
        return math.inf if self.links[-1].size is None else self.links[-1].size

    def check(self, world_size: int) -> None:
        """PlanError where ``world_size`` devices are more than there are."""
        if world_size > self.capacity:
            asked = f"world_size={world_size} needs {world_size} devices"
            raise PlanError(f"{asked}, cluster {self.name!r} has {self.capacity}: lower world_size or give another cluster=")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that :meth:`load` knows."""
        return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Cluster:
        """The cluster of a preset's name or of a ``.json`` file's path.

        Raises PlanError where there is none, where its schema differs, or where a field is missing, unknown or out of range.
        """
        path = Path(name_or_path)
        if path.suffix != ".json" and len(path.parts) == 1 and not path.exists():
            if path.name not in cls.presets():
                raise PlanError(
                    f"no cluster {path.name!r}: the presets are {', '.join(cls.presets())}; or give the path of a cluster's .json file"
                )
            path = _PRESETS / f"{path.name}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"cannot read the cluster file {path}: {error.strerror}; the presets are {', '.join(cls.presets())}") from error
        except ValueError as error:
            raise PlanError(f"the cluster file {path} is not JSON: {error}") from error
        try:
            return cls._from_data(data)
        except PlanError as error:
            raise PlanError(f"cluster file {path}: {error}") from error

    @classmethod
    def _from_data(cls, data: Any) -> Cluster:
        if not isinstance(data, dict):
            raise PlanError(f"expected an object with schema, name, device and links, found {type(data).__name__}")
        found = data.get("schema")
        if found != SCHEMA:
            raise PlanError(f"its schema is {found!r}, this version reads {SCHEMA}: write it again with this version")
        values = _checked(cls, "", {key: value for key, value in data.items() if key != "schema"})
        device = Device(**_checked(Device, "device.", values["device"]))
        if not isinstance(values["links"], list):
            raise PlanError(f"links is {type(values['links']).__name__}: give a list of levels, fastest first")
        links = tuple(Level(**_checked(Level, f"links[{i}].", level)) for i, level in enumerate(values["links"]))
        return cls(values["name"], device, links, values.get("sources", {}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` reads; ``path`` is replaced at once, or kept as it was where writing fails."""
        target = Path(path)
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).chmod(0o644)  # mkstemp's 0600 would keep a shared file from others
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def _checked(cls: type, prefix: str, data: Any) -> dict[str, Any]:
    """The data of one dataclass, once its fields are those of ``cls``."""
    if not isinstance(data, dict):
        raise PlanError(f"{prefix.rstrip('.')} is {type(data).__name__}: give an object")
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    missing = [prefix + name for name, required in known.items() if required and name not in data]
    if missing:
        raise PlanError(f"missing {', '.join(missing)}")
    unknown = [prefix + name for name in data if name not in known]
    if unknown:
        raise PlanError(f"unknown {', '.join(unknown)}; the fields are {', '.join(known)}")
    return data


def _positive(name: str, value: Any, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and (value >= 0 if zero else value > 0)):
        raise PlanError(f"{name} is {value!r}: give a number {'of at least' if zero else 'above'} 0")


def _fraction(name: str, value: Any) -> None:
    _positive(name, value)
    if value > 1:
        raise PlanError(f"{name} is {value!r}: give a fraction of the peak, at most 1")
