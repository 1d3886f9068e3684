"""Measures single kernels that a cluster has no curve of, and remembers their seconds.

The memory is a file in the user's cache folder. Its keys contain the operator, the shapes, strides
and dtypes of the tensors, the device, torch's version and the number of threads.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.formatting.files import write_json
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.profile.machine import device_name
from autopar.profile.measurements import BUDGET
from autopar.profile.timing import replay, time_call

SCHEMA = 2  # raise it when the way to measure changes


def cache_path() -> Path:
    """The file of the measurements, in the user's cache folder."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "autopar"
        / "kernels.json"
    )


class MissingKernels:
    """The kernels that ``cluster`` has no curve of, measured on this machine when asked for.

    Raises:
        PlanError: this machine has no device of the cluster's kind.
    """

    def __init__(self, cluster: Cluster, path: Path | None = None) -> None:
        kind = cluster.device.kind
        if kind == "cuda" and not torch.cuda.is_available():
            raise PlanError(
                f"profile_missing=True measures kernels here, cluster {cluster.name!r} has cuda "
                "devices and this machine none"
            )
        self._curves, self._device, self._path = (
            cluster.device.efficiency,
            torch.device(kind),
            path or cache_path(),
        )
        self._where = (
            f"{device_name(self._device)}, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads"
        )
        self._known = self._read()

    def __contains__(self, launch: KernelLaunch) -> bool:
        names = (launch.operator, *(f"{launch.operator}.{dtype}" for dtype in _dtypes(launch)))
        return launch.call is not None and not any(name in self._curves for name in names)

    def seconds(self, launch: KernelLaunch) -> float | None:
        """Seconds of one kernel; None for a kernel that does not run on this machine."""
        key = f"{self._where}: {launch.operator}{_signature(launch)}"
        if key not in self._known:
            self._known[key] = self._measured(launch)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"schema": SCHEMA, "seconds": self._known}, indent=0)
        return self._known[key]

    def _measured(self, launch: KernelLaunch) -> float | None:
        assert launch.call is not None
        try:
            with torch.no_grad():
                return time_call(replay(launch.call, self._device), self._device, BUDGET).seconds
        except (RuntimeError, NotImplementedError):
            return None

    def _read(self) -> dict[str, float | None]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if data["schema"] == SCHEMA:
                return {
                    str(key): None if s is None else float(s) for key, s in data["seconds"].items()
                }
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            warnings.warn(
                f"{self._path} cannot be read ({e!r}): its kernels are measured again", stacklevel=2
            )
        return {}


def _dtypes(launch: KernelLaunch) -> list[str]:
    return sorted({part.split("[")[0].removeprefix("torch.") for part in _tensors(launch)})


def _signature(launch: KernelLaunch) -> str:
    return f"({', '.join(_tensors(launch))})"


def _tensors(launch: KernelLaunch) -> list[str]:
    found: list[str] = []

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(f"{value.dtype}{list(value.shape)}{list(value.stride())}")
        elif isinstance(value, (list, tuple)):
            for item in value:
                note(item)

    if launch.call is not None:
        note(launch.call[1])
        note(list(launch.call[2].values()))
    return found
