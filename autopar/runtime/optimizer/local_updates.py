"""How torch's elementwise optimizers update DTensors: each rank its own part, without the dispatch
of DTensors; on a CPU in buckets, whose tensors stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.ir.state_buckets import update_buckets
from autopar.runtime.dtensors.program_handlers import is_of_program
from autopar.runtime.dtensors.torch_private import (
    GroupedTensors,
    TensorLists,
    local_tensor,
    set_group_tensors,
    torch_group_tensors,
)

# Not their subclasses, and no other optimizers, which may compute norms of whole parameters.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


def install_local_updates() -> None:
    """From now on torch's elementwise optimizers with ``foreach`` or ``fused`` update the local
    parts of programs' parameters.
    """
    if not _Step.is_watched:
        _Step.is_watched = True
        register_optimizer_step_pre_hook(_Step.begin)
        register_optimizer_step_post_hook(_Step.end)
        set_group_tensors(_group)


class _Step:
    """The step that runs.

    Attributes:
        is_watched: whether torch's optimizers call :meth:`begin` and :meth:`end`.
        is_elementwise: whether a step runs, and its optimizer is elementwise.
    """

    is_watched = is_elementwise = False

    @classmethod
    def begin(cls, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        cls.is_elementwise = type(optimizer) in _ELEMENTWISE

    @classmethod
    def end(cls, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        cls.is_elementwise = False


def _group(lists: TensorLists, with_indices: bool = False) -> GroupedTensors:
    """As torch groups ``lists`` (parameters, gradients and state, at the same place for one
    parameter) by device and dtype, and on a CPU by buckets.
    """
    # A missing list is empty, and missing state is None: torch makes it, as DTensors.
    if (
        torch.compiler.is_compiling()
        or not _Step.is_elementwise
        or not all(map(_lie_alike, zip(*filter(None, lists), strict=True)))
    ):
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


def _lie_alike(tensors: Sequence[Any]) -> bool:
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
