"""Describes the machine that a profile measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.runtime.communication.groups import backends


def machine(device: torch.device, backend: str, ranks: int) -> dict[str, str]:
    """The properties for which a profile holds: device, software and number of ranks."""
    return {
        "device": device_name(device),
        "ranks": str(ranks),
        "backend": backend,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def backend_of(device: torch.device) -> str:
    """The backend that sends tensors of ``device``; "none" where there is no process group."""
    return backends().get(device.type, "none") if dist.is_initialized() else "none"


def check_machine(cluster: Cluster, device: torch.device) -> None:
    """Raises PlanError where the cluster is a profile of another machine or of other software.

    The message says what differs and how to measure again. A cluster that was not measured, such as
    a preset, has no machine and always passes.
    """
    here = machine(
        device,
        backend_of(device),
        dist.get_world_size() if dist.is_initialized() else 1,
    )
    has_one_rank = cluster.machine.get("ranks") == "1"  # no collectives, so any backend fits
    expected = {
        name: value
        for name, value in cluster.machine.items()
        if name != "ranks" and not (has_one_rank and name == "backend")
    }
    differ = [
        f"{name} {value!r} there, {here[name]!r} here"
        for name, value in expected.items()
        if here.get(name, value) != value
    ]
    if differ:
        renew = (
            f"torchrun --nproc-per-node {here['ranks']} -m autopar profile -o {cluster.name}.json"
        )
        raise PlanError(
            f"the profile {cluster.name!r} is of another machine ({'; '.join(differ)}): measure "
            f"this one with {renew}"
        )


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the name of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return f"{model}, {os.cpu_count()} cores"
