"""Matrix products."""

from __future__ import annotations

import math

from autopar.layout import R, S
from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Option, Rule


@register_rule("aten.linear")
def linear(call: Call) -> Rule:
    x, w = call.shapes[:2]
    if len(w) == 1:
        return call.rule("... k, k + 1 -> ...", flops=2.0 * math.prod(x), kind="matmul")
    spec = "... k, n k + n -> ... n"
    rows = [dim for dim in range(len(x) - 1) if x[dim] > 1]
    blocks = [o for dim in rows for o in _blocks(len(x), dim, len(call.inputs))] if min(w) > 1 else []
    own = dict(extra=tuple(blocks), composed=frozenset({"summa"}), alone=frozenset("k"))
    return call.rule(spec, flops=2.0 * math.prod(x) * w[0], kind="matmul", **own)


def _blocks(dims: int, row: int, operands: int) -> tuple[Option, Option]:
    """SUMMA: one axis cuts the input's dim ``row`` and the weight's columns, the other the weight's rows and the input's last dim."""
    factor = f".{dims - 2 - row}"
    down = Option((S(row), S(1), R)[:operands], S(row), factor, "summa", beside="n")
    along = Option((S(dims - 1), S(0), S(0))[:operands], S(dims - 1), "n", "summa", beside=factor)
    return down, along


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
