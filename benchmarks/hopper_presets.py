"""The rates of kernels in the presets ``h100-sxm`` and ``h200-sxm``, each from the profile of one
such GPU.

    python benchmarks/hopper_presets.py    # writes them into both presets

The profiles are ``validation/h100_profile.json`` and ``validation/h200_profile.json``. Their curves
are parts of the rates that the GPU reached; those of a preset are parts of the datasheet's. A
preset describes products by tiles: its efficiency of products is that of the largest ones that were
measured, without what their tiles lose. The other figures of the presets stay as they are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cost_model import Cluster
from autopar.cost_model.cluster_data import as_data
from autopar.cost_model.compute import tile_utilisation
from autopar.cost_model.device import Curve, Device
from autopar.formatting.files import write_json

PROFILES = {
    f"{gpu}-sxm": Path(__file__).parent / "validation" / f"{gpu}_profile.json"
    for gpu in ("h100", "h200")
}
PRESETS = Path(__file__).parent.parent / "cost_model" / "clusters"
SIDE = 8192  # of the largest products of the profile
# A linear layer of that size: one product in the forward, two in the backward.
LINEAR = ("addmm", "mm", "mm")
PRODUCTS = ("addmm", "mm", "bmm", "matmul")
ATTENTION = ("attention", "_scaled_dot_product_flash", "_scaled_dot_product_efficient")
CONVOLUTION = ("conv",)
HALF = ("bfloat16", "float16")
POINTWISE = "add"  # kernels of no operator in the profile move bytes as this one does


def efficiency(profile: Device, device: Device) -> dict[str, Curve]:
    """The curves of ``profile`` as parts of the rates of the datasheet."""
    found: dict[str, Curve] = {"matmul": ((1e9, _largest_products(profile, device)),)}
    for name, curve in profile.efficiency.items():
        operator, _, dtype = name.partition(".")
        if operator not in PRODUCTS:
            share = profile.memory_bandwidth / device.memory_bandwidth
            if operator.startswith((*ATTENTION, *CONVOLUTION)):
                peak = dtype or "float32"
                share = profile.peak[peak] / device.peak[peak]
            found[name] = tuple((work, float(f"{part * share:.4g}")) for work, part in curve)
    for dtype in ("float32", *HALF):
        found[f"elementwise.{dtype}"] = found[f"{POINTWISE}.{dtype}"]
    found["elementwise"] = found["elementwise.float32"]
    return found


def _largest_products(profile: Device, device: Device) -> float:
    """The part of the datasheet's rate that the largest products in half precision reach."""
    seconds = 0.0
    for dtype in HALF:
        for operator in LINEAR:
            _, part = profile.efficiency[f"{operator}.{dtype}"][-1]
            seconds += 1 / (part * profile.peak[dtype])
    count, side = np.array(1.0), np.array(float(SIDE))
    lost = float(tile_utilisation(device, count, side, side, side))
    rate = len(LINEAR) * len(HALF) / seconds / lost
    return float(f"{rate / device.peak[HALF[0]]:.4g}")


def preset(name: str) -> dict[str, Any]:
    """The contents of the file of a preset."""
    data = json.loads((PRESETS / f"{name}.json").read_text())
    file, cluster = PROFILES[name], Cluster.load(name)
    profile = Cluster.load(file).device
    curves = efficiency(profile, cluster.device)
    unaligned = float(f"{profile.unaligned:.4g}")
    device = as_data(
        replace(cluster, device=replace(cluster.device, efficiency=curves, unaligned=unaligned))
    )["device"]
    data["device"] |= {"efficiency": device["efficiency"], "unaligned": unaligned}
    source = f"benchmarks/hopper_presets.py: {file.name}, one {profile.name} with torch 2.11"
    sources = {k: v for k, v in data["sources"].items() if not k.startswith("device.efficiency.")}
    sources |= {f"device.efficiency.{each}": source for each in curves}
    data["sources"] = dict(sorted({**sources, "device.unaligned": source}.items()))
    return data


if __name__ == "__main__":
    for each in PROFILES:
        write_json(PRESETS / f"{each}.json", preset(each), indent=2)
