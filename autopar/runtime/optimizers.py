"""What torch's optimizers need to know of a program's DTensors, told by hooks, and when they step: the user's code does not change."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.runtime.mesh import Mesh


def attend_steps(owner: object, parameters: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Attends to every step of an optimizer that has one of ``parameters``, as long as ``owner`` lives, which the hooks do not hold on to.

    Fused and foreach kernels count no writes to DTensors; counted, autograd refuses the backward of a graph that saved old values: on
    several ranks writes to ``leaves`` are. There, on the CPU, optimizers that leave that to torch use foreach, as they do by themselves on
    GPUs; the arithmetic is the same to the bit. torch defaults to single tensors, at 15 us of dispatch for each operator on a DTensor:
    measured with AdamW on 100 small parameters, 15 ms a step, with foreach 2.7 ms, and 2.6 ms for plain tensors.
    """
    ours = {id(p) for p in parameters}  # theirs as long as the owner lives

    def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [group for group in optimizer.param_groups if any(id(p) in ours for p in group["params"][:1])]

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups = groups_of(optimizer)
        if not groups:
            return
        for leaf in leaves if mesh.size > 1 else ():
            torch.autograd.graph.increment_version(leaf)
        for group in groups if mesh.size > 1 and mesh.device.type == "cpu" else ():
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        mesh.recorder.optimizer_begins(optimizer)

    def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if groups_of(optimizer):
            mesh.recorder.optimizer_ends()

    for hook in (register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)):
        weakref.finalize(owner, hook.remove)
