"""What a call returns, as autograd sees it: functions of the parameters and of the inputs that
require a gradient.

The graph of a program ends in leaves of ours, whose gradients are no parameter's yet: ranks hold
parts of their sums. So what the user gets is one node of autograd's, which does the rest when a
backward reaches it: the program's own backward, or with microbatches and under a pipeline, where
that ran inside the call, the release of what it left. Then parameters and inputs have the gradients
that they would have on one device, whoever asked for them: ``loss.backward()``,
``torch.autograd.grad(loss, parameters)``, another program in the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.errors import RunError
from autopar.runtime.communication.watchdog import blocking_section
from autopar.runtime.measure.autograd_engine import is_graph_retained, will_execute
from autopar.runtime.parameters.gradients import Gradients, GradientSync
from autopar.runtime.parameters.weight import Weight

Arrived = Sequence[torch.Tensor | None]


class BackwardWork(Protocol):
    """What a call has left for its backward."""

    def run(self, arrived: Arrived, keep: bool) -> tuple[Gradients, list[torch.Tensor | None]]:
        """The gradients of parameters, and those of the inputs that :func:`detach_inputs` took, from
        those of the outputs; ``keep`` for another backward."""


def detach_inputs(inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """``inputs`` with leaves for those that require a gradient, and which these are."""
    places = [i for i, x in enumerate(inputs) if x.requires_grad] if torch.is_grad_enabled() else []
    return [
        x.detach().requires_grad_(i in places) if x.requires_grad else x
        for i, x in enumerate(inputs)
    ], places


def take_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Takes the gradients of ``leaves`` away."""
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


class PendingBackward:
    """A backward that is still to run, from ``outputs`` to the leaves of parameters and to
    ``leaves``, those of inputs. ``begins`` and ``ends`` are called around it."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        sync: GradientSync,
        begins: Callable[[], None],
        computed: Callable[[], None],
        ends: Callable[[], None],
    ) -> None:
        # The edges, not the tensors: who has let go of an output shall not have it in memory.
        self._edges: list[GradientEdge | None] = [
            get_gradient_edge(x) if x.requires_grad else None for x in outputs
        ]
        self._leaves, self._sync = leaves, sync
        self._begins, self._computed, self._ends = begins, computed, ends

    def run(self, arrived: Arrived, keep: bool) -> tuple[Gradients, list[torch.Tensor | None]]:
        starts = [
            (edge, g)
            for edge, g in zip(self._edges, arrived, strict=True)
            if edge is not None and g is not None
        ]
        self._begins()
        self._sync.clear()
        self._sync.begin()
        torch.autograd.backward(
            [edge for edge, _ in starts], [g for _, g in starts], retain_graph=keep
        )
        self._computed()
        gradients = self._sync.finish()
        self._ends()
        return gradients, take_gradients(self._leaves)


class FinishedBackward:
    """The gradients of a backward that has run: of the output number ``loss``, for a gradient of 1.
    No other output has one; ``why``.
    """

    def __init__(
        self, gradients: Gradients, inputs: list[torch.Tensor | None], loss: int, why: str
    ) -> None:
        self._inputs, self._loss, self._why = inputs, loss, why
        self._gradients: Gradients | None = gradients

    def run(self, arrived: Arrived, keep: bool) -> tuple[Gradients, list[torch.Tensor | None]]:
        if any(g is not None for i, g in enumerate(arrived) if i != self._loss):
            raise RunError(self._why)
        if self._gradients is None:
            raise RunError(
                "the loss was backpropagated twice: in microbatches and under a pipeline its "
                "gradients exist once; call the program "
                "again, or pass retain_graph=True to the first backward"
            )
        scale = arrived[self._loss]
        assert scale is not None
        if keep:
            return [(w, g * scale) for w, g in self._gradients], [
                None if g is None else g * scale for g in self._inputs
            ]
        gradients, self._gradients = self._gradients, None
        if gradients and (
            scale.is_cuda or scale != 1
        ):  # no wait for the device to save a multiplication
            torch._foreach_mul_([value for _, value in gradients], scale)
        return gradients, [None if g is None else g * scale for g in self._inputs]


class AutogradBridge:
    """Makes the outputs of a program's calls functions of its parameters ``weights`` and of
    inputs.
    """

    def __init__(self, weights: Sequence[Weight], sync: GradientSync, device: torch.device) -> None:
        self._weights, self._sync = weights, sync
        self._anchor = torch.zeros(
            (), requires_grad=True, device=device
        )  # which only a backward to all leaves reaches

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        differ: Sequence[bool],
        work: BackwardWork,
        inputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """``outputs`` with a history: those that ``differ``, which ``inputs`` and the parameters
        have gradients through.
        """
        trained = [w for w in self._weights if w.parameter.requires_grad]
        # autograd would call hooks with None where it passes by a parameter whose gradient it has
        # not: these are called by hand.
        open_ = [w for w in trained if not has_hooks(w.parameter)]
        state = _Call(work, self._sync, open_, len(inputs), len(open_) < len(trained))
        return list(
            _Release.apply(
                self._anchor,
                state,
                list(outputs),
                list(differ),
                *inputs,
                *(w.parameter for w in open_),
            )
        )


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether someone waits for its gradient."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


class _Call:
    def __init__(
        self,
        work: BackwardWork,
        sync: GradientSync,
        weights: Sequence[Weight],
        inputs: int,
        hooks: bool,
    ) -> None:
        self.work, self.sync, self.weights, self.inputs, self.hooks = (
            work,
            sync,
            weights,
            inputs,
            hooks,
        )


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        call: _Call,
        outputs: list[torch.Tensor],
        differ: list[bool],
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        # A loss of its own: it may be changed in place, as ``loss /= steps`` does.
        made = [x.clone() if x.ndim == 0 else x.detach() for x in outputs]
        ctx.mark_non_differentiable(*(x for x, d in zip(made, differ, strict=True) if not d))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True: the gradients of a program on several ranks, or in "
                "microbatches, have no gradients themselves: "
                "compute a penalty on gradients with the plain model, or compile with "
                "world_size=1 and one microbatch"
            )
        to_all = will_execute(ctx.next_functions[0][0])
        if call.hooks and not to_all:
            raise RunError(
                "torch.autograd.grad and backward(inputs=...) do not reach parameters that have "
                "hooks: remove the hooks before the call, "
                "or use loss.backward() alone"
            )
        with blocking_section():
            gradients, inputs = call.work.run(arrived, is_graph_retained())
        # What is asked for by name autograd takes itself; and what has got hooks since the forward,
        # as it will call them.
        taken = {w.name for w in call.weights if not to_all or has_hooks(w.parameter)}
        if to_all:
            call.sync.deliver(
                [(w, g) for w, g in gradients if w.name not in taken] if taken else gradients
            )
        found = {w.name: w.wrap(g) for w, g in gradients if w.name in taken} if taken else {}
        return (None,) * 4 + tuple(inputs) + tuple(found.get(w.name) for w in call.weights)
