"""The parallel configuration: what the outer search enumerates before anything is solved."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.schedule import Traits, in_flight, order_digest, traits
from autopar.cost_model.simulate import schedule_seconds
from autopar.ir.plan_data import EXACT_AXES
from autopar.ir.schedules import SCHEDULES
from autopar.search.space.meshes import Axis
from autopar.search.space.modes.mode import Mode


@dataclass(frozen=True)
class Configuration:
    """The mesh of a stage, and how the batch goes through the stages.

    Attributes:
        pipeline: the number of pipeline ranks.
        axes: the mesh of each stage, slowest links first.
        microbatches: the number of microbatches of a step.
        chunks: the number of stages that each pipeline rank runs.
        schedule: the name of the pipeline schedule.
        place: the number of axes that cross slower links than the pipeline. None where the
            placement is open: bounds of the configuration then hold for every order of the axes and
            the pipeline, and no candidate can be made of it.
        kinds: on a cluster of several kinds of devices, the number of the kind of each pipeline
            rank; empty where the placement is open, without a pipeline, and on other clusters.
    """

    pipeline: int
    axes: tuple[Axis, ...]
    microbatches: int
    chunks: int = 1
    schedule: str = "1f1b"
    place: int | None = 0
    kinds: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mesh axes."""
        return tuple(a.size for a in self.axes)

    @property
    def mode(self) -> Mode | None:
        """The mode that the mesh must use; None where it need not use any."""
        return next((a.mode for a in self.axes if a.mode is not None and a.is_required), None)

    @property
    def has_free_axes(self) -> bool:
        """Whether an axis of the mesh may split anything."""
        return any(a.use == "free" for a in self.axes)

    @property
    def has_all_strategies(self) -> bool:
        """Whether the ILP has all strategies on the mesh. On more axes it has those near the
        solutions of coarser meshes.
        """
        axes = self.axes
        return len(axes) <= EXACT_AXES or all(a.mode is not None or a.use == "data" for a in axes)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Simpler configurations have smaller numbers."""
        return (
            self.pipeline,
            len(self.axes),
            self.mode is not None,
            self.has_free_axes,
            self.chunks,
            self.schedule not in ("1f1b", "interleaved-1f1b"),
            bool(self.place),
            self.kinds != tuple(sorted(self.kinds)),
            len(self.axes) > 1 and self.axes[-1].use == "data",
            self.microbatches,
        )

    def kind_of(self, stage: int) -> int:
        """The number of the kind of devices that a stage runs on."""
        return self.kinds[stage % self.pipeline] if self.kinds else 0

    @property
    def schedule_numbers(self) -> tuple[str, int, int, int]:
        """The schedule, and the numbers on which its order depends: of pipeline ranks, of chunks
        and of microbatches.
        """
        return self.schedule, self.pipeline, self.chunks, self.microbatches

    @property
    def traits(self) -> Traits:
        """What torch makes of the schedule."""
        return traits(*self.schedule_numbers)

    @property
    def order_digest(self) -> str:
        """For a registered schedule, a digest of its order; else ""."""
        return order_digest(*self.schedule_numbers)

    def microbatches_in_flight(self) -> tuple[int, ...]:
        """The most microbatches in flight in each stage. One stage runs microbatches one by one."""
        if self.stages == 1:
            return (1,)
        return in_flight(*self.schedule_numbers)

    def __str__(self) -> str:
        mesh = " x ".join(str(a.size) for a in self.axes)
        pipeline = f"pipeline {self.pipeline} of " if self.pipeline > 1 else ""
        if self.pipeline > 1 and self.place:
            pipeline = f"pipeline {self.pipeline} at place {self.place} of "
        return (
            f"{pipeline}mesh {mesh}, {self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        )


def least_step_ratio(configuration: Configuration) -> float:
    """The least step time as a multiple of the time of one microbatch in all stages together,
    however uneven the stages are.

    Let m be the number of microbatches, and w_r the time of one microbatch on pipeline rank r. The
    rank works for m w_r. Where each rank has one stage and whole backwards, rank r also waits until
    the first microbatch has passed the ranks before it, and the step ends when the gradients of
    the last microbatch have passed them, too. The slowest rank is fastest where
    w_r = (1 - 1/m) w_(r-1).

    In every schedule one microbatch passes all stages, forward and backward. A schedule that splits
    backwards may leave half of the last backward for later.
    """
    m, p = configuration.microbatches, configuration.pipeline
    is_split = configuration.traits.has_split_backward
    if configuration.chunks == 1 and not is_split:
        return 1 / (1 - (1 - 1 / m) ** p)
    return max(m / p, 0.5 if is_split else 1.0)


def estimated_step_ratio(configuration: Configuration) -> float:
    """About the step time as a multiple of the time of one microbatch in all stages together, with
    equal stages. A warm-up and a drain take p - 1 times a stage's chunk; the zero-bubble schedule
    fills two thirds of them, where there are enough microbatches, and otherwise one third. A
    registered schedule is simulated, with backwards twice as long as forwards.
    """
    if configuration.schedule not in SCHEDULES and configuration.pipeline > 1:
        return max(_simulated_ratio(configuration), least_step_ratio(configuration))
    m, p, chunks = configuration.microbatches, configuration.pipeline, configuration.chunks
    waiting = 1.0
    if configuration.schedule == "zero-bubble":
        waiting = 1 / 3 if m >= 2 * p else 2 / 3
    return max((m + waiting * (p - 1) / chunks) / p, least_step_ratio(configuration))


def _simulated_ratio(configuration: Configuration) -> float:
    stages = configuration.stages
    forward, backward = [1 / (3 * stages)] * stages, [2 / (3 * stages)] * stages
    return float(schedule_seconds(*configuration.schedule_numbers, forward, backward))
