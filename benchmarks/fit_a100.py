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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from megatron import batch, gpt, options, searched
from published import Run, by_model, runs
from repriced import Repriced
from scipy.optimize import least_squares
from tabulate import tabulate
from tqdm import tqdm

from autopar.cost_model import Cluster
from autopar.cost_model.cluster_data import as_data
from autopar.cost_model.device import Tile
from autopar.formatting.files import write_json
from autopar.frontend.traced_model import TracedModel
from autopar.search.result.priced_plan import PricedPlan

# what a run may differ from the model and count in full; beyond this it counts less (soft L1)
NOISE = 0.08
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
