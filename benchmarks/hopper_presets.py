"""The rates of kernels in the presets ``h100-sxm`` and ``h200-sxm``, from the profile of one H100.

    python benchmarks/h100_preset.py    # writes them into both presets

The profile is ``validation/h100_profile.json``. Its curves are parts of the rates that this GPU
reached; those of a preset are parts of the datasheet's. A preset describes products by tiles: its
efficiency of products is that of the largest ones that were measured, without what their tiles
lose. The other figures of the presets stay as they are.
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

PROFILE = Path(__file__).parent / "validation" / "h100_profile.json"
PRESETS = Path(__file__).parent.parent / "cost_model" / "clusters"
AS_H100 = "as in the h100-sxm preset; assumption, to be replaced by a profile of the machine"
SOURCE = f"benchmarks/h100_preset.py: {PROFILE.name}, one H100 80GB HBM3 with torch 2.11"
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
    profile, cluster = Cluster.load(PROFILE).device, Cluster.load(name)
    # parts of the H100's rates; those of another GPU are taken to be alike
    curves = efficiency(profile, Cluster.load("h100-sxm").device)
    unaligned = float(f"{profile.unaligned:.4g}")
    device = as_data(
        replace(cluster, device=replace(cluster.device, efficiency=curves, unaligned=unaligned))
    )["device"]
    data["device"] |= {"efficiency": device["efficiency"], "unaligned": unaligned}
    source = SOURCE if name == "h100-sxm" else AS_H100
    sources = {k: v for k, v in data["sources"].items() if not k.startswith("device.efficiency.")}
    sources |= {f"device.efficiency.{each}": source for each in curves}
    data["sources"] = dict(sorted({**sources, "device.unaligned": source}.items()))
    return data


if __name__ == "__main__":
    for each in ("h100-sxm", "h200-sxm"):
        write_json(PRESETS / f"{each}.json", preset(each), indent=2)
