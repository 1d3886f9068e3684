"""The work of every step: forwards, backwards and the synchronisation of gradients.

All of it is timed here, except the actions of a pipeline's schedule. :mod:`work_order` orders it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.compilation.backends import Backend
from autopar.runtime.measure.step_recorder import Mark, StepRecorder
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.model_state import ModelState
from autopar.runtime.pipeline.microbatches import Microbatches
from autopar.runtime.step.autograd_engine import BackwardObserver
from autopar.runtime.step.matmul_precision import MatmulPrecision
from autopar.runtime.step.program_variants import ProgramVariant

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.passes.lowering.lower import LoweredModel


class Synchronisation(Protocol):
    """Sums the gradients of parameters over ranks, once a step."""

    def clear(self) -> None:
        """Drops all gradients that are not delivered."""

    def begin(self) -> None:
        """The next backward is the last one before :meth:`finish`."""

    def finish(self) -> Gradients:
        """Waits for all sums. Returns this rank's part of each gradient."""

    def deliver(self, gradients: Gradients) -> None:
        """Adds ``gradients`` to ``parameter.grad``."""


class StepWork:
    """Runs the programs of one rank and updates the model's buffers.

    Arguments: ``microbatches`` selects a microbatch of the arguments (None: the step is one
    microbatch); ``loss``, its place among the outputs; ``sync`` synchronises the gradients;
    ``backend`` runs programs.
    """

    def __init__(
        self,
        captured: CapturedModel,
        lowered: LoweredModel,
        mesh: Mesh,
        state: ModelState,
        microbatches: Microbatches | None,
        loss: int,
        sync: Synchronisation,
        backend: Backend,
    ) -> None:
        self._updates, self._lowered = captured.updates, lowered
        self._mesh, self._state, self._microbatches = mesh, state, microbatches
        self._loss = loss
        self.sync, self._backend = sync, backend

    def compute(
        self,
        program: fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        roots: Collection[int],
    ) -> Sequence[torch.Tensor]:
        """Calls a program of this rank: the whole one, or that of a stage. Backwards begin at the
        results at the places ``roots``.
        """
        return self._backend.run(program, arguments, roots)

    def forward(
        self, variant: ProgramVariant, arguments: Sequence[torch.Tensor], microbatch: int
    ) -> list[torch.Tensor]:
        """Runs the whole program on one microbatch of ``arguments``: the tensors of the state, the
        inputs and what the prologue returned, of the whole batch. Updates buffers. Returns the
        user's outputs.
        """
        self._mesh.random_streams.microbatch = microbatch
        since = self._mesh.recorder.begin_compute("forward")
        if self._microbatches is not None:
            first = len(self._lowered.state)
            batch = self._microbatches.select(arguments[first:], microbatch)
            arguments = [*arguments[:first], *batch]
        results = self.compute(variant.program, arguments, (self._loss,))
        count = len(self._lowered.output_layouts)
        for i, value in enumerate(results[count:]):
            self.update(variant, i, value)
        self._mesh.recorder.end_compute(since)
        return list(results[:count])

    @torch.no_grad()
    def update(self, variant: ProgramVariant, i: int, value: torch.Tensor) -> None:
        """Writes ``value``, which the program returned as update number ``i``, into its buffer:
        after the last microbatch, if each microbatch makes a part of the value.
        """
        if i in variant.skipped_updates:
            return
        if self._microbatches is not None:
            joined = self._microbatches.join_update(i, value, self._mesh.random_streams.microbatch)
            if joined is None:
                return
            value = joined
        self._state.buffers[self._updates[i]].copy_(value)

    def backward(
        self,
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor] | None = None,
        *,
        last: bool,
        retain_graph: bool = False,
    ) -> None:
        """Runs the backward from ``roots``: tensors or edges of the graph. ``last``: no other
        backward of the step comes after it, so that full buckets of gradients may start.
        """
        self._mesh.arrivals.take_all()
        if last:
            self.sync.begin()
        since = self._mesh.recorder.begin_compute("backward")
        torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
        self._mesh.recorder.end_compute(since)


class DirectBackward(BackwardObserver):
    """Times a backward that autograd runs down to the parameters themselves, on a single device,
    and sets the matmul precision for it.
    """

    def __init__(self, recorder: StepRecorder, precision: MatmulPrecision) -> None:
        super().__init__(self._begin, self._end)
        self._recorder, self._precision = recorder, precision
        self._since: Mark = None

    def _begin(self) -> None:
        self._precision.open()
        self._since = self._recorder.begin_compute("backward")

    def _end(self) -> None:
        self._recorder.end_compute(self._since)
        self._precision.close()
