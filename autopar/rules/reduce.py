"""Reductions over dims, and pooling."""

from __future__ import annotations

from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Rule


def _reduced(call: Call, name: str = "dim") -> tuple[list[int], str]:
    """The dims reduced, and the rule's text without its linearity."""
    n = len(call.shapes[0])
    dims = call.dims(name)
    keep = len(call.shape) == n
    out = " ".join("1" if d in dims else f"d{d}" for d in range(n) if keep or d not in dims)
    return dims, f"{' '.join(f'd{d}' for d in range(n))} -> {out}"


@register_rule("aten.sum")
def total(call: Call) -> Rule:
    return call.rule(_reduced(call)[1])


@register_rule("aten.mean")
def mean(call: Call) -> Rule:
    dims, spec = _reduced(call)
    return call.rule(spec, kernels={f"d{d}": "mean" for d in dims})


@register_rule(
    "aten.amax", "aten.amin", "aten.var", "aten.std", "aten.logsumexp", "aten.any", "aten.all", "aten.prod", "aten.argmax", "aten.argmin"
)
def whole_reduction(call: Call) -> Rule | None:
    dims, spec = _reduced(call)
    return call.rule("~" + spec, whole=[f"d{d}" for d in dims])


@register_rule("aten.linalg_vector_norm", "aten.norm")
def norm(call: Call) -> Rule | None:
    return whole_reduction(call)


@register_rule("aten.softmax", "aten.log_softmax")
def softmax(call: Call) -> Rule:
    names = " ".join(f"d{d}" for d in range(len(call.shape)))
    return call.rule(f"~{names} -> {names}", whole=[f"d{d}" for d in call.dims("dim")])


@register_rule("aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d", "aten.upsample_nearest2d", "aten.upsample_bilinear2d")
def pooling(call: Call) -> Rule | None:
    if len(call.shape) != 4:
        return None
    linear = "~" if "max" in call.name else ""
    return call.rule(f"{linear}n c h w -> n c y x", whole="hwyx")
