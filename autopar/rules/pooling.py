"""Pooling, resampling and windows: samples and channels are independent, and spatial dims stay
whole.
"""

from __future__ import annotations

import math
import re
from typing import Any

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

_LINEAR = """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d
avg_pool3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d"""
_MAX = """adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d
max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
max_unpool2d max_unpool3d"""


@register_rule(*(f"aten.{n}" for n in f"{_LINEAR} {_MAX}".split()))
def pooling(call: OperatorCall) -> Rule:
    """Averages and interpolations are linear; maxima are not."""
    found = re.search(r"(\d)d", call.name)
    assert found is not None
    space = int(found[1])
    apart = " ".join(f"b{d}" for d in range(len(call.shape) - space))
    before, after = ([f"{x}{d}" for d in range(space)] for x in "xy")
    operand = f"{apart} {' '.join(before)}"
    # Only an unpooling reads the second operand, the places of the maxima.
    spec = f"~{operand}, ~{operand}" if "max" in call.name else operand
    return call.rule(f"{spec} -> {apart} {' '.join(after)}", whole=[*before, *after])


@register_rule("aten.unfold")
def unfold(call: OperatorCall) -> Rule:
    (dim,) = call.dims("dimension")
    names = [f"d{d}" for d in range(len(call.shapes[0]))]
    after = [*names[:dim], "w", *names[dim + 1 :], "k"]
    return call.rule(f"{' '.join(names)} -> {' '.join(after)}", whole=[f"d{dim}", "w", "k"])


@register_rule("aten.im2col", "aten.col2im")
def windows_of_image(call: OperatorCall) -> Rule:
    """Columns have the channels before the places of a window."""
    image, columns = "c h w", "(c k) l"
    if len(call.shape) > 2 and len(call.shapes[0]) == len(call.shape) + (
        1 if call.name == "aten.im2col" else -1
    ):
        image, columns = f"n {image}", f"n {columns}"
    spec = f"{image} -> {columns}" if call.name == "aten.im2col" else f"{columns} -> {image}"
    return call.rule(spec, whole="hwlk", sizes={"k": math.prod(call["kernel_size"])})


@register_rule("aten.pixel_shuffle")
def pixel_shuffle(call: OperatorCall) -> Rule:
    r = call["upscale_factor"]
    return call.rule(
        "... (c r s) h w -> ... c (h r) (w s)", sizes={"r": r, "s": r}, whole="rs", kind="view"
    )


@register_rule("aten.pixel_unshuffle")
def pixel_unshuffle(call: OperatorCall) -> Rule:
    r = call["downscale_factor"]
    return call.rule(
        "... c (h r) (w s) -> ... (c r s) h w", sizes={"r": r, "s": r}, whole="rs", kind="view"
    )


@register_rule("aten.channel_shuffle")
def channel_shuffle(call: OperatorCall) -> Rule:
    space = " ".join(f"s{d}" for d in range(len(call.shape) - 2))
    return call.rule(f"n a {space} -> n b {space}", whole="ab")


@register_rule("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sample(call: OperatorCall) -> Rule:
    """Each element of the grid names the place of the image to read."""
    before, after = (" ".join(f"{x}{d}" for d in range(len(call.shape) - 2)) for x in "xy")
    return call.rule(f"n c {before}, ~n {after} t -> n c {after}", whole=[*before.split(), "t"])


@register_rule("aten.affine_grid_generator")
def affine_grid(call: OperatorCall) -> Rule:
    after = [f"y{d}" for d in range(len(call.shape) - 2)]

    def fewer_samples(arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
        samples, *rest = arguments["size"]
        return {"size": [samples // splits.get("n", 1), *rest]}

    return call.rule(
        f"n i j -> n {' '.join(after)} t", whole=["i", "j", "t", *after], localise=fewer_samples
    )
