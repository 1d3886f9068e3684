"""The loss of the whole batch: each rank's share, summed over the ranks that hold shares.

On gloo a rank would wait here for the slowest one before its backward begins, though nothing in the
backward needs the sum. So the sum is under way while the backward runs, and whoever reads the loss
waits for it then. On NCCL waiting orders streams and blocks nobody.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from autopar.runtime.communication.watchdog import blocking_section

_functional = torch.ops._c10d_functional


class _Sum(torch.autograd.Function):
    """The gradient of a sum over ranks is the gradient of each share."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        value = _functional.all_reduce_(share.detach().clone(), "sum", group.group_name)
        # Another tensor of the same memory: the collective holds on to its own until it is waited
        # for, which would then have the graph.
        return _functional.wait_tensor(value) if value.is_cuda else value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class PendingLoss(torch.Tensor):
    """A loss whose sum over ranks may be under way; every use but ``backward``, ``detach`` and its
    description waits for it.

    ``pending`` is the sum, without a graph, as long as nobody waited for it.
    """

    pending: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.Tensor.detach
        ):  # kept to be logged, often before the optimizer's step, which need not wait
            return args[0].detached()
        if func not in _NOT_READING:
            for value in tree_iter((args, kwargs)):
                if isinstance(value, PendingLoss):
                    value.wait()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def detached(self) -> torch.Tensor:
        """Without a graph, and as much under way."""
        with torch._C.DisableTorchFunctionSubclass():
            value = self.detach()
        return value if self.pending is None else _pending(value, self.pending)

    def wait(self) -> None:
        """Blocks until the sum is there."""
        if self.pending is not None:
            with blocking_section():
                finish(self.pending)
            self.pending = None


_NOT_READING = {
    torch.Tensor.backward,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("requires_grad", "grad_fn", "shape", "dtype", "device", "is_leaf")
    ),
}


def total(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's ``share`` of the loss, differentiable."""
    value = _Sum.apply(share, group)
    if value.is_cuda:
        return value
    return _pending(value, value.detach())


def _pending(value: torch.Tensor, summed: torch.Tensor) -> PendingLoss:
    found = value.as_subclass(PendingLoss)
    found.pending = summed
    return found


def finish(value: torch.Tensor) -> None:
    """Blocks until a sum that may be under way is there."""
    _functional.wait_tensor(value)
