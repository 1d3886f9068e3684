"""A cluster: the speed and the memory of one device, and the links between devices.

A cluster is read from a JSON file. Presets lie in ``clusters/``; every figure there names its
source. ``schema`` is the version of the file format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.cost_model.calibrate import ComparedStep, calibrated
from autopar.cost_model.device import Device, Level, Tile
from autopar.errors import PlanError
from autopar.formatting.files import write_json

SCHEMA = 2
_PRESETS = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind and their links, fastest level first.

    ``sources`` gives the source of each figure. ``machine`` describes the machine that a profile
    measured; it is empty for a preset.
    """

    name: str
    device: Device
    links: tuple[Level, ...]
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    machine: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.links:
            raise PlanError(
                f"cluster {self.name!r} has no links: give at least one level, with size null for "
                "any number of devices"
            )
        inner = 1
        for position, level in enumerate(self.links):
            last = position == len(self.links) - 1
            if level.size is None and not last:
                raise PlanError(
                    f"cluster {self.name!r}: level {level.name!r} has no size, which only the "
                    "last (slowest) level may lack"
                )
            if level.size is not None:
                if level.size % inner:
                    nested = (
                        f"has {level.size} devices, no multiple of the {inner} of the level below"
                    )
                    raise PlanError(f"cluster {self.name!r}: level {level.name!r} {nested}")
                inner = level.size

    @property
    def capacity(self) -> float:
        """The number of devices; infinity where the last level has no size."""
        return math.inf if self.links[-1].size is None else self.links[-1].size

    def check(self, world_size: int) -> None:
        """Raises PlanError where the cluster has fewer than ``world_size`` devices."""
        if world_size > self.capacity:
            asked = f"world_size={world_size} needs {world_size} devices"
            more = (
                f", or measure as many: torchrun --nproc-per-node {world_size} -m autopar profile"
                if self.machine
                else ""
            )
            raise PlanError(
                f"{asked}, cluster {self.name!r} has {self.capacity}: lower world_size or give "
                f"another cluster={more}"
            )

    @classmethod
    def measure(
        cls,
        path: str | os.PathLike[str] = "cluster.json",
        device: str | None = None,
        progress: bool = True,
    ) -> Cluster:
        """Measure this machine and write its figures to ``path``: kernels in several sizes and
        dtypes, memory, collectives.

        Call it in each rank under torchrun: all ranks then compute at the same time, as in
        training. In a single process it measures one device. It takes less than two minutes. A
        profile that was interrupted continues where it stopped.

        Raises:
            RunError: there is no such device.
        """

        from autopar.profile import measure_cluster

        return measure_cluster(Path(path), device, progress)

    def calibrated(self, comparison: ComparedStep, name: str | None = None) -> Cluster:
        """This cluster with the speeds that :meth:`Compiled.compare` measured in a run.

        One factor corrects all kernels, another all links, and the rest of the step becomes the
        device's overhead.

        Args:
            comparison: the result of :meth:`Compiled.compare`.
            name: the name of the new cluster; by default this cluster's name and "-calibrated".

        Raises:
            PlanError: the comparison is with another cluster, or with a machine that is much
                faster than this cluster.
        """
        return calibrated(self, comparison, name or f"{self.name}-calibrated")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of the presets that :meth:`load` takes."""
        return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Cluster:
        """Read the cluster of a preset's name or of a ``.json`` file's path.

        Raises:
            PlanError: there is no such preset or file, the file has another schema, or a field is
                missing, unknown or out of range.
        """
        try:
            path = Path(os.fsdecode(name_or_path))
            exists = path.exists()
        except (TypeError, ValueError) as error:
            known = ", ".join(cls.presets())
            raise PlanError(
                f"cluster={name_or_path!r:.100}: give one of {known}, or a cluster file's path"
            ) from error
        if path.suffix != ".json" and len(path.parts) == 1 and not exists:
            if path.name not in cls.presets():
                raise PlanError(
                    f"no cluster {path.name!r}: the presets are {', '.join(cls.presets())}; or "
                    "give the path of a cluster's .json file"
                )
            path = _PRESETS / f"{path.name}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"cannot read the cluster file {path}: {error.strerror}; the presets are "
                f"{', '.join(cls.presets())}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"the cluster file {path} is not JSON: {error}") from error
        try:
            return cls._from_data(data)
        except PlanError as error:
            raise PlanError(f"cluster file {path}: {error}") from error

    @classmethod
    def _from_data(cls, data: Any) -> Cluster:
        if not isinstance(data, dict):
            raise PlanError(
                "expected an object with schema, name, device and links, found "
                f"{type(data).__name__}"
            )
        found = data.get("schema")
        if found != SCHEMA:
            renew = (
                "measure it again with: python -m autopar profile -o FILE (under torchrun for "
                "several ranks)"
            )
            raise PlanError(f"its schema is {found!r}, this version reads {SCHEMA}: {renew}")
        values = _checked(cls, "", {key: value for key, value in data.items() if key != "schema"})
        given = dict(_checked(Device, "device.", values["device"]))
        tiles = [
            Tile(**_checked(Tile, f"device.tiles[{i}].", tile))
            for i, tile in enumerate(given.pop("tiles", ()))
        ]
        curves = {name: _points(curve) for name, curve in given.pop("efficiency").items()}
        device = Device(**given, efficiency=curves, tiles=tuple(tiles))
        if not isinstance(values["links"], list):
            raise PlanError(
                f"links is {type(values['links']).__name__}: give a list of levels, fastest first"
            )
        links = tuple(
            _level(_checked(Level, f"links[{i}].", level))
            for i, level in enumerate(values["links"])
        )
        return cls(
            values["name"], device, links, values.get("sources", {}), values.get("machine", {})
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` reads. Where writing fails, ``path`` stays unchanged."""
        write_json(path, {"schema": SCHEMA, **asdict(self)}, indent=2)


def _checked(cls: type, prefix: str, data: Any) -> dict[str, Any]:
    """``data``, after a check that its keys are fields of the dataclass ``cls``."""
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


def _level(data: dict[str, Any]) -> Level:
    curves = {
        kind: {ranks: _points(c) for ranks, c in by_ranks.items()}
        for kind, by_ranks in data.get("measured", {}).items()
    }
    return Level(**{**data, "measured": curves})


def _points(data: Any) -> Any:
    return (
        tuple(map(tuple, data))
        if isinstance(data, list) and all(isinstance(point, list) for point in data)
        else data
    )
