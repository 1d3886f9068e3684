"""The device that this rank computes on."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.groups import backends


def device_type_of(device: torch.device | str | None) -> str:
    """The type of the devices that compute, "cpu" or "cuda", for a model on ``device``. A model on
    the meta device, or None, trains on GPUs where there are some, unless the process group that the
    script made runs gloo on them.
    """
    if device is not None and (given := torch.device(device).type) != "meta":
        return given
    on_gpu = torch.cuda.is_available()
    if on_gpu and dist.is_initialized():
        on_gpu = backends().get("cuda", "gloo") != "gloo"
    return "cuda" if on_gpu else "cpu"


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether a tensor on ``one`` can be computed with on ``other``: the CPU has no numbers."""
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)


def take_device(model: torch.device) -> torch.device:
    """The device of this rank's program for a model on the device ``model``. A GPU becomes the
    current one of the process.

    The GPU is the one that the process group is bound to (``device_id=``), else the one that the
    script made current, else that of the launcher's ``LOCAL_RANK``, else that of the model.

    Raises :class:`RunError` where there is no such GPU, where the model is on another one, where
    the process group sends no tensors of the device, and where several ranks would send tensors of
    GPUs over gloo.
    """
    kind = device_type_of(model)
    if dist.is_initialized() and kind not in backends():
        has = ", ".join(f"{backend} for {device}" for device, backend in backends().items())
        raise RunError(
            f"the model trains on {kind}, the process group has {has} and sends no tensors of "
            f"{kind}: " + _another_group(kind)
        )
    if kind != "cuda":
        return torch.device(kind)
    if dist.is_initialized() and backends()["cuda"] == "gloo" and dist.get_world_size() > 1:
        raise RunError(
            "the model trains on GPUs, whose tensors the process group sends over gloo: torch's "
            "all_gather of them ends the process with a segmentation fault (torch 2.11): "
            + _another_group(kind)
        )
    own = torch.device("cuda", _gpu(model))
    if model.type == "cuda" and model.index not in (None, own.index):
        raise RunError(
            f"the model is on {model}, this rank computes on {own}{_local_rank_text()}: call "
            f"torch.cuda.set_device({own.index}) before model.cuda(), or pass model.to('{own}')"
        )
    torch.cuda.set_device(own)
    return own


def _another_group(kind: str) -> str:
    if kind == "cpu":
        return (
            "pass the model on this rank's GPU or on the meta device, or let "
            "init_process_group have the backend 'cpu:gloo,cuda:nccl'"
        )
    return "let init_process_group have the backend 'nccl', or call no init_process_group"


def _gpu(model: torch.device) -> int:
    """The number of this rank's GPU, among those that the process sees."""
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound.index
    count = torch.cuda.device_count()
    if not count:
        raise RunError("this process sees no GPU: run it where there is one, or compute on the CPU")
    is_used = torch.cuda.is_initialized()
    if is_used and (current := torch.cuda.current_device()):
        return current
    if "LOCAL_RANK" in os.environ:
        return _gpu_of_local_rank(int(os.environ["LOCAL_RANK"]), count)
    if model.index is not None:
        return model.index
    if is_used:
        return 0
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank % count


def _gpu_of_local_rank(local_rank: int, count: int) -> int:
    """The GPU of the process ``local_rank`` of this machine, of ``count`` that it sees."""
    if local_rank < count:
        return local_rank
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0  # the launcher shows each rank its own GPU alone
    raise RunError(
        f"LOCAL_RANK={local_rank} has no GPU: this process sees {count}; start at most {count} "
        "ranks on this machine, or pass the model on the CPU"
    )


def _local_rank_text() -> str:
    local = os.environ.get("LOCAL_RANK")
    return f" (LOCAL_RANK={local})" if local is not None else ""
