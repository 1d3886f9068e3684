"""Matrix products."""

from __future__ import annotations

import math

from autopar.ir.layout import R, S
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Option, Rule


@register_rule("aten.linear")
def linear(call: OperatorCall) -> Rule:
    x, w = call.shapes[:2]
    if len(w) == 1:
        return call.rule("... k, k + 1 -> ...", flops=2.0 * math.prod(x), kind="matmul")
    spec = "... k, n k + n -> ... n"
    rows = [dim for dim in range(len(x) - 1) if x[dim] > 1]
    blocks = (
        [o for dim in rows for o in _summa(len(x), dim, len(call.inputs))] if min(w) > 1 else []
    )
    own = dict(extra=tuple(blocks), composed=frozenset({"summa"}), exclusive=frozenset("k"))
    return call.rule(spec, flops=2.0 * math.prod(x) * w[0], kind="matmul", **own)


def _summa(dims: int, row: int, operands: int) -> tuple[Option, Option]:
    """SUMMA (van de Geijn and Watts, 1997): one axis cuts dim ``row`` of the input and the columns
    of the weight; the other axis cuts the last dim of the input and the rows of the weight.
    """
    factor = f".{dims - 2 - row}"
    down = Option((S(row), S(1), R)[:operands], S(row), factor, "summa", beside="n")
    along = Option((S(dims - 1), S(0), S(0))[:operands], S(dims - 1), "n", "summa", beside=factor)
    return down, along


@register_rule("aten.matmul", "aten.bmm", "aten.mv", "aten.dot")
def matmul(call: OperatorCall) -> Rule:
    a, b = (len(s) for s in call.shapes)
    left = "k" if a == 1 else "... i k"
    right = "k" if b == 1 else "... k j"
    out = " ".join(["..."] * (a > 2 or b > 2) + ["i"] * (a > 1) + ["j"] * (b > 1))
    if "..." not in out:
        left, right = left.replace("... ", ""), right.replace("... ", "")
    return call.rule(
        f"{left}, {right} -> {out}",
        flops=2.0 * math.prod(call.shape) * call.shapes[0][-1],
        kind="matmul",
    )


@register_rule("aten.einsum")
def einsum(call: OperatorCall) -> Rule:
    """The equation is the rule. An ellipsis stands for dims that are broadcast from the right. A
    letter that stands twice in an operand takes the diagonal, and stays whole.
    """
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    texts = left.split(",")
    broadcast = [
        len(s) - len(t.replace("...", "")) for t, s in zip(texts, call.shapes, strict=True)
    ]
    more = max(broadcast)

    def names(text: str, dims: int) -> list[str]:
        before, _, after = text.partition("...")
        return [*before, *(f"_{k}" for k in range(more - dims, more) if "..." in text), *after]

    operands = [names(t, n) for t, n in zip(texts, broadcast, strict=True)]
    letters = [x for x in left if x.isalpha()]
    result = (
        names(right, more)
        if arrow
        else [*names("...", more), *sorted(x for x in letters if letters.count(x) == 1)]
    )
    twice = [x for dims in operands for x in dims if dims.count(x) > 1]
    sizes: dict[str, int] = {}
    for dims, shape in zip(operands, call.shapes, strict=True):
        sizes.update((x, max(size, sizes.get(x, 1))) for x, size in zip(dims, shape, strict=True))
    spec = f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}"
    return call.rule(
        spec, whole=twice, sizes=sizes, flops=2.0 * math.prod(sizes.values()), kind="matmul"
    )


@register_rule("aten.bilinear")
def bilinear(call: OperatorCall) -> Rule:
    return call.rule(
        "... i, ... j, o i j + o -> ... o",
        flops=2.0 * math.prod(call.shape) * math.prod(call.shapes[2][1:]),
        kind="matmul",
    )


@register_rule("aten.cdist")
def distances(call: OperatorCall) -> Rule:
    return call.rule(
        "~... i k, ~... j k -> ... i j",
        whole="k",
        flops=2.0 * math.prod(call.shape) * call.shapes[0][-1],
        kind="matmul",
    )


@register_rule("aten.addmv", "aten.addr", "aten.addbmm")
def product_added(call: OperatorCall) -> Rule:
    formulas = {
        "aten.addmv": ("i", "i k, k"),
        "aten.addr": ("i j", "i, j"),
        "aten.addbmm": ("i j", "b i k, b k j"),
    }
    out, factors = formulas[call.name]
    added = " ".join(out.split()[len(call.shape) - len(call.shapes[0]) :])
    return call.rule(
        f"{added} + {factors} -> {out}",
        flops=2.0 * math.prod(call.shapes[1]) * call.shape[-1],
        kind="matmul",
    )


@register_rule("aten.baddbmm")
def baddbmm(call: OperatorCall) -> Rule:
    added = " ".join("bij"[3 - len(call.shapes[0]) :])
    return call.rule(
        f"{added} + b i k, b k j -> b i j",
        flops=2.0 * math.prod(call.shape) * call.shapes[1][-1],
        kind="matmul",
    )


@register_rule("aten.addmm")
def addmm(call: OperatorCall) -> Rule:
    bias = " ".join(
        "ij"[2 - len(call.shapes[0]) :]
    )  # a bias, or a number, is broadcast from the right
    return call.rule(
        f"{bias} + i k, k j -> i j",
        flops=2.0 * math.prod(call.shape) * call.shapes[1][-1],
        kind="matmul",
    )
