"""The loss of the whole batch: the sum of the ranks' shares.

On gloo, waiting for this sum inside the call would make each rank wait for the slowest one before
its backward begins, although the backward does not need the sum. So the all-reduce runs during the
backward, and the first use of the loss waits for it. On NCCL a wait orders streams and blocks no
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from autopar.runtime.communication import functional
from autopar.runtime.communication.watch.watchdog import blocking_section


class LossSum:
    """Sums the loss of each step over the ranks of ``group`` (None: each rank has all of it).

    ``on_backward`` is a hook for the gradient of each loss.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        on_backward: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._group, self._on_backward = group, on_backward
        # The last sum, without the loss's graph, which refers to the program.
        self._pending: torch.Tensor | None = None

    def __call__(self, share: torch.Tensor) -> torch.Tensor:
        """The loss, from this rank's ``share`` of it."""
        if self._on_backward is not None and share.requires_grad:
            share.register_hook(self._on_backward)
        loss = share if self._group is None else sum_loss(share, self._group)
        self._pending = loss.pending if isinstance(loss, PendingLoss) else None
        return loss

    def wait(self) -> None:
        """Blocks until the last loss is summed."""
        if self._pending is not None:
            functional.wait_tensor(self._pending)
            self._pending = None


def sum_loss(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's ``share`` of the loss, differentiable."""
    value = _Sum.apply(share, group)
    return value if value.is_cuda else _as_pending(value, value.detach())


class _Sum(torch.autograd.Function):
    """The gradient of a sum over ranks is the gradient of each share."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        value = functional.all_reduce_(share.detach().clone(), "sum", group.group_name)
        # The collective refers to its tensor until someone waits for it. A detached tensor of the
        # same memory keeps the graph of the loss out of that tensor.
        return functional.wait_tensor(value) if value.is_cuda else value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


@dataclass
class LossScale:
    """The gradient of the loss with which a backward inside a call begins: 1, unless a
    :class:`LossScaler` sets it.
    """

    value: float = 1.0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The root of a backward that begins with this gradient of ``loss``."""
        return loss if self.value == 1.0 else loss * self.value


class PendingLoss(torch.Tensor):
    """A loss whose sum over ranks may be under way. Every use waits for the sum, except
    ``backward``, ``detach`` and the attributes in ``_NOT_READING``.

    Only a subclass of Tensor learns that a tensor is read. AsyncCollectiveTensor, torch's own for
    this purpose, waits already in ``loss.backward()``.

    Attributes: ``pending``, the sum without a graph; None once someone waited for it.
    """

    pending: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:  # often before the optimizer's step, to log the loss later
            return args[0].detach_pending()
        if func not in _NOT_READING:
            for value in tree_iter((args, kwargs)):
                if isinstance(value, PendingLoss):
                    value.wait()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def detach_pending(self) -> torch.Tensor:
        """The loss without a graph. Its sum may be under way, too."""
        with torch._C.DisableTorchFunctionSubclass():
            value = self.detach()
        return value if self.pending is None else _as_pending(value, self.pending)

    def wait(self) -> None:
        """Blocks until the loss is summed."""
        if self.pending is not None:
            with blocking_section("summing the loss"):
                functional.wait_tensor(self.pending)
            self.pending = None


_NOT_READING = {
    torch.Tensor.backward,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("requires_grad", "grad_fn", "shape", "dtype", "device", "is_leaf")
    ),
}


def _as_pending(value: torch.Tensor, pending: torch.Tensor) -> PendingLoss:
    loss = value.as_subclass(PendingLoss)
    loss.pending = pending
    return loss
