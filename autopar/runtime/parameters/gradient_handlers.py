"""Functions of the user that see, and may change, the gradients of parameters: registered for all
programs of this process, or for one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from autopar.errors import RunError
from autopar.ir.layout import Layout, format_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autopar.runtime.parameters.weight import Weight
    from autopar.runtime.step.step_runner import StepRunner


@dataclass(frozen=True)
class ParameterGradient:
    """A parameter's gradient after its synchronisation, as a gradient handler gets it.

    Attributes:
        name: the parameter's name in the model.
        local: this rank's part of the gradient, a tensor in the parameter's dtype. A handler may
            change it in place.
        layout: how it lies along each axis of the stage's mesh: the parameter's stored layout, as
            ``plan.parameters[name].stored`` has it.
        tensor: the whole gradient: a DTensor on the memory of ``local``; on a single device
            ``local`` itself.
    """

    name: str
    local: torch.Tensor
    layout: Layout
    tensor: torch.Tensor

    @property
    def placements(self) -> tuple[Placement, ...]:
        """torch's placements of the DTensor; empty on a single device."""
        return tuple(self.tensor.placements) if isinstance(self.tensor, DTensor) else ()


Handler = Callable[[ParameterGradient], torch.Tensor | None]


class GradientHandler:
    """A registered handler: call it as the function that it was made of, :meth:`remove` it, or
    remove it with the end of a ``with`` block.

    Attributes:
        function: the function that was registered.
    """

    def __init__(self, function: Handler, handlers: list[GradientHandler]) -> None:
        self.function, self._handlers = function, handlers
        self.__doc__, self.__name__ = function.__doc__, getattr(function, "__name__", str(function))
        handlers.append(self)

    def __call__(self, gradient: ParameterGradient) -> torch.Tensor | None:
        return self.function(gradient)

    def remove(self) -> None:
        """No later gradient goes through the handler. A second call has no effect."""
        if self in self._handlers:
            self._handlers.remove(self)

    def __enter__(self) -> GradientHandler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


_OF_ALL_PROGRAMS: list[GradientHandler] = []


def register_gradient_handler(handler: Handler) -> GradientHandler:
    """Let every program of this process call ``handler`` with each parameter's gradient, once a
    backward, after the gradient is synchronised and before it is added to ``parameter.grad``.

    Written as a decorator it applies to the backwards that follow, of programs compiled before and
    after. ``compiled.register_gradient_handler(handler)`` does the same for one program. Handlers
    of all programs come first, in the order in which they were registered.

    Args:
        handler: takes a :class:`ParameterGradient`. It changes ``gradient.local`` in place and
            returns nothing, or returns a tensor that takes its place, of the same shape, dtype and
            device. It sees the parameters of this rank that got a gradient, in the order in which
            their gradients become ready: the same order on all ranks of a stage, so that it may
            call collectives among them.

    Returns:
        The handler, which can be called as before, removed, and used in a ``with`` block.

    Raises:
        RunError: ``handler`` is not callable; in a backward, what it returns or leaves has another
            shape, dtype or device than the gradient.
    """
    return _registered(handler, _OF_ALL_PROGRAMS)


def _registered(handler: Handler, handlers: list[GradientHandler]) -> GradientHandler:
    if not callable(handler):
        raise RunError(
            f"register_gradient_handler({handler!r:.100}): give a function of one argument, the "
            "gradient, an autopar.ParameterGradient"
        )
    return GradientHandler(handler, handlers)


class GradientHandlers:
    """The handlers that the gradients of one program go through: those of all programs, and its
    own.
    """

    def __init__(self) -> None:
        self.own: list[GradientHandler] = []
        self._is_paused = False
        # Where autograd accumulates into the parameter itself: the node that does, and its hook.
        self._direct: dict[str, tuple[Node, RemovableHandle]] = {}

    def copy_to(self, twin: GradientHandlers) -> None:
        """Registers this program's own handlers for another program."""
        for handler in self.own:
            _registered(handler.function, twin.own)

    @property
    def _active(self) -> list[GradientHandler]:
        return [] if self._is_paused else [*_OF_ALL_PROGRAMS, *self.own]

    @property
    def are_registered(self) -> bool:
        """Whether handlers see the gradients."""
        return bool(self._active)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no handler is called."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @torch.no_grad()
    def run(self, weight: Weight, local: torch.Tensor) -> torch.Tensor:
        """What the handlers make of this rank's part of a gradient."""
        for handler in self._active:
            before = _kind(local)
            gradient = ParameterGradient(weight.name, local, weight.spec.stored, weight.wrap(local))
            returned = handler(gradient)
            _check(handler, gradient, "left", before, local)
            if returned is not None:
                _check(handler, gradient, "returned", before, returned)
                local = returned.detach()
        return local

    def attach(self, weights: Iterable[Weight]) -> None:
        """Comes with each call: the handlers see the gradients of those ``weights`` into which
        autograd accumulates itself, without a synchronisation.
        """
        if not self._active:
            return
        for weight in weights:
            if weight.leaf is not weight.parameter or not weight.parameter.requires_grad:
                continue
            node = get_gradient_edge(weight.parameter).node
            if self._direct.get(weight.name, (None,))[0] is not node:
                hook = node.register_prehook(_direct_hook(self, weight))
                self._direct[weight.name] = node, hook


def _direct_hook(handlers: GradientHandlers, weight: Weight) -> Any:
    """The hook of the node that accumulates the gradient of ``weight``."""
    weak_handlers, weak_weight = weakref.ref(handlers), weakref.ref(weight)

    def hook(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        own, of = weak_handlers(), weak_weight()
        (gradient,) = gradients
        if own is None or of is None or gradient is None or not own._active:
            return None
        # A copy: autograd may give several parameters the same tensor.
        return (own.run(of, gradient.clone()),)

    return hook


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _check(
    handler: GradientHandler,
    gradient: ParameterGradient,
    how: str,
    wanted: tuple[Any, ...],
    found: Any,
) -> None:
    """Raises RunError where ``found`` cannot be this rank's part of the gradient."""
    is_plain = isinstance(found, torch.Tensor) and not isinstance(found, DTensor)
    if is_plain and _kind(found) == wanted:
        return
    shape, dtype, device = wanted
    what = f"a {type(found).__name__}"
    if isinstance(found, torch.Tensor):
        what += f" of shape {tuple(found.shape)}, {found.dtype} on {found.device}"
    raise RunError(
        f"gradient handler {handler.__name__} {how} {what} for the gradient of {gradient.name}, "
        f"whose local part has shape {shape}, {dtype} on {device} (layout "
        f"{format_layout(gradient.layout)}): change gradient.local in place and return nothing, or "
        "return a tensor of that shape, dtype and device"
    )


class GradientHandling(nn.Module):
    """The part of a compiled module for gradients: handlers that see them, and their sums."""

    _runner: StepRunner

    def register_gradient_handler(self, handler: Handler) -> GradientHandler:
        """As :func:`autopar.register_gradient_handler`, for the gradients of this program alone. A
        deep copy of the program starts with the same handlers.

        Raises:
            RunError: as there.
        """
        return _registered(handler, self._runner.gradient_handlers.own)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, calls and their backwards sum no gradients of parameters over ranks, as in
        ``DistributedDataParallel.no_sync``: their parts wait in ``parameter.grad``, DTensors that
        are pending sums, for the next backward outside, which sums all. Clipping,
        ``full_tensor()`` and an optimizer's step sum it before; ``to_local()`` is this rank's part.
        All ranks enter it alike.

        It has no effect in microbatches and under a pipeline, whose backward runs inside the call,
        under ZeRO-3, which sums gradients inside the graph, and while parameters have hooks or
        gradient handlers.
        """
        before, self._runner.waits = self._runner.waits, True
        try:
            yield
        finally:
            self._runner.waits = before
