"""Plans whose seconds under many figures of a cluster are wanted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from published import Run

from autopar.cost_model import (
    Cluster,
    ComputeCosts,
    axis_links,
    collective_seconds,
    point_to_point,
    schedule_seconds,
)
from autopar.search.result.cost_items import FORWARD, STEP, CostItem, cost_items
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# that Adam moves for an element: float32 parameter, gradient and two moments are read, all but the
# gradient written; and the cast
BYTES = 34.0


class Repriced:
    """Plans whose seconds under other figures are wanted often: kernels and collectives as
    arrays.
    """

    def __init__(self, found: Iterable[tuple[Run, PricedPlan]]) -> None:
        """``found`` is read one by one, each within ``resized`` to its microbatch."""
        self.runs: list[Run] = []
        self.configurations: list[Configuration] = []
        self.kernels: dict[tuple[str, str, bool], list[tuple[float, ...]]] = defaultdict(list)
        self.sent: list[list[tuple[int, int, float, str, float, int]]] = []
        self.elements: list[list[float]] = []
        self.shared: list[list[tuple[list[int], float]]] = []
        for i, (run, f) in enumerate(found):
            self.runs.append(run)
            self.configurations.append(f.configuration)
            self.sent.append([])
            items = list(cost_items(f))
            for item in items:
                if item.phase != STEP:
                    self._add(i, item)
            self.elements.append(_stored(f).tolist())
            pipeline = f.costs.parameters.pipeline_axis
            self.shared.append(
                [
                    ([stage for stage, count in enumerate(item.count) if count], item.nbytes)
                    for item in items
                    if item.term is not None and item.term.axis == pipeline
                ]
            )
        self.tables = {key: np.array(rows) for key, rows in self.kernels.items()}

    def _add(self, i: int, item: CostItem) -> None:
        """Adds a kernel or collective of run ``i``, once for each stage that has it."""
        late = int(item.phase != FORWARD)
        for stage, count in enumerate(item.count):
            if not count:
                continue
            if item.term is None:
                kind = (item.kind, item.dtype, item.product is not None)
                sizes = (item.flops, item.nbytes, *(item.product or ()))
                self.kernels[kind].append((i, stage, late, count, *sizes))
            elif item.term.kind != "copy":
                sent = (item.term.kind, item.term.nbytes, item.term.axis)
                self.sent[i].append((stage, late, count, *sent))

    def seconds(self, cluster: Cluster) -> np.ndarray:
        """Of a step of each run."""
        compute = ComputeCosts(cluster)
        busy = np.zeros((len(self.runs), max(s.stages for s in self.configurations), 2))
        for (kind, dtype, product), rows in self.tables.items():
            taken = compute.seconds(
                kind, dtype, rows[:, 4], rows[:, 5], list(rows[:, 6:].T) if product else None
            )
            np.add.at(busy, tuple(rows[:, :3].T.astype(int)), taken * rows[:, 3])
        found = {
            sizes: axis_links(sizes, cluster)
            for sizes in {(s.pipeline, *s.sizes) for s in self.configurations}
        }
        return np.array(
            [
                self._step(i, busy[i], compute, found[(s.pipeline, *s.sizes)])
                for i, s in enumerate(self.configurations)
            ]
        )

    def _step(self, i: int, busy: np.ndarray, compute: ComputeCosts, links: Sequence) -> float:
        run, configuration = self.runs[i], self.configurations[i]
        for stage, late, count, kind, nbytes, axis in self.sent[i]:
            busy[stage, late] += count * collective_seconds(kind, nbytes, links[1 + axis])
        forward, backward = busy[: configuration.stages].T[:, :, None]
        send = point_to_point(2.0 * run.microbatch * run.sequence * run.hidden, links[0])
        ends = []
        for elements in self.elements[i]:
            end = compute.optimizer_seconds(elements * BYTES) + compute.overhead
            ends.append(
                end
                + (
                    collective_seconds("all_reduce", 2 * elements, links[1])
                    if run.data > 1
                    else 0.0
                )
            )
        for stages, nbytes in self.shared[i]:
            for stage in stages:
                ends[stage] += (
                    2 * (len(stages) - 1) * point_to_point(nbytes / len(stages), links[0])
                )
        span = schedule_seconds(
            configuration.schedule,
            configuration.pipeline,
            1,
            configuration.microbatches,
            forward,
            backward,
            send=np.full_like(forward, send),
        )
        return float(span[0]) + max(ends)


def _stored(found: PricedPlan) -> np.ndarray:
    """The elements of parameters that a device of each stage stores."""
    stored = np.zeros(found.configuration.stages)
    for v, k in zip(found.problem.vertices, found.solution.chosen, strict=True):
        if v.node.op == "placeholder" and found.costs.is_differentiable(v.node):
            nbytes = found.costs.local_bytes(v.node, [v.choices[k].out])[0]
            stored += v.count * nbytes / v.node.meta["val"].dtype.itemsize
    return stored
