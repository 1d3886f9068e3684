"""Fits what no datasheet says of an A100, and of Megatron-DeepSpeed on it, to a third of vTrain's
single-node runs.

    python benchmarks/fit_a100.py --write

writes the preset ``a100-sxm``: its hardware, and the software "megatron-deepspeed" (the time
between two launches and a step's overhead; nothing of the gradients' sum is hidden, since that
software sends it in one piece). The software "eager" stays as it is.

Every third run, in the order of the file, is used: rows 0, 3, 6, ... Nothing else that
``accuracy.py`` scores is: what the runs leave open stays at the value that is known from elsewhere
(PRIOR says from where, and how far a fit may move it: a standard deviation in logarithms).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from megatron import batch, gpt, options, searched
from published import Run, by_model, runs
from scipy.optimize import least_squares
from tabulate import tabulate
from tqdm import tqdm

from autopar.cost_model import (
    Cluster,
    ComputeCosts,
    axis_links,
    collective_seconds,
    point_to_point,
    schedule_seconds,
)
from autopar.cost_model.cluster_data import as_data
from autopar.cost_model.device import Tile
from autopar.formatting.files import write_json
from autopar.frontend.traced_model import TracedModel
from autopar.search.result.cost_items import FORWARD, STEP, cost_items
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# what a run may differ from the model and count in full; beyond this it counts less (soft L1)
NOISE = 0.08
# that Adam moves for an element: float32 parameter, gradient and two moments are read, all but the
# gradient written; and the cast
BYTES = 34.0
TILES = (
    Tile(64, 64),
)  # cuBLAS chooses between many sizes: what is left over is as if all were small
VALIDATION = Path(__file__).parent / "validation"
SOFTWARE = "megatron-deepspeed"
PRESET = Path(__file__).parent.parent / "cost_model" / "clusters" / "a100-sxm.json"
# name: (value, standard deviation of its logarithm, where the value is from)
PRIOR = {
    "matmul": (0.76, 0.05, "cuBLAS reaches 230 to 250 of 312 TFLOP/s in long float16 products"),
    "memory": (0.80, 0.05, "STREAM-like kernels reach 80 % of HBM2e's rate"),
    "launch": (3e-5, 1.0, "eager PyTorch launches a kernel each 10 to 50 us"),
    "inner": (
        50.0,
        0.5,
        "a tile fills and drains its pipeline in about as long as 50 summands take",
    ),
    "startup": (3.5e-5, 0.3, "a small NCCL all-reduce of two ranks, with its launch"),
    "latency": (4e-6, 0.3, "one step of NCCL's ring over NVLink"),
    "nvlink": (
        0.77,
        0.01,
        "230 GB/s bus bandwidth of a long all-reduce on DGX A100 (NVIDIA, nccl-tests) of 300",
    ),
    "overhead": (3e-3, 1.0, "an optimizer step's work on the host, reading the loss"),
}


def cluster_of(base: Cluster, values: dict[str, float]) -> Cluster:
    """The preset with other values; nothing of the gradients' sum is hidden, as these runs do not
    send it in buckets.
    """
    curves = {
        **base.device.efficiency,
        "matmul": ((1e9, values["matmul"]),),
        "elementwise": ((1e6, values["memory"]),),
    }
    device = replace(base.device, tiles=TILES, inner=values["inner"], efficiency=curves)
    software = replace(
        base.software,
        name=SOFTWARE,
        launch=values["launch"],
        overhead=values["overhead"],
        overlap=0.0,
    )
    nvlink = replace(
        base.links[0],
        startup=values["startup"],
        latency=values["latency"],
        efficiency=values["nvlink"],
    )
    links = (nvlink, replace(base.links[1], startup=values["startup"]))
    return replace(base, device=device, software=software, links=links)


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
            stored = np.zeros(f.configuration.stages)
            shared = []
            for item in cost_items(f):
                if item.term is not None and item.term.axis == f.costs.parameters.pipeline_axis:
                    shared.append(
                        ([stage for stage, count in enumerate(item.count) if count], item.nbytes)
                    )
                for stage, count in enumerate(item.count):
                    if count and item.phase != STEP:
                        late = int(item.phase != FORWARD)
                        if item.term is None:
                            row = (
                                i,
                                stage,
                                late,
                                count,
                                item.flops,
                                item.nbytes,
                                *(item.product or ()),
                            )
                            self.kernels[item.kind, item.dtype, item.product is not None].append(
                                row
                            )
                        elif item.term.kind != "copy":
                            self.sent[i].append(
                                (
                                    stage,
                                    late,
                                    count,
                                    item.term.kind,
                                    item.term.nbytes,
                                    item.term.axis,
                                )
                            )
            for v, k in zip(f.problem.vertices, f.solution.chosen, strict=True):
                if v.node.op == "placeholder" and f.costs.is_differentiable(v.node):
                    stored += (
                        v.count
                        * f.costs.local_bytes(v.node, [v.choices[k].out])[0]
                        / v.node.meta["val"].dtype.itemsize
                    )
            self.elements.append(stored.tolist())
            self.shared.append(shared)
        self.tables = {key: np.array(rows) for key, rows in self.kernels.items()}

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


def priced(groups: Iterable[Sequence[Run]], cluster: Cluster) -> Iterator[tuple[Run, PricedPlan]]:
    """The plans that runs are runs of."""
    for group in groups:
        hidden, heads, layers, sequence, size = group[0].model
        traced = TracedModel(
            gpt(hidden, heads, layers, sequence), batch(size, sequence), None, "fp16"
        )
        for run in group:
            with searched(traced, run.batch, cluster, **options(run)) as found:
                yield run, found


def fitted(repriced: Repriced, base: Cluster) -> dict[str, float]:
    """The most likely values, given the runs and what was known before."""
    names, start = list(PRIOR), np.log([value for value, _, _ in PRIOR.values()])
    spread = np.array([deviation for _, deviation, _ in PRIOR.values()])
    measured = np.array([run.seconds for run in repriced.runs])

    def misses(x: np.ndarray) -> np.ndarray:
        off = (
            np.log(
                repriced.seconds(cluster_of(base, dict(zip(names, np.exp(x), strict=True))))
                / measured
            )
            / NOISE
        )
        return np.concatenate(
            [np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), (x - start) / spread]
        )

    return dict(
        zip(
            names,
            np.exp(least_squares(misses, start, max_nfev=15, diff_step=1e-3).x).tolist(),
            strict=True,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the preset")
    arguments = parser.parse_args()
    base = Cluster.load("a100-sxm")
    groups = list(by_model(runs(VALIDATION / "vtrain_a100_single_node.csv")[::3]))
    repriced = Repriced(priced(tqdm(groups, desc="planning"), base))
    values = fitted(repriced, base)
    off = (
        repriced.seconds(cluster_of(base, values))
        / np.array([run.seconds for run in repriced.runs])
        - 1
    )
    rows = [
        (name, value, f"{values[name]:.3g}", deviation, why)
        for name, (value, deviation, why) in PRIOR.items()
    ]
    print(tabulate(rows, headers=("", "prior", "fitted", "may move", "")))
    print(
        f"\n{len(off)} runs fitted: mean error {100 * abs(off).mean():.2f} %, worst "
        f"{100 * abs(off).max():.1f} %"
    )
    if arguments.write:
        write(base, {name: float(f"{value:.3g}") for name, value in values.items()})


def write(base: Cluster, values: dict[str, float]) -> None:
    """Writes the preset, with where each figure is from."""
    source = "benchmarks/fit_a100.py: rows 0, 3, 6, ... of vTrain's single-node runs"
    fitted_names = (
        "device.tiles",
        "device.inner",
        "device.efficiency.matmul",
        "device.efficiency.elementwise",
        "links.nvlink.startup",
        "links.nvlink.latency",
        "links.nvlink.efficiency",
        "links.network.startup",
        f"software.{SOFTWARE}.launch",
        f"software.{SOFTWARE}.overhead",
    )
    before = json.loads(PRESET.read_text(encoding="utf-8"))
    fitted_cluster = as_data(cluster_of(base, values))
    sources = {**before["sources"], **dict.fromkeys(fitted_names, source)}
    software = {**before["software"], **fitted_cluster["software"]}
    write_json(
        PRESET,
        {**before, **fitted_cluster, "name": before["name"], "software": software}
        | {"sources": sources},
        indent=2,
    )


if __name__ == "__main__":
    main()
