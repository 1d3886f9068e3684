"""A cluster: the speed and the memory of one device, the links between devices, and the software.

A cluster is read from a JSON file. Presets lie in ``clusters/``; every figure there names its
source.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.cost_model.calibrate import ComparedStep, calibrated
from autopar.cost_model.cluster_data import as_data, cluster_fields
from autopar.cost_model.device import Device
from autopar.cost_model.links import Level
from autopar.cost_model.measurements_table import with_measured_kernels
from autopar.cost_model.software import Software
from autopar.errors import PlanError
from autopar.formatting.files import write_json

PROFILE_SECONDS = 115.0  # the time that a profile takes by default
_PRESETS = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, the software that runs on them, and their links, fastest level first.

    ``sources`` gives the source of each figure. ``machine`` describes the machine that a profile
    measured; it is empty for a preset.
    """

    name: str
    device: Device
    software: Software
    links: tuple[Level, ...]
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    machine: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.links:
            raise PlanError(
                f"cluster {self.name!r} has no links: give at least one level, with size null for "
                "any number of devices"
            )
        if self.usable_memory <= 0:
            raise PlanError(
                f"cluster {self.name!r}: software.{self.software.name}.reserve is "
                f"{self.software.reserve} bytes of a device's {self.device.memory}: give less"
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

    @property
    def usable_memory(self) -> int:
        """Bytes of a device's memory that are left for tensors."""
        return self.device.memory - self.software.reserve

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
        seconds: float = PROFILE_SECONDS,
    ) -> Cluster:
        """Measure this machine and write its figures to ``path``: kernels in several sizes and
        dtypes, memory, collectives.

        Call it in each rank under torchrun: all ranks then compute at the same time, as in
        training. In a single process it measures one device. A profile that was interrupted
        continues where it stopped.

        Args:
            path: the file to write.
            device: "cpu" or "cuda"; None takes the GPU where there is one.
            progress: whether to show a progress bar.
            seconds: the time to measure for, approximately. In less than a minute on a CPU the
                profile leaves out large operands and other dtypes than float32.

        Raises:
            RunError: there is no such device.
        """

        from autopar.profile import measure_cluster

        return measure_cluster(Path(path), device, progress, seconds)

    def from_measurements(
        self, table: str | os.PathLike[str], name: str, dtype: str = "bfloat16"
    ) -> Cluster:
        """This cluster with the rates of measured kernels, for example those of another project.

        Products and attention of the measured sizes have the measured rate, the mean where a size
        was measured several times. The others have rates between those of the nearest sizes.
        Memory-bound kernels, links and software stay as they are.

        Args:
            table: a CSV file with the columns ``kernel``, ``shape`` and ``TFLOP/s`` or ``share of N
                TFLOP/s``; the format is that of ``cost_model/measurements_table.py``.
            name: the name of the new cluster.
            dtype: the dtype of the measured kernels.

        Raises:
            PlanError: the file cannot be read, or a row says no kernel that is known.
        """
        device = with_measured_kernels(self.device, table, dtype)
        curves = set(device.efficiency) - set(self.device.efficiency)
        found = ("device.products", *(f"device.efficiency.{curve}" for curve in sorted(curves)))
        sources = {**self.sources, **dict.fromkeys(found, f"measured: {Path(table).name}")}
        return replace(self, name=name, device=device, sources=sources)

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
    def load(cls, name_or_path: str | os.PathLike[str], software: str | None = None) -> Cluster:
        """Read the cluster of a preset's name or of a ``.json`` file's path.

        Args:
            name_or_path: "a100-sxm", for example, or a path. "a100-sxm:megatron-deepspeed" also
                names the software.
            software: the program that runs on the devices, one of those that the file describes;
                by default the first, which is "eager" (PyTorch without a compiler) in each preset.

        Raises:
            PlanError: there is no such preset, file or software, the file has another schema, or a
                field is missing, unknown or out of range.
        """
        if isinstance(name_or_path, str) and software is None:
            preset, colon, named = name_or_path.partition(":")
            if colon and preset in cls.presets():
                name_or_path, software = preset, named
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
            return cls(**cluster_fields(data, software))
        except PlanError as error:
            raise PlanError(f"cluster file {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` reads. Where writing fails, ``path`` stays unchanged."""
        write_json(path, as_data(self), indent=2)
