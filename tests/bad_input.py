"""A small model to ask wrong things of, and how a test asks them."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
import zoo
from torch import nn

import autopar
from autopar import Plan

BATCH = 8


def tensor(size: int) -> dict[str, Any]:
    return dict(tensor=dict(size=size, mode="1d"))


def plan(world_size: Any = 4, name: str = "mlp", **options: Any) -> Plan:
    model, sample = getattr(zoo, name)()
    return autopar.plan(model, sample, world_size, progress=False, **options)


def bytes_named(message: str) -> dict[str, float]:
    """What the error says goes where."""
    (inside,) = re.findall(r"bytes a device[^(]*\(([^)]*)\), on a mesh", message)
    return {
        kind: float(n.replace(",", ""))
        for kind, n in (part.rsplit(" ", 1) for part in inside.split(", "))
    }


def compile_(
    model: nn.Module, sample: Any, world_size: int | None = None, **options: Any
) -> autopar.Compiled:
    return autopar.compile(
        model, sample, world_size or dist.get_world_size(), progress=False, **options
    )
