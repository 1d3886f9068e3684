"""Operators with several results. All results lie in one layout:
:func:`autopar.rules.registry.rule_of` keeps the options that hold for all of them.
"""

from __future__ import annotations

from autopar.rules.reduce import reduced
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.topk", "aten.sort", "aten.cummax", "aten.cummin", "aten.msort", "aten.argsort")
def ordering(call: OperatorCall) -> Rule:
    """Values and places along a dim. The dim is whole, and its size may change."""
    dims = [0] if call.name == "aten.msort" else call.dims("dim")
    n = len(call.shape)
    before, after = (" ".join(f"{p}{d}" if d in dims else f"d{d}" for d in range(n)) for p in "io")
    return call.rule(f"~{before} -> {after}", whole=[f"{p}{d}" for d in dims for p in "io"])


@register_rule(
    "aten.kthvalue",
    "aten.mode",
    "aten.median",
    "aten.nanmedian",
    "aten.aminmax",
    "aten.var_mean",
    "aten.std_mean",
)
def reductions(call: OperatorCall) -> Rule:
    """Reductions that return two tensors; the median of all elements is one tensor."""
    dims, spec = reduced(call)
    return call.rule("~" + spec, whole=[f"d{d}" for d in dims])


@register_rule("aten.frexp")
def frexp(call: OperatorCall) -> Rule:
    return call.rule("~... -> ...")
