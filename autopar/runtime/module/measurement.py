"""What a compiled module has of measurements: the switch, and the comparison with the plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.errors import RunError
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.measure.peak_memory import step_peak_bytes

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.runtime.communication.mesh import Mesh
    from autopar.runtime.measure.comparison import Comparison
    from autopar.runtime.module.signature import OutputStructure
    from autopar.runtime.step.step_runner import StepRunner


class Measurement(nn.Module):
    """The part of a compiled module that measures its steps."""

    _plan: Plan
    _mesh: Mesh
    _output_structure: OutputStructure
    _runner: StepRunner

    @property
    def recording(self) -> bool:
        """Whether the times of steps are recorded: of the first twelve, and then of every tenth.
        Set it to False to record none from the next step on.
        """
        return self._mesh.recorder.is_on

    @recording.setter
    def recording(self, value: bool) -> None:
        self._mesh.recorder.is_on = value

    def compare(self, sample: Any = None) -> Comparison:
        """The plan's predictions beside the measurements of the recorded steps so far, by kind,
        stage and device; the same on every rank. All ranks must call it, after six or more calls of
        an ordinary training loop. The running step does not count. Raises :class:`RunError`, on
        every rank, if a rank has seen too few steps.

        On a GPU the memory is the most that torch's allocator has held since the process began, or
        since the script called ``torch.cuda.reset_peak_memory_stats()``. On a CPU it is measured
        only if a ``sample`` is given (a batch, in the form of the sample input): in one more
        forward and backward, which leave no trace.
        """
        from autopar.runtime.measure.compare import compare_ranks

        peak = None
        backend = self._plan.backend_on(self._mesh.device.type)
        if sample is not None and backend == "inductor":
            raise RunError(
                "compare(sample) counts the tensors that operators make, and a compiled program "
                'makes others: call compare(), or compile with backend="eager"'
            )
        if sample is not None and self._mesh.device.type == "cpu":
            loss_of, handlers = self._output_structure.loss_of, self._runner.gradient_handlers
            step = partial(step_peak_bytes, self, self._mesh, loss_of, sample, handlers)
            peak = run_on_all_ranks("a step for its memory", step)
        return compare_ranks(self._plan, self._mesh, peak)
