"""Checks that ranks which should hold equal values do: of parameters, gradients, buffers, the
optimizer's state and the random state.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.watch.watchdog import blocking_section

_SHOWN = 8  # differences that an error lists

Key = tuple[str, tuple[int | None, ...]]  # a name, and which chunk of the tensor


def check_replicas(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    more: Mapping[str, Any],
    optimizer: Any = None,
) -> None:
    """Compares over all ranks the values that each rank holds; ``more`` are numbers by name. All
    ranks must call it.

    Raises :class:`RunError`, on every rank, that names the values which are not equal, with the
    ranks and the largest difference.
    """
    held = _held_values(parameters, buffers, more, optimizer)
    digests = _gather({key: _digest(value) for key, value in held.items()})
    by_rank: dict[Key, dict[int, Any]] = defaultdict(dict)
    for rank, told in enumerate(digests):
        for key, digest in told.items():
            by_rank[key][rank] = digest
    unlike = sorted(
        (key for key, found in by_rank.items() if len(set(found.values())) > 1), key=str
    )
    if not unlike:
        return
    values = _gather({key: _on_host(held[key]) for key in unlike[:_SHOWN] if key in held})
    lines = [
        _line(key, {rank: told[key] for rank, told in enumerate(values) if key in told})
        for key in unlike[:_SHOWN]
    ]
    more_lines = f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    raise RunError(
        f"{len(unlike)} things differ between ranks that should hold the same: "
        f"{'; '.join(lines)}{more_lines}"
    )


def _held_values(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    more: Mapping[str, Any],
    optimizer: Any,
) -> dict[Key, Any]:
    held: dict[Key, Any] = {(name, ()): value for name, value in more.items()}
    names = {}
    for name, p in parameters.items():
        names[id(p)] = name
        held[name, _chunk(p)] = p
        if p.grad is not None:
            held[f"the gradient of {name}", _chunk(p)] = p.grad
    held |= {(name, ()): buffer for name, buffer in buffers.items()}
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        settings = {
            k: v for k, v in group.items() if k != "params" and isinstance(v, (int, float, tuple))
        }
        held[f"the settings of the optimizer's group {number}", ()] = settings
        for p in group["params"]:
            for what, value in optimizer.state.get(p, {}).items() if id(p) in names else ():
                held[f"{what} of {names[id(p)]}", _chunk(value)] = value
    return held


def _chunk(tensor: Any) -> tuple[int | None, ...]:
    """Which chunk of the whole tensor this rank holds along each mesh axis; None where the axis
    does not cut it.
    """
    if not isinstance(tensor, DTensor):
        return ()
    places = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        None if p.is_replicate() else place
        for p, place in zip(tensor.placements, places, strict=True)
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.to_local() if isinstance(value, DTensor) else value).cpu()
    return value


def _digest(value: Any) -> Any:
    value = _on_host(value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return tuple(value.shape), zlib.crc32(
        value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    )


def _gather(mine: dict) -> list[dict]:
    """Every rank's ``mine``, in the order of ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    with blocking_section("comparing replicas"):
        dist.all_gather_object(told, mine, groups().everyone())
    return told


def _line(key: Key, values: dict[int, Any]) -> str:
    """The line of the error for one key; ``values`` by rank."""
    first, *others = values
    base = values[first]
    unlike = [rank for rank in others if _digest(values[rank]) != _digest(base)]
    line = f"{key[0]} on rank {', '.join(map(str, unlike))} is not that on rank {first}"
    tensors = [
        values[rank]
        for rank in unlike
        if isinstance(values[rank], torch.Tensor) and values[rank].shape == base.shape
    ]
    if not tensors:
        return f"{line} ({values[unlike[0]]!r:.60} for {base!r:.60})"
    largest = max(
        float((t.double() - base.double()).abs().max())
        if not t.is_complex()
        else float((t - base).abs().max())
        for t in tensors
    )
    return (
        f"{line} (largest difference {largest:.3g}, of values up to "
        f"{float(base.double().abs().max()):.3g})"
    )
