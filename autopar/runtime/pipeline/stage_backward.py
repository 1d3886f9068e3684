"""The backward of one microbatch through one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.pipeline.split_backward import SplitBackward


class StageEntry(torch.autograd.Function):
    """The node of autograd at which a stage's graph begins: its outputs are the tensors that came
    from the stage before, and its backward puts their gradients into ``inbox``.

    Leaves would do the same, but autograd keeps the values of leaves alive, also where nothing
    needs them.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, inbox: list[torch.Tensor | None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inbox = inbox
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.inbox[:] = gradients
        return (None,) * (2 + len(gradients))


class MicrobatchBackward:
    """The backward from ``outputs`` to ``inputs`` and to the leaves of parameters: whole, or in two
    parts.

    Args:
        outputs: the tensors that have a gradient among those that the stage sent; in the last stage
            the loss.
        inputs: the edges of the tensors that the stage before gets gradients for.
        inbox: where :class:`StageEntry` puts these gradients.

    Attributes:
        gradients: the gradients of ``outputs``, set before the backward.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: list[GradientEdge],
        inbox: list[torch.Tensor | None],
    ) -> None:
        self._roots = [(i, get_gradient_edge(x)) for i, x in enumerate(outputs) if x.requires_grad]
        self._inputs, self._inbox = inputs, inbox
        self._split: SplitBackward | None = None
        self.gradients: list[torch.Tensor] = []

    def run(self) -> None:
        """The whole backward."""
        edges, gradients = self._take_roots()
        if edges:
            torch.autograd.backward(edges, gradients)

    def run_inputs(self) -> None:
        """The first part: the gradients of the inputs. A stage without inputs has all of its
        backward in the second part.
        """
        if self._inputs:
            self._split = SplitBackward(*self._take_roots(), self._inputs)
            self._inbox[:] = self._split.inputs()

    def run_leaves(self) -> None:
        """The second part: the gradients of the leaves."""
        if self._split is None:
            self.run()
        else:
            self._split.leaves()

    def take_input_gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the inputs, in their order; None for zeros. Drops them here."""
        gradients = list(self._inbox)
        self._inbox.clear()
        return gradients

    def _take_roots(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        edges = [edge for _, edge in self._roots]
        gradients = [self.gradients[i] for i, _ in self._roots]
        self._roots, self.gradients = [], []
        return edges, gradients
