"""What is enumerated before anything is solved."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.schedule import SINGLE, in_flight
from autopar.search.space.modes import Mode
from autopar.search.space.options import Axis


@dataclass(frozen=True)
class Configuration:
    """The mesh of a stage, and how the batch goes through the stages."""

    pipeline: int
    axes: tuple[Axis, ...]
    microbatches: int
    chunks: int = 1
    schedule: str = "1f1b"

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def mode(self) -> Mode | None:
        """The mode that its mesh is for, if it is for one."""
        return next((a.mode for a in self.axes if a.mode is not None and a.is_required), None)

    def microbatches_in_flight(self) -> tuple[int, ...]:
        """Microbatches in flight, by stage; a device alone runs one after the other."""
        return (
            (1,)
            if self.stages == 1
            else in_flight(self.schedule, self.pipeline, self.chunks, self.microbatches)
        )

    def __str__(self) -> str:
        mesh = " x ".join(str(a.size) for a in self.axes)
        pipeline = f"pipeline {self.pipeline} of " if self.pipeline > 1 else ""
        return (
            f"{pipeline}mesh {mesh}, {self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        )


def least_step_ratio(shape: Configuration) -> float:
    """How many times the seconds of a microbatch in all stages together a step takes at least,
    however uneven the stages are.

    Rank r works m w_r and, where it has one stage and whole backwards, waits for the first
    microbatch to come from the ranks before and for the last one's gradients to go back there. The
    slowest of that is least where w_r = (1 - 1/m) w_(r-1).
    """
    m, p = shape.microbatches, shape.pipeline
    return 1 / (1 - (1 - 1 / m) ** p) if shape.schedule in SINGLE else m / p
