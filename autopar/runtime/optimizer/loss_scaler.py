"""A dynamic loss scale, for gradients that float16 would round to zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.watch.watchdog import blocking_section

if TYPE_CHECKING:
    from autopar.runtime.module.compiled import Compiled

_COUNTS = ("scale", "good_steps", "overflows_left")


class LossScaler:
    """Multiplies the loss of ``compiled`` by a scale before its backward, and divides the gradients
    by it before the optimizer steps, in the manner of ``torch.amp.GradScaler``::

        scaler = autopar.LossScaler(compiled)
        loss = compiled(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only to clip
        scaler.step(optimizer)
        scaler.update()

    It also serves microbatches and pipelines, whose backward runs inside the call: they begin with
    the scale. Where a gradient of any rank is infinite or no number, no rank steps.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` good steps in a row.
        backoff_factor: multiplies the scale after ``hysteresis`` skipped steps since it last grew,
            and after each further one.
        max_scale: the largest scale.
    """

    def __init__(
        self,
        compiled: Compiled,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
    ) -> None:
        if not (0 < init_scale <= max_scale and 0 < backoff_factor < 1 < growth_factor):
            raise RunError(
                f"init_scale={init_scale}, max_scale={max_scale}, growth_factor={growth_factor}, "
                f"backoff_factor={backoff_factor}: give 0 < init_scale <= max_scale and "
                "0 < backoff_factor < 1 < growth_factor"
            )
        self._compiled, self._max_scale = compiled, max_scale
        self._growth, self._backoff = growth_factor, backoff_factor
        self._interval, self._hysteresis = growth_interval, hysteresis
        self._good_steps, self._overflows_left = 0, hysteresis
        self._found: dict[int, bool] = {}  # by optimizer: whether its gradients overflowed
        self._set(init_scale)

    def _set(self, scale: float) -> None:
        self._scale = self._compiled.loss_scale = scale

    def get_scale(self) -> float:
        """The scale."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale."""
        return loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, once a step. All ranks must call it:
        they learn whether a gradient of any rank overflowed.
        """
        if id(optimizer) in self._found:
            raise RunError("unscale_() was called twice since the last update(): call it once")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        gradients = [g for g in gradients if g.numel()]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self._scale)
        self._found[id(optimizer)] = self._overflowed(gradients)

    def _overflowed(self, gradients: list[torch.Tensor]) -> bool:
        """Whether a gradient of any rank is not finite."""
        found = torch.zeros((), device=self._compiled.mesh.device)
        if gradients:
            largest = torch.stack(
                [norm.float() for norm in torch._foreach_norm(gradients, math.inf)]
            )
            found += (~torch.isfinite(largest)).any()
        if dist.is_initialized() and dist.get_world_size() > 1:
            with blocking_section("unscaling gradients"):
                dist.all_reduce(found, dist.ReduceOp.MAX, groups().everyone())
        return bool(found)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless a gradient overflowed; what it returns, or None."""
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        return None if self._found[id(optimizer)] else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Adapts the scale to the step that ends.

        Raises :class:`RunError` where no optimizer was given to :meth:`step` since the last call.
        """
        if not self._found:
            raise RunError("update() was called before step(optimizer): call it after the step")
        overflowed = any(self._found.values())
        self._found.clear()
        if overflowed:
            self._good_steps, self._overflows_left = 0, self._overflows_left - 1
            if self._overflows_left <= 0:
                self._set(self._scale * self._backoff)
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self._good_steps, self._overflows_left = 0, self._hysteresis
            self._set(min(self._scale * self._growth, self._max_scale))

    def state_dict(self) -> dict[str, float]:
        """The scale and the counts on which its next changes depend: numbers, the same on all
        ranks.
        """
        values = self._scale, self._good_steps, self._overflows_left
        return dict(zip(_COUNTS, values, strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on with what :meth:`state_dict` returned."""
        scale, good, left = (state[name] for name in _COUNTS)
        self._good_steps, self._overflows_left = int(good), int(left)
        self._set(scale)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
