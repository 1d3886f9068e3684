"""Scaled dot-product attention."""

from __future__ import annotations

import math

from autopar.ir.layout import R, S
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Option, Rule


@register_rule("aten.scaled_dot_product_attention")
def attention(call: OperatorCall) -> Rule | None:
    q, k, v = call.shapes[:3]
    if len(q) != 4:
        return None
    grouped = call["enable_gqa"] and q[1] != k[1]
    head, kv_head = ("(n g)", "n") if grouped else ("n", "n")
    mask = ""
    if len(call.inputs) == 4:
        dims = ["b", head, "s", "t"][4 - len(call.shapes[3]) :]
        mask = ", ~" + " ".join(dims)
    # Keys stay whole, because the softmax needs all of them. Under a causal mask queries stay
    # whole, too, as the mask counts positions from the first query. Ring attention splits both.
    whole = ["d", "e", "t"] + (["s"] if call["is_causal"] else [])
    rows = 2 - 4 + len(call.shapes[3]) if mask else 0
    masks = [S(rows) if rows >= 0 and call.shapes[3][rows] > 1 else R] if mask else []
    ring = Option((S(2), S(2), S(2), *masks), S(2), "s", "ring", beside="")
    names = ("b", "n", "g") if call["is_causal"] else ("b", "n", "g", "s")
    return call.rule(
        f"~b {head} s d, ~b {kv_head} t d, ~b {kv_head} t e{mask} -> b {head} s e",
        whole=whole,
        sizes={"n": k[1]},
        flops=2.0 * math.prod(q[:3]) * k[2] * (q[3] + v[3]) / (2 if call["is_causal"] else 1),
        kind="attention",
        kernels=dict.fromkeys(names, "attention") if call["dropout_p"] else {},
        extra=(ring,) if min(q[2], k[2]) > 1 else (),
        composed=frozenset({"ring"}),
        exclusive=frozenset({"s", "t"}),
    )
