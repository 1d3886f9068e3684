"""What torch's optimizers need to know of a program's DTensors, told by a hook: the user's code does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def attend_steps(owner: object, parameters: Iterable[torch.Tensor], changes: Callable[[], None], *, foreach: bool) -> None:
    """Calls ``changes`` before every step of an optimizer that has one of ``parameters``, as long as ``owner`` lives.

    With ``foreach``, optimizers that leave that to torch use it, as they do by themselves on GPUs. The arithmetic is the same to the bit.
    On the CPU torch defaults to single tensors, at 15 us of dispatch for each operator on a DTensor: measured with AdamW on 100 small
    parameters, 15 ms a step, with foreach 2.7 ms, and 2.6 ms for plain tensors. ``changes`` must not hold on to ``owner``.
    """
    ours = {id(p) for p in parameters}  # theirs as long as the owner lives

    def attend(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups = [group for group in optimizer.param_groups if any(id(p) in ours for p in group["params"][:1])]
        if groups:
            changes()
        for group in groups if foreach else ():
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True

    weakref.finalize(owner, register_optimizer_step_pre_hook(attend).remove)
