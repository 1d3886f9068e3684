"""torch's pipeline schedules by name, and the one that runs the order of a registered schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from autopar.cost_model.schedule import actions, traits
from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT, Action

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL_STAGES = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


def make_schedule(name: str, stages: Sequence[Any], pipeline: int, microbatches: int) -> Any:
    """torch's schedule for the ``stages`` of this rank.

    Args:
        name: of a built-in or registered schedule.
        pipeline: the number of pipeline ranks.
        microbatches: of a step.
    """
    numbers = name, pipeline, len(stages), microbatches
    how = traits(*numbers)
    options: dict[str, Any] = dict(loss_fn=lambda loss, _: loss, scale_grads=False)
    if how.runs_as in _ONE_STAGE:
        return _ONE_STAGE[how.runs_as](stages[0], microbatches, **options)
    if how.runs_as in _SEVERAL_STAGES:
        return _SEVERAL_STAGES[how.runs_as](list(stages), microbatches, **options)
    return _OwnSchedule(stages, microbatches, actions(*numbers), how.has_split_backward, options)


class _OwnSchedule(_PipelineScheduleRuntime):
    """Runs the actions ``orders`` of all ranks; torch adds when to send and receive."""

    def __init__(
        self,
        stages: Sequence[Any],
        microbatches: int,
        orders: Sequence[Sequence[Action]],
        is_split: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__(list(stages), microbatches, **options)
        kinds = {
            FORWARD: _ComputationType.FORWARD,
            BACKWARD: _ComputationType.BACKWARD_INPUT
            if is_split
            else _ComputationType.FULL_BACKWARD,
            WEIGHT: _ComputationType.BACKWARD_WEIGHT,
        }
        self._prepare_schedule_with_comms(
            {
                rank: [_Action(a.stage, kinds[a.kind], a.microbatch) for a in order]
                for rank, order in enumerate(orders)
            }
        )
