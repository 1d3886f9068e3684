"""Matrix products and convolutions."""

from __future__ import annotations

import math
from typing import Any

from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.linear")
def linear(call: Call) -> Rule:
    x, w = call.shapes[:2]
    if len(w) == 1:
        return call.rule("... k, k + 1 -> ...", flops=2.0 * math.prod(x), kind="matmul")
    return call.rule("... k, n k + n -> ... n", flops=2.0 * math.prod(x) * w[0], kind="matmul")


@register_rule("aten.matmul", "aten.bmm", "aten.mv", "aten.dot")
def matmul(call: Call) -> Rule:
    a, b = (len(s) for s in call.shapes)
    left = "k" if a == 1 else "... i k"
    right = "k" if b == 1 else "... k j"
    out = " ".join(["..."] * (a > 2 or b > 2) + ["i"] * (a > 1) + ["j"] * (b > 1))
    if "..." not in out:
        left, right = left.replace("... ", ""), right.replace("... ", "")
    return call.rule(f"{left}, {right} -> {out}", flops=2.0 * math.prod(call.shape) * call.shapes[0][-1], kind="matmul")


@register_rule("aten.baddbmm")
def baddbmm(call: Call) -> Rule | None:
    if len(call.shapes[0]) != 3:
        return None
    return call.rule("... i j + ... i k, ... k j -> ... i j", flops=2.0 * math.prod(call.shape) * call.shapes[1][-1], kind="matmul")


@register_rule("aten.addmm")
def addmm(call: Call) -> Rule:
    bias = "i j" if len(call.shapes[0]) == 2 else "j"
    return call.rule(f"{bias} + i k, k j -> i j", flops=2.0 * math.prod(call.shape) * call.shapes[1][-1], kind="matmul")


@register_rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: Call) -> Rule | None:
    if len(call.shapes[0]) != len(call.shapes[1]):  # no batch dim
        return None
    window = [f"w{i}" for i in range(len(call.shape) - 2)]
    x_space, y_space = (" ".join(f"{p}{i}" for i in range(len(window))) for p in "xy")
    groups, weight = call["groups"], call.shapes[1]

    def fewer_groups(arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
        return {"groups": groups // splits.get("g", 1)}

    return call.rule(
        f"n (g c) {x_space}, (g o) c {' '.join(window)} + (g o) -> n (g o) {y_space}",
        sizes={"g": groups},
        whole=[*window, *x_space.split(), *y_space.split(), *(["c", "o"] if groups > 1 else [])],  # a group is not split further
        flops=2.0 * math.prod(call.shape) * math.prod(weight[1:]),
        kind="conv",
        localise=fewer_groups if groups > 1 else None,
    )
