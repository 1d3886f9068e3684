"""What a search found: the problem with everything decided, its bill, and the timeline that
follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.fx as fx

from autopar.cost_model import Timeline, simulate_schedule
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.pricing.costs import Costs
from autopar.search.space.configuration import Configuration
from autopar.search.space.options import Axis
from autopar.search.space.recompute_policy import RECOMPUTED
from autopar.search.space.strategies import Choice, ParameterStrategy

ONCE = ("gradient synchronisation", "optimizer")


@dataclass
class PricedPlan:
    """The best plan of one shape: the graph (cut into its stages), the problem and its solution,
    and how far it may be from the optimum.
    """

    analysis: Analysis
    shape: Configuration
    problem: Problem
    costs: Costs
    solution: Solution
    gap: float
    stage_of: dict[fx.Node, tuple[int, ...]]
    # Counted storage by storage, by stage: what a microbatch keeps, and the peak by kind; where
    # they are None the problem's own count.
    kept: list[float] | None = None
    nbytes: list[dict[str, float]] | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.shape.axes

    @property
    def microbatches(self) -> int:
        return self.shape.microbatches

    def choice(self, node: fx.Node) -> Choice:
        v = self.problem.vertex_of[node]
        return self.problem.vertices[v].choices[self.solution.chosen[v]]

    def recomputed(self, node: fx.Node) -> bool:
        v = self.problem.vertex_of[node]
        return int(self.problem.vertices[v].states[self.solution.chosen[v]]) == RECOMPUTED

    @cached_property
    def end_of_step_estimate(self) -> list[dict[str, float]]:
        """Seconds of a step's end, by stage and kind: "optimizer" is all that follows the
        gradients.
        """
        found = [dict.fromkeys(ONCE, 0.0) for _ in range(self.problem.stages)]
        for v, k in zip(self.problem.vertices, self.solution.chosen, strict=True):
            choice = v.choices[k]
            if isinstance(choice, ParameterStrategy):
                sync = sum(t.seconds for t in self.costs.synchronisation_terms(v.node, choice))
                update = self.costs.update(v.node, choice)
                for stage, count in enumerate(v.count):
                    found[stage]["gradient synchronisation"] += float(count) * sync
                    found[stage]["optimizer"] += float(count) * update
        for stage in (
            range(self.problem.stages) if self.microbatches > 1 else ()
        ):  # what microbatches return is put together
            if nbytes := self._outputs(stage):
                found[stage]["optimizer"] += float(
                    self.costs.compute.seconds("copy", "", 0.0, 2 * nbytes, operator="cat")
                )
        return found

    @cached_property
    def timeline(self) -> Timeline:
        """Of all microbatches."""
        cost_breakdown, shape = self.solution.cost_breakdown, self.shape
        return simulate_schedule(
            shape.schedule,
            shape.pipeline,
            shape.chunks,
            shape.microbatches,
            list(cost_breakdown.forward),
            list(cost_breakdown.backward),
            send=self.send_seconds,
        )

    @property
    def send_seconds(self) -> list[float]:
        """Seconds from each stage to the next, one way."""
        ahead = [
            float(s) / 2 for s in self.solution.cost_breakdown.send
        ]  # of what a stage receives, there and back
        return [*ahead[1:], 0.0]

    @cached_property
    def busiest_stages(self) -> list[int]:
        """The stages of the rank that has most to do."""
        cost_breakdown, shape = self.solution.cost_breakdown, self.shape
        ranks = [list(range(r, shape.stages, shape.pipeline)) for r in range(shape.pipeline)]
        return max(
            ranks,
            key=lambda rank: sum(
                shape.microbatches * float((cost_breakdown.forward + cost_breakdown.backward)[i])
                + self._end(i)
                for i in rank
            ),
        )

    def _end(self, stage: int) -> float:
        return sum(self.end_of_step_estimate[stage].values())

    def seconds_by_kind(self, ends: Sequence[dict[str, float]] | None = None) -> dict[str, float]:
        """The step time: what the busiest rank does, and what it waits for; with other ``ends`` of
        a step than :attr:`end_of_step_estimate`.
        """
        end_of_step_estimate = ends or self.end_of_step_estimate
        cost_breakdown, shape = self.solution.cost_breakdown, self.shape
        kinds = {
            "compute": cost_breakdown.forward
            + cost_breakdown.backward
            - cost_breakdown.converting
            - cost_breakdown.recomputation,
            "conversions": cost_breakdown.converting,
            "recomputation": cost_breakdown.recomputation,
        }
        seconds = {
            kind: shape.microbatches * float(each[self.busiest_stages].sum())
            for kind, each in kinds.items()
        }
        seconds |= {
            kind: sum(end_of_step_estimate[i][kind] for i in self.busiest_stages) for kind in ONCE
        }
        if not seconds["recomputation"]:
            del seconds["recomputation"]
        if shape.stages > 1:
            last = [
                sum(sum(stage.values()) for stage in end_of_step_estimate[r :: shape.pipeline])
                for r in range(shape.pipeline)
            ]
            total = max(
                finish[-1] + end for finish, end in zip(self.timeline.ends, last, strict=True)
            )
            seconds["bubble"] = max(0.0, total - sum(seconds.values()))
        return seconds

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.seconds_by_kind().values())

    def device_bytes(self) -> list[float]:
        """Of each pipeline rank."""
        stages = [sum(self.nbytes_by_kind(stage).values()) for stage in range(self.shape.stages)]
        return [sum(stages[r :: self.shape.pipeline]) for r in range(self.shape.pipeline)]

    def _outputs(self, stage: int) -> float:
        """What the model returns besides its loss, of all microbatches: where these run inside the
        call, it is held to its end.
        """
        if self.microbatches == 1 and self.shape.stages == 1:
            return 0.0
        outputs = [
            n
            for n in self.analysis.outputs[: self.analysis.captured.out_spec.num_leaves]
            if isinstance(n, fx.Node)
        ]
        others = [n for n in outputs if n is not self.analysis.loss and n.op == "call_function"]
        made = [n for n in others if self.stage_of[n][-1] == stage]
        return self.microbatches * sum(
            float(self.costs.local_bytes(n, [self.choice(n).out])[0]) for n in made
        )

    def nbytes_by_kind(self, stage: int) -> dict[str, float]:
        """A stage's part of its device's memory."""
        if self.nbytes is not None:
            return self.nbytes[stage]
        kinds: dict[str, float] = defaultdict(float)
        for v, k in zip(self.problem.vertices, self.solution.chosen, strict=True):
            choice = v.choices[k]
            if isinstance(choice, ParameterStrategy) and v.count[stage]:
                for kind, nbytes in self.costs.state_bytes(v.node, choice).items():
                    kinds[kind] += float(v.count[stage]) * nbytes
        kinds["activations"] = (
            float(self.solution.cost_breakdown.kept[stage])
            * self.shape.microbatches_in_flight()[stage]
        )
        kinds["outputs"] = self._outputs(stage)
        return {kind: n for kind, n in kinds.items() if n}
