"""The preset ``b200-sxm``: one node of 8 B200s, from measured kernels and collectives.

    python benchmarks/b200_preset.py    # writes the preset

The kernels are those of ``validation/b200_kernels.csv``, through ``Cluster.from_measurements``. The
other figures are of the folder's README, of datasheets, or assumed, as the preset's sources say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cost_model import Cluster, CollectiveFigures, Device, Level
from autopar.cost_model.cluster_data import as_data
from autopar.formatting.files import write_json

VALIDATION = Path(__file__).parent / "validation"
SOFTWARE = "megatron-te"
PRESET = Path(__file__).parent.parent / "cost_model" / "clusters" / "b200-sxm.json"
GIB = 2.0**30
NVLINK = 900 * GIB  # B/s of which a collective reaches a share
PEAK = 2250e12
NOMINAL, REACHED, EACH = 8e12, 0.666, 3e-5  # of memory-bound kernels: B/s, share, seconds each
CROSS_ENTROPY = 0.28  # the share of a fused cross entropy
# collective: share of NVLINK, seconds before the first step, seconds of a step
COLLECTIVES = {
    "all_reduce": (0.742, 22.2e-6, 5.5e-6),
    "all_gather": (0.674, 23.1e-6, 9.2e-6),
    "reduce_scatter": (0.673, 25.6e-6, 8.0e-6),
}
ALL_TO_ALL, ALL_TO_ALL_STEP = 0.597, 7.3e-6
ALL_TO_ALL_STARTUP = {2: 51e-6, 4: 19e-6, 8: 0.0}
MESSAGE, MESSAGE_SECONDS = 1.45, 16e-6
HOST_BANDWIDTH = 50e9
FACTS = "benchmarks/validation/README.md: measured on one node of 8 B200s"
ASSUMED = "assumption, to be replaced by a profile of the machine"
AS_H100 = f"as in the h100-sxm preset; {ASSUMED}"
FUSES = "torch.compile: inductor joins pointwise operators and reductions"
PCIE = (
    "NVIDIA DGX B200: PCIe 5.0 x16, 64 GB/s one direction; assumption, to be replaced by a profile "
    "of the machine: pinned copies reach 80 % of it"
)
HGX = "NVIDIA HGX B200 datasheet, dense, one GPU"


def memory_curve(share: float) -> tuple[tuple[float, float], ...]:
    """The part of the nominal bandwidth that a memory-bound kernel of some bytes reaches."""
    sizes = [2.0**n for n in range(10, 40)]
    return tuple((n, float(f"{n / (EACH + n / (share * NOMINAL)) / NOMINAL:.4g}")) for n in sizes)


def measured_messages() -> dict[str, dict[str, Any]]:
    """Seconds of all-to-alls and of messages by ranks."""
    found: dict[str, dict[str, Any]] = {"all_to_all": {}, "send": {}}
    sizes = [2.0**n for n in range(10, 36)]
    for ranks, startup in ALL_TO_ALL_STARTUP.items():
        # bytes are those of the whole tensor, of which a rank holds and sends a part
        rate = ALL_TO_ALL * NVLINK * ranks**2 / (ranks - 1)
        found["all_to_all"][str(ranks)] = tuple(
            (n, startup + (ranks - 1) * ALL_TO_ALL_STEP + n / rate) for n in sizes
        )
        found["send"][str(ranks)] = tuple(
            (n, MESSAGE_SECONDS + n / (MESSAGE * NVLINK)) for n in sizes
        )
    return found


def without_kernels() -> Cluster:
    """The cluster without measured products and attention."""
    h100 = Cluster.load("h100-sxm")
    nvlink = node_links()
    network = replace(h100.links[1], startup=nvlink.startup)
    device = datasheet()
    return Cluster(
        "b200-sxm", device, h100.software, (nvlink, network), sources(device, h100.sources)
    )


def datasheet() -> Device:
    """One B200, with the rates of memory-bound kernels."""
    entropy = memory_curve(CROSS_ENTROPY)
    return Device(
        "NVIDIA B200-SXM-180GB",
        {"float32": 75e12, "tf32": 1125e12, "bfloat16": PEAK, "float16": PEAK, "float64": 37e12},
        NOMINAL,
        180 * 10**9,
        {
            "matmul": ((1e9, 0.5),),
            "conv": ((1e9, 0.5),),
            "elementwise": memory_curve(REACHED),
            "_log_softmax": entropy,
            "_log_softmax_backward_data": entropy,
        },
        host_bandwidth=HOST_BANDWIDTH,
    )


def node_links() -> Level:
    """The links in a node."""
    others = {
        kind: CollectiveFigures(startup, step, share)
        for kind, (share, startup, step) in COLLECTIVES.items()
        if kind != "all_reduce"
    }
    share, startup, step = COLLECTIVES["all_reduce"]
    return Level(
        "nvlink",
        8,
        step,
        NVLINK,
        share,
        startup=startup,
        collectives=others,
        measured=measured_messages(),
    )


def sources(device: Device, h100: Mapping[str, str]) -> dict[str, str]:
    """The source of each figure of the hardware; ``h100``: those of the preset ``h100-sxm``."""
    measured = ("latency", "bandwidth", "efficiency", "startup", "collectives", "measured")
    assumed = ("latency", "bandwidth", "efficiency")
    return {
        **{f"device.peak.{name}": HGX for name in device.peak},
        **{f"device.efficiency.{name}": FACTS for name in device.efficiency},
        **{f"links.nvlink.{name}": FACTS for name in measured},
        **{f"links.network.{name}": AS_H100 for name in assumed},
        "device.memory": FACTS,
        "device.memory_bandwidth": f"{FACTS}; nominal",
        "device.host_bandwidth": PCIE,
        "device.efficiency.matmul": "replaced by the measured products",
        "device.efficiency.conv": f"{ASSUMED}: 3 x 3 convolutions in half precision",
        "links.nvlink.size": "NVIDIA DGX and HGX: 8 devices a node",
        "links.network.size": h100["links.network.size"],
        "links.network.startup": "as inside a node: NCCL launches one kernel",
    }


def preset() -> dict[str, Any]:
    """The contents of the preset's file: the hardware, eager and compiled PyTorch, and Megatron-LM
    with Transformer Engine, which does not hide the sum of the gradients unless asked to.
    """
    base = without_kernels()
    megatron = replace(base.software, name=SOFTWARE, overlap=0.0)
    known = base.from_measurements(VALIDATION / "b200_kernels.csv", base.name)
    inductor = replace(base.software, name="inductor", fuses=True)
    data = as_data(known)
    for software in (inductor, megatron):
        data["software"] |= as_data(replace(known, software=software))["software"]
    for name in ("launch", "overhead", "jitter", "reserve", "overlap"):
        for software_name in data["software"]:
            data["sources"][f"software.{software_name}.{name}"] = AS_H100
    data["sources"]["software.inductor.fuses"] = FUSES
    unhidden = f"{ASSUMED}: Megatron-LM sums gradients after the backward unless asked to overlap"
    data["sources"][f"software.{SOFTWARE}.overlap"] = unhidden
    return data


if __name__ == "__main__":
    write_json(PRESET, preset(), indent=2)
