"""A priced plan: the problem of a graph that is cut into stages, its solution, and the seconds,
bytes and timeline that follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch.fx as fx

from autopar.cost_model import Timeline, simulate_schedule
from autopar.ir.plan_data import HOST_COPIES
from autopar.ir.schedules import stages_of_rank
from autopar.memory.staged_calls import StagedCalls
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem, RecomputedConversions
from autopar.search.ilp.solution import Solution
from autopar.search.pricing.costs import Costs
from autopar.search.pricing.step_prices import (
    ALL_EXPOSED,
    HIDES_NOTHING,
    ExposedParts,
    Hiding,
    StepPrices,
)
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.recompute_policy import OFFLOADED, RECOMPUTED
from autopar.search.space.strategies import Choice, ParameterStrategy

if TYPE_CHECKING:
    from autopar.search.result.chosen_program import ChosenProgram

SYNC, OPTIMIZER = "gradient synchronisation", "optimizer"  # the kinds of seconds of a step end

_PART_BYTES = 2000.0  # about, of a vertex or a tensor of a problem, or a node of its graph


@dataclass
class PricedPlan:
    """A plan of one configuration, with its costs.

    Attributes:
        analysis: of the graph, cut into the configuration's stages.
        gap: how far the step time may be from the optimum, relative to it.
        stage_of: the stages in which each node runs, or holds its tensor.
        calls: the calls of the graph, with those that may stand for others where memory is
            counted. None to count every call.
        has_buckets: whether parameters that may share a ZeRO bucket do.
        prefetch: how many ZeRO buckets are gathered ahead of the one in use.
        gathered_again: the conversions that the backward makes although it needs none of them:
            those of parameters in a ZeRO bucket with others that it needs.
        zero_buckets, zero_exposed: the plan's own, as in :class:`StepPrices`.
        step_prices: at which the solution was found; None for those of full buckets.
        counted_saved_bytes: by stage: bytes that autograd saves in one microbatch, counted storage
            by storage. None before the count.
        counted_bytes: by stage and kind: peak bytes, counted storage by storage. None before the
            count.
        problem_at: the problem of the plan at other costs, with the same vertices and choices; None
            for a plan that gathers no parameter in the graph, and after the count.
        output_bytes: by stage: bytes of the outputs besides the loss that it makes, of all
            microbatches. Where microbatches run inside the call, outputs are alive until it ends.
        known_ends, known_program: what :func:`end_of_step` and :func:`chosen_program` found. None
            before the first call.
    """

    analysis: Analysis
    configuration: Configuration
    problem: Problem
    costs: Costs
    solution: Solution
    gap: float
    stage_of: dict[fx.Node, tuple[int, ...]]
    calls: StagedCalls | None = None
    has_buckets: bool = True
    prefetch: int = 0
    gathered_again: RecomputedConversions = frozenset()
    zero_buckets: tuple[tuple[str, float], ...] | None = None
    zero_exposed: ExposedParts = ALL_EXPOSED
    step_prices: StepPrices | None = None
    problem_at: Callable[[Costs], Problem] | None = field(default=None, compare=False, repr=False)
    counted_saved_bytes: list[float] | None = None
    counted_bytes: list[dict[str, float]] | None = None
    output_bytes: list[float] = field(default_factory=list)
    known_ends: list[dict[str, float]] | None = field(default=None, init=False, compare=False)
    known_program: ChosenProgram | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.output_bytes:
            # The graph has the shapes of these microbatches now, and may have others later.
            self.output_bytes = [self._bytes_of_outputs(i) for i in range(self.problem.stages)]

    @property
    def nbytes(self) -> float:
        """About the bytes of memory of its problem, graph and costs."""
        parts = len(self.problem.vertices) + len(self.problem.tensors) + len(self.stage_of)
        return _PART_BYTES * parts + self.costs.conversions.nbytes

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.configuration.axes

    @property
    def microbatches(self) -> int:
        return self.configuration.microbatches

    def choice(self, node: fx.Node) -> Choice:
        v = self.problem.vertex_of[node]
        return self.problem.vertices[v].choices[self.solution.chosen[v]]

    def is_recomputed(self, node: fx.Node) -> bool:
        return self._state(node) == RECOMPUTED

    def is_offloaded(self, node: fx.Node) -> bool:
        """Whether the host keeps the result of a node until the backward."""
        return self._state(node) == OFFLOADED

    def _state(self, node: fx.Node) -> int:
        v = self.problem.vertex_of[node]
        return int(self.problem.vertices[v].states[self.solution.chosen[v]])

    def parameter_choices(self) -> list[tuple[fx.Node, np.ndarray, ParameterStrategy]]:
        """Each parameter and buffer, how often it occurs in each stage, and its strategy. One node
        stands for the parameters of equal blocks.
        """
        choices = (
            (v.node, v.count, v.choices[k])
            for v, k in zip(self.problem.vertices, self.solution.chosen, strict=True)
        )
        return [(n, count, c) for n, count, c in choices if isinstance(c, ParameterStrategy)]

    # Seconds

    @cached_property
    def end_of_step_estimate(self) -> list[dict[str, float]]:
        """:meth:`end_of_step_at`, where each parameter pays its share of a full bucket."""
        return self.end_of_step_at(None)

    def end_of_step_at(self, step_prices: StepPrices | None) -> list[dict[str, float]]:
        """Seconds of the step end at some prices, by stage and kind. ``optimizer`` contains
        everything after the gradients.
        """
        kinds = [dict.fromkeys((SYNC, OPTIMIZER), 0.0) for _ in range(self.problem.stages)]
        for node, counts, strategy in self.parameter_choices():
            parameters = self.costs.of(node).parameters.at(step_prices)
            sync = sum(t.seconds for t in parameters.synchronisation_terms(node, strategy))
            update = parameters.optimizer_seconds(node, strategy)
            for stage, count in enumerate(counts):
                kinds[stage][SYNC] += float(count) * sync
                kinds[stage][OPTIMIZER] += float(count) * update
        if step_prices:
            hidden = self.hidden_seconds(step_prices.hiding)
            for stage, constant in enumerate(step_prices.constants):
                kinds[stage][SYNC] += constant - hidden
        if self.microbatches > 1:
            # The outputs of all microbatches are concatenated.
            for stage, of_stage in enumerate(kinds):
                if nbytes := self.output_bytes[stage]:
                    of_stage[OPTIMIZER] += float(
                        self.costs.of_stage(stage).compute.seconds(
                            "copy", "", 0.0, 2 * nbytes, operator="cat"
                        )
                    )
        return kinds

    def hidden_seconds(self, hiding: Hiding) -> float:
        """Seconds of collectives that the computation of a plan without stage cuts hides."""
        assert hiding == HIDES_NOTHING or self.configuration.stages == 1
        breakdown = self.solution.cost_breakdown
        conversions = breakdown.converting + breakdown.converting_again
        seconds = breakdown.forward, breakdown.backward - conversions, conversions
        return sum(part * float(each[0]) for part, each in zip(hiding, seconds, strict=True))

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of all microbatches, without the step end."""
        breakdown, numbers = self.solution.cost_breakdown, self.configuration.schedule_numbers
        seconds = list(breakdown.forward), list(breakdown.backward)
        return simulate_schedule(*numbers, *seconds, send=self.send_seconds)

    @property
    def send_seconds(self) -> list[float]:
        """Seconds of sending a microbatch from each stage to the next, one way."""
        # A stage's ``send`` is what it receives, there and back.
        received = [float(s) / 2 for s in self.solution.cost_breakdown.send]
        return [*received[1:], 0.0]

    @cached_property
    def busiest_stages(self) -> list[int]:
        """The stages of the rank that computes longest."""
        breakdown, configuration = self.solution.cost_breakdown, self.configuration
        microbatch, pipeline = breakdown.forward + breakdown.backward, configuration.pipeline
        ranks = [list(stages_of_rank(r, configuration.stages, pipeline)) for r in range(pipeline)]

        def seconds(stage: int) -> float:
            end = sum(self.end_of_step_estimate[stage].values())
            return configuration.microbatches * float(microbatch[stage]) + end

        return max(ranks, key=lambda rank: sum(seconds(stage) for stage in rank))

    def seconds_by_kind(self, ends: Sequence[dict[str, float]] | None = None) -> dict[str, float]:
        """Seconds of a step, by kind: the work of the busiest rank, and its bubble.

        Args:
            ends: seconds of the step end by stage and kind, instead of
                :attr:`end_of_step_estimate`.
        """
        ends = ends or self.end_of_step_estimate
        breakdown, pipeline = self.solution.cost_breakdown, self.configuration.pipeline
        kinds = {
            "compute": breakdown.forward
            + breakdown.backward
            - breakdown.converting
            - breakdown.copying
            - breakdown.recomputation,
            "conversions": breakdown.converting,
            "recomputation": breakdown.recomputation,
            HOST_COPIES: breakdown.copying,
        }
        busiest = self.busiest_stages
        seconds = {
            kind: self.microbatches * float(each[busiest].sum()) for kind, each in kinds.items()
        }
        seconds |= {kind: sum(ends[i][kind] for i in busiest) for kind in (SYNC, OPTIMIZER)}
        for kind in ("recomputation", HOST_COPIES):
            if not seconds[kind]:
                del seconds[kind]
        if self.configuration.stages > 1:
            rank_ends = [
                sum(sum(stage.values()) for stage in ends[r::pipeline]) for r in range(pipeline)
            ]
            total = max(
                finish[-1] + end for finish, end in zip(self.timeline.ends, rank_ends, strict=True)
            )
            seconds["bubble"] = max(0.0, total - sum(seconds.values()))
        return seconds

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, as the problem counts them."""
        return sum(self.seconds_by_kind(self.end_of_step_at(self.step_prices)).values())

    # Bytes

    def device_bytes(self) -> list[float]:
        """Peak bytes of the device of each pipeline rank."""
        configuration = self.configuration
        stages = [sum(self.bytes_by_kind(stage).values()) for stage in range(configuration.stages)]
        return [sum(stages[r :: configuration.pipeline]) for r in range(configuration.pipeline)]

    def bytes_by_kind(self, stage: int) -> dict[str, float]:
        """Bytes of one stage on its device, by kind: counted, or else as the problem counts
        them.
        """
        if self.counted_bytes is not None:
            return self.counted_bytes[stage]
        kinds: dict[str, float] = defaultdict(float)
        for node, count, strategy in self.parameter_choices():
            if count[stage]:
                for kind, nbytes in self.costs.parameters.state_bytes(node, strategy).items():
                    kinds[kind] += float(count[stage]) * nbytes
        in_flight = self.configuration.microbatches_in_flight()[stage]
        kinds["activations"] = float(self.solution.cost_breakdown.kept[stage]) * in_flight
        kinds["outputs"] = self.output_bytes[stage]
        return {kind: n for kind, n in kinds.items() if n}

    def host_bytes_by_kind(self, stage: int) -> dict[str, float]:
        """Bytes of each rank of a stage in the memory of the host, by kind."""
        parameters = self.costs.parameters
        state = sum(
            float(count[stage]) * parameters.host_bytes(node, strategy)
            for node, count, strategy in self.parameter_choices()
        )
        chosen = zip(self.problem.vertices, self.solution.chosen, strict=True)
        results = sum(
            float(v.count[stage]) * float(v.result[k])
            for v, k in chosen
            if v.states[k] == OFFLOADED
        )
        in_flight = self.configuration.microbatches_in_flight()[stage]
        kinds = {OPTIMIZER: state, "activations": in_flight * results}
        return {kind: n for kind, n in kinds.items() if n}

    def _bytes_of_outputs(self, stage: int) -> float:
        if self.microbatches == 1 and self.configuration.stages == 1:
            return 0.0
        count = self.analysis.captured.out_spec.num_leaves
        outputs = [n for n in self.analysis.outputs[:count] if isinstance(n, fx.Node)]
        others = [n for n in outputs if n is not self.analysis.loss and n.op == "call_function"]
        made = [n for n in others if self.stage_of[n][-1] == stage]
        return self.microbatches * sum(
            float(self.costs.local_bytes(n, [self.choice(n).out])[0]) for n in made
        )
