"""How torch's optimizers update DTensors: elementwise, and so each rank its own part, without the
dispatch of DTensors; on a CPU in buckets, whose tensors stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.state_buckets import update_buckets
from autopar.runtime.dtensors.program_handlers import is_of_program
from autopar.runtime.dtensors.torch_private import (
    GroupedTensors,
    TensorLists,
    local_tensor,
    set_group_tensors,
    torch_group_tensors,
)


def install_local_updates() -> None:
    """From now on optimizers with ``foreach`` or ``fused`` update the local parts of programs'
    parameters.
    """
    set_group_tensors(_group)


def _group(lists: TensorLists, with_indices: bool = False) -> GroupedTensors:
    """As torch groups ``lists`` (parameters, gradients and state, at the same place for one
    parameter) by device and dtype, and on a CPU by buckets.
    """
    # A missing list is empty, and missing state is None: torch makes it, as DTensors.
    of_each = zip(*filter(None, lists), strict=True)
    if torch.compiler.is_compiling() or not all(map(_is_elementwise, of_each)):
        return torch_group_tensors(lists, with_indices)
    local = [[local_tensor(x) for x in each] for each in lists]
    grouped: GroupedTensors = {}
    for (device, dtype), (of_group, indices) in torch_group_tensors(local, True).items():
        if device.type != "cpu":
            grouped[device, dtype] = of_group, indices
            continue
        begin = 0
        for i, bucket in enumerate(update_buckets(of_group[0], lambda p: p.nbytes)):
            taken = slice(begin, begin := begin + len(bucket))
            grouped[device, (dtype, i)] = [each[taken] for each in of_group], indices[taken]
    return grouped


def _is_elementwise(tensors: Sequence[Any]) -> bool:
    """Whether the tensors of one parameter of a program lie on the ranks alike, so that what is
    computed of each element is computed of this rank's elements. Counts of steps are plain tensors.
    """
    parameter = tensors[0]
    return (
        isinstance(parameter, DTensor)
        and is_of_program(parameter)
        and not any(placement.is_partial() for placement in parameter.placements)
        and all(
            x.placements == parameter.placements and x.device_mesh is parameter.device_mesh
            if isinstance(x, DTensor)
            else isinstance(x, torch.Tensor) and x.ndim == 0
            for x in tensors[1:]
        )
    )
