"""Makes the outputs of a call functions of the parameters, and of inputs that require a gradient.

The graph of a program ends in leaves whose gradients are not yet the parameters' gradients: each
rank holds a part of their sum. So the user's outputs come from one autograd node, the bridge,
between the parameters and the outputs. When a backward reaches it, it runs the program's own
backward; or, with microbatches and under a pipeline, whose backward ran inside the call, it takes
the gradients that this left. Then parameters and inputs get the gradients of one device, whoever
asks for them: ``loss.backward()``, ``torch.autograd.grad(loss, parameters)``, or a backward through
several programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from autopar.capture.hooks import has_hooks
from autopar.errors import RunError
from autopar.runtime.communication.watch.watchdog import blocking_section
from autopar.runtime.parameters.gradient_handlers import GradientHandlers
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.model_state import Weight
from autopar.runtime.step.autograd_engine import is_graph_retained, will_execute

OutputGradients = Sequence[torch.Tensor | None]
InputGradients = list[torch.Tensor | None]


class BackwardWork(Protocol):
    """The work of a call's backward."""

    def run(
        self, output_gradients: OutputGradients, retain_graph: bool, may_wait: bool
    ) -> tuple[Gradients, InputGradients]:
        """The gradients of the parameters, and of the inputs that require one. Where they
        ``may_wait`` for their sum over ranks, those of the parameters may be missing.
        """


def detach_inputs(inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """``inputs``, with a new leaf in place of each one that requires a gradient, and the places of
    these.
    """
    places = [i for i, x in enumerate(inputs) if x.requires_grad] if torch.is_grad_enabled() else []
    return [
        x.detach().requires_grad_(i in places) if x.requires_grad else x
        for i, x in enumerate(inputs)
    ], places


def take_gradients(leaves: Sequence[torch.Tensor]) -> InputGradients:
    """Removes the gradients of ``leaves`` and returns them."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


class PendingBackward:
    """A backward that is still to run, from ``outputs`` to the parameters' leaves and to
    ``input_leaves``. ``backward(roots, gradients, retain_graph, may_wait)`` runs it and returns the
    parameters' gradients.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        input_leaves: Sequence[torch.Tensor],
        backward: Callable[[list[GradientEdge], list[torch.Tensor], bool, bool], Gradients],
    ) -> None:
        # Edges instead of the outputs: an output that the user deletes must free its memory.
        self._edges: list[GradientEdge | None] = [
            get_gradient_edge(x) if x.requires_grad else None for x in outputs
        ]
        self._input_leaves, self._backward = input_leaves, backward

    def run(
        self, output_gradients: OutputGradients, retain_graph: bool, may_wait: bool
    ) -> tuple[Gradients, InputGradients]:
        starts = [
            (edge, g)
            for edge, g in zip(self._edges, output_gradients, strict=True)
            if edge is not None and g is not None
        ]
        roots, gradients = [edge for edge, _ in starts], [g for _, g in starts]
        return (
            self._backward(roots, gradients, retain_graph, may_wait),
            take_gradients(self._input_leaves),
        )


class FinishedBackward:
    """The results of a backward that ran inside the call, for a gradient of 1 of the loss.

    Arguments: ``gradients`` of the parameters; ``input_gradients``; ``loss``, its place among the
    outputs; ``inside``, for an error message, how the program runs; ``loss_scale``, the gradient of
    the loss that the backward began with.
    """

    def __init__(
        self,
        gradients: Gradients,
        input_gradients: InputGradients,
        loss: int,
        inside: str,
        loss_scale: float = 1.0,
    ) -> None:
        self._loss_scale = loss_scale
        self._input_gradients, self._loss, self._inside = input_gradients, loss, inside
        self._gradients: Gradients | None = gradients

    def run(
        self, output_gradients: OutputGradients, retain_graph: bool, may_wait: bool
    ) -> tuple[Gradients, InputGradients]:
        if any(g is not None for i, g in enumerate(output_gradients) if i != self._loss):
            raise RunError(
                "a gradient came back through an output that is not the loss: the program runs "
                f"{self._inside}, forward and backward inside the call, so that only what is in "
                "its own loss can have gradients. Compute what you add in the model, or in "
                "loss_fn(output, batch); detach() an output that is only read; or compile without "
                "a pipeline and with micro_batch_size= a rank's whole share of the batch"
            )
        if self._gradients is None:
            raise RunError(
                "the loss was backpropagated twice: in microbatches and under a pipeline its "
                "gradients exist once; call the program again, or pass retain_graph=True to the "
                "first backward"
            )
        scale = output_gradients[self._loss]
        assert scale is not None
        if self._loss_scale != 1.0:
            scale = scale / self._loss_scale
        of_inputs = [None if g is None else g * scale for g in self._input_gradients]
        if retain_graph:
            return [(w, g * scale) for w, g in self._gradients], of_inputs
        gradients, self._gradients = self._gradients, None
        # On a GPU, to compare the scale with 1 would wait for the device.
        if gradients and (scale.is_cuda or scale != 1):
            torch._foreach_mul_([value for _, value in gradients], scale)
        return gradients, of_inputs


class AutogradBridge:
    """Attaches the outputs of calls to the parameters ``weights`` and to inputs.

    ``deliver(gradients)`` adds gradients to ``parameter.grad``, after ``handlers`` have seen them.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        deliver: Callable[[Gradients], None],
        handlers: GradientHandlers,
        device: torch.device,
    ) -> None:
        self._weights, self._deliver, self._handlers = weights, deliver, handlers
        # A leaf that only a backward to all leaves reaches.
        self._anchor = torch.zeros((), requires_grad=True, device=device)

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        has_gradient: Sequence[bool],
        work: BackwardWork,
        inputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """``outputs`` with a history: the parameters and ``inputs`` have gradients through those
        outputs that ``has_gradient`` marks.
        """
        trained = [w for w in self._weights if w.parameter.requires_grad]
        # For parameters whose gradient ``deliver`` adds, the node returns None, and autograd would
        # call their hooks with None. So those with hooks are not attached: ``deliver`` calls hooks.
        attached = [w for w in trained if not has_hooks(w.parameter)]
        are_others_hooked = len(attached) < len(trained)
        call = _Call(work, self._deliver, self._handlers, attached, are_others_hooked)
        parameters = [w.parameter for w in attached]
        return list(
            _Bridge.apply(
                self._anchor, call, list(outputs), list(has_gradient), *inputs, *parameters
            )
        )


@dataclass
class _Call:
    """What the bridge of one call needs in its backward."""

    work: BackwardWork
    deliver: Callable[[Gradients], None]
    handlers: GradientHandlers
    attached: Sequence[Weight]  # the parameters among the arguments of the node
    has_hooks: bool  # whether other parameters have hooks


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        call: _Call,
        outputs: list[torch.Tensor],
        has_gradient: list[bool],
        *inputs_and_parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # The loss is a copy: the user may change it in place, as ``loss /= steps`` does.
        made = [x.clone() if x.ndim == 0 else x.detach() for x in outputs]
        ctx.mark_non_differentiable(
            *(x for x, differs in zip(made, has_gradient, strict=True) if not differs)
        )
        return tuple(made)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *output_gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True: the gradients of a program on several ranks, or in "
                "microbatches, have no gradients themselves: compute a penalty on gradients with "
                "the plain model, or compile with world_size=1 and one microbatch"
            )
        reaches_all = will_execute(ctx.next_functions[0][0])
        if call.has_hooks and not reaches_all:
            raise RunError(
                "torch.autograd.grad and backward(inputs=...) do not reach parameters that have "
                "hooks: remove the hooks before the call, or use loss.backward() alone"
            )
        # Hooks and handlers see sums, and so does who asks for gradients by name.
        is_seen = call.has_hooks or any(has_hooks(w.parameter) for w in call.attached)
        may_wait = reaches_all and not is_seen and not call.handlers.are_registered
        with blocking_section("backward"):
            arrived = [_whole(g) for g in output_gradients]
            gradients, of_inputs = call.work.run(arrived, is_graph_retained(), may_wait)
        # Autograd takes the gradients of parameters that the user asked for by name, and of those
        # that got hooks after the forward, because autograd will call these hooks.
        taken = {w.name for w in call.attached if not reaches_all or has_hooks(w.parameter)}
        if reaches_all:
            call.deliver(
                [(w, g) for w, g in gradients if w.name not in taken] if taken else gradients
            )
        returned = {}
        for w, g in gradients if taken else ():
            if w.name in taken:  # what ends in ``parameter.grad`` goes through the handlers
                returned[w.name] = w.wrap(call.handlers.run(w, g) if reaches_all else g)
        return (None,) * 4 + tuple(of_inputs) + tuple(returned.get(w.name) for w in call.attached)


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A DTensor, where the loop has added a term of the parameters to the loss, is made whole."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
