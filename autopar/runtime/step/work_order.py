"""The order of a step's work: whole, in microbatches, or staged by torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.step.gradient_paths import GradientPaths
from autopar.runtime.step.loss import LossScale
from autopar.runtime.step.program_variants import ProgramVariant
from autopar.runtime.step.rank_stages import RankStages
from autopar.runtime.step.step_work import StepWork


@dataclass
class Computed:
    """What a call has computed.

    Attributes:
        outputs: this rank's part of each output, for the whole batch.
        has_gradient: for each output, whether parameters or inputs have a gradient through it.
        gradients: those of the parameters, of the loss; None if the backward is still to run.
    """

    outputs: list[torch.Tensor]
    has_gradient: list[bool]
    gradients: Gradients | None


class WorkOrder(Protocol):
    """Orders the forwards and backwards of one call."""

    def run(
        self, variant: ProgramVariant, arguments: Sequence[torch.Tensor], inputs: Sequence[int]
    ) -> Computed:
        """Calls ``variant`` with ``arguments`` of the whole batch: the tensors of the state, the
        inputs and what the prologue returned. ``inputs`` are the numbers of the inputs that
        require a gradient.
        """


class WholeBatch:
    """One microbatch: its backward runs when the user asks for it."""

    def __init__(self, work: StepWork) -> None:
        self._work = work

    def run(
        self, variant: ProgramVariant, arguments: Sequence[torch.Tensor], inputs: Sequence[int]
    ) -> Computed:
        outputs = self._work.forward(variant, arguments, 0)
        return Computed(outputs, [output.requires_grad for output in outputs], None)


class MicrobatchLoop:
    """The forward and backward of one microbatch after another; ``loss`` is the loss's place among
    the outputs, ``loss_scale`` the gradient of the loss that backwards begin with.
    """

    def __init__(
        self, work: StepWork, microbatches: Microbatches, loss: int, loss_scale: LossScale
    ) -> None:
        self._work, self._microbatches, self._loss = work, microbatches, loss
        self._loss_scale = loss_scale

    def run(
        self, variant: ProgramVariant, arguments: Sequence[torch.Tensor], inputs: Sequence[int]
    ) -> Computed:
        made: list[list[torch.Tensor]] = []
        has_gradient: list[bool] = []
        self._work.sync.clear()
        for number in range(self._microbatches.count):
            outputs = self._work.forward(variant, arguments, number)
            has_gradient = [output.requires_grad for output in outputs]
            if has_gradient[self._loss]:
                last = number == self._microbatches.count - 1
                self._work.backward([self._loss_scale.scaled(outputs[self._loss])], last=last)
            made.append([output.detach() for output in outputs])
            del outputs  # and with it the graph, before the next forward
        joined = self._microbatches.join(made)
        del made
        gradients = self._work.sync.finish() if has_gradient[self._loss] else []
        return Computed(joined, has_gradient, gradients)


class PipelineSchedule:
    """The stages of this rank, in the order of a schedule; ``loss`` is the loss's place among the
    outputs.
    """

    def __init__(self, work: StepWork, stages: RankStages, paths: GradientPaths, loss: int) -> None:
        self._work, self._stages, self._paths, self._loss = work, stages, paths, loss

    def run(
        self, variant: ProgramVariant, arguments: Sequence[torch.Tensor], inputs: Sequence[int]
    ) -> Computed:
        has_gradient, returned = self._paths.find(inputs)
        backward = has_gradient[self._loss]
        self._work.sync.clear()
        update = partial(self._work.update, variant)
        made = self._stages.run(
            self._work.compute, arguments, update, variant.stages, backward, returned
        )
        gradients = self._work.sync.finish() if backward else []
        return Computed(self._stages.join(made), has_gradient, gradients)
