"""A cluster: the speed and the memory of one device, the links between devices, and the software.

A cluster is read from a JSON file. Presets lie in ``clusters/``; every figure there names its
source.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.cost_model.calibrate import ComparedStep, calibrated
from autopar.cost_model.cluster_data import (
    as_data,
    cluster_fields,
    is_joined,
    joined_fields,
)
from autopar.cost_model.cluster_files import cluster_of_file
from autopar.cost_model.cluster_parts import check_link, check_parts
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
    """Devices of one kind, the software that runs on them, and their links, fastest level first; or
    groups of devices of different kinds, as :meth:`join` makes them.

    Attributes:
        sources: the source of each figure.
        machine: the machine that a profile measured; empty for a preset.
        parts: the cluster of each group, and how many of its devices there are; empty where all
            devices are of one kind. Device, software and links are then those of the first group,
            and prices take those of ``parts``.
        link: the links between groups.
    """

    name: str
    device: Device
    software: Software
    links: tuple[Level, ...]
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    machine: Mapping[str, str] = field(default_factory=dict, compare=False)
    parts: tuple[tuple[Cluster, int], ...] = ()
    link: Level | None = None

    def __post_init__(self) -> None:
        if self.parts:
            check_parts(self.parts)
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
        if self.parts:
            return sum(count for _, count in self.parts)
        return math.inf if self.links[-1].size is None else self.links[-1].size

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The cluster of each kind of devices; this one where all devices are alike."""
        return tuple(cluster for cluster, _ in self.parts) or (self,)

    @property
    def usable_memory(self) -> int:
        """Bytes of a device's memory that are left for tensors; of the smallest memory."""
        if self.parts:
            return min(cluster.usable_memory for cluster in self.kinds)
        return self.device.memory - self.software.reserve

    def check(self, world_size: int) -> None:
        """Raises PlanError where the cluster has fewer than ``world_size`` devices, or where it is
        joined and has more.
        """
        if self.parts and world_size != self.capacity:
            raise PlanError(
                f"world_size={world_size}: cluster {self.name!r} has {self.capacity} devices, and "
                "a plan for a joined cluster takes all: join as many as you use"
            )
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
        self._refuse_if_joined("give the measurements to one of its groups")
        device = with_measured_kernels(self.device, table, dtype)
        before, after = self.device.efficiency, device.efficiency
        new = [name for name, curve in after.items() if before.get(name) != curve]
        gone = {f"device.efficiency.{name}" for name in set(before) - set(after)}
        sources = {path: source for path, source in self.sources.items() if path not in gone}
        found = ("device.products", *(f"device.efficiency.{name}" for name in sorted(new)))
        sources |= dict.fromkeys(found, f"measured: {Path(table).name}")
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
        self._refuse_if_joined("calibrate its groups, each by a run of its own")
        return calibrated(self, comparison, name or f"{self.name}-calibrated")

    def run_by(self, backend: str | None) -> Cluster:
        """This cluster for programs of a plan's ``backend``; None is a GPU's default, inductor. A
        profile of a GPU measures eager kernels: the cluster that prices inductor's programs joins
        pointwise ones. A preset stays as it is, with the software that was asked for.
        """
        is_gpu_profile = bool(self.machine) and self.device.kind == "cuda"
        if backend == "eager" or not is_gpu_profile or self.software.fuses:
            return self
        return replace(self, software=replace(self.software, name="inductor", fuses=True))

    def _refuse_if_joined(self, instead: str) -> None:
        if self.parts:
            raise PlanError(f"cluster {self.name!r} has several kinds of devices: {instead}")

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
        return cluster_of_file(name_or_path, software, _PRESETS, cls._of_data)

    @classmethod
    def _of_data(cls, data: Any, software: str | None) -> Cluster:
        """The cluster of a file's contents."""
        if not is_joined(data):
            return cls(**cluster_fields(data, software))
        name, parts, link = joined_fields(data)
        read = (cls.load if isinstance(each, str) else cls._of_data for each, _ in parts)
        clusters = [make(each, software) for make, (each, _) in zip(read, parts, strict=True)]
        return cls._joined([(c, n) for c, (_, n) in zip(clusters, parts, strict=True)], link, name)

    @classmethod
    def join(
        cls,
        devices: Mapping[str | os.PathLike[str] | Cluster, int],
        link: Level,
        name: str | None = None,
    ) -> Cluster:
        """One cluster of two or three groups of devices of different kinds.

        The ranks of a group follow those of the group before it. Each stage of a pipeline lies in
        one group and gets layers by what its devices do. Without a pipeline each operator takes as
        long as on the slowest kind, and the smallest memory counts.

        Args:
            devices: how many devices of each cluster: ``{"h100-sxm": 8, "a100-sxm": 8}``. The keys
                are what :meth:`load` takes, or clusters.
            link: the links between groups. Where the level is shared, its bandwidth is that of all
                links of one group.
            name: the name of the cluster; by default "8 h100-sxm + 8 a100-sxm".

        Raises:
            PlanError: there are fewer groups than two or more than three, a number of devices does
                not fill the nodes of its cluster, or the devices are of different types.
        """
        if not isinstance(devices, Mapping):
            raise PlanError(
                f"Cluster.join({devices!r:.100}): give the number of devices of each cluster, for "
                'example {"h100-sxm": 8, "a100-sxm": 8}'
            )
        loaded = [each if isinstance(each, Cluster) else cls.load(each) for each in devices]
        return cls._joined(list(zip(loaded, devices.values(), strict=True)), link, name)

    @classmethod
    def _joined(
        cls, parts: Sequence[tuple[Cluster, int]], link: Level, name: str | None
    ) -> Cluster:
        check_parts(parts)
        check_link(link)
        first, _ = parts[0]
        name = name or " + ".join(f"{count} {cluster.name}" for cluster, count in parts)
        return cls(name, first.device, first.software, first.links, parts=tuple(parts), link=link)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :meth:`load` reads. Where writing fails, ``path`` stays unchanged."""
        write_json(path, as_data(self), indent=2)
