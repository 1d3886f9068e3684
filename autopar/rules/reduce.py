"""Reductions over dims."""

from __future__ import annotations

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


def reduced(call: OperatorCall, name: str = "dim") -> tuple[list[int], str]:
    """The dims that a call reduces, and the text of its rule as if it were linear."""
    n = len(call.shapes[0])
    dims = call.dims(name)
    keep = len(call.shape) == n
    out = " ".join("1" if d in dims else f"d{d}" for d in range(n) if keep or d not in dims)
    return dims, f"{' '.join(f'd{d}' for d in range(n))} -> {out}"


@register_rule("aten.sum")
def summation(call: OperatorCall) -> Rule:
    return call.rule(reduced(call)[1])


@register_rule("aten.mean")
def mean(call: OperatorCall) -> Rule:
    dims, spec = reduced(call)
    return call.rule(spec, kernels={f"d{d}": "mean" for d in dims})


@register_rule(
    "aten.amax",
    "aten.amin",
    "aten.var",
    "aten.std",
    "aten.logsumexp",
    "aten.any",
    "aten.all",
    "aten.prod",
    "aten.argmax",
    "aten.argmin",
)
def whole_reduction(call: OperatorCall) -> Rule | None:
    dims, spec = reduced(call)
    return call.rule("~" + spec, whole=[f"d{d}" for d in dims])


@register_rule("aten.linalg_vector_norm", "aten.norm")
def norm(call: OperatorCall) -> Rule | None:
    return whole_reduction(call)


@register_rule("aten.softmax", "aten.log_softmax", "aten._safe_softmax")
def softmax(call: OperatorCall) -> Rule:
    names = " ".join(f"d{d}" for d in range(len(call.shape)))
    return call.rule(f"~{names} -> {names}", whole=[f"d{d}" for d in call.dims("dim")])


@register_rule("aten.nansum", "aten.count_nonzero")
def nonlinear_summation(call: OperatorCall) -> Rule:
    """Ignored elements add nothing, so that the results of parts add up."""
    dims, spec = reduced(call)
    return call.rule("~" + spec, sums=frozenset(f"d{d}" for d in dims))


@register_rule("aten.histc")
def histogram(call: OperatorCall) -> Rule:
    """Counts of parts add up if the call gives the bins; otherwise the bins depend on all data."""
    n = len(call.shapes[0])
    dims = [f"d{d}" for d in range(n)]
    given = call["min"] != call["max"]
    return call.rule(
        f"~{' '.join(dims)} -> b", whole=["b", *([] if given else dims)], sums=frozenset(dims)
    )


@register_rule("aten.cosine_similarity")
def cosine_similarity(call: OperatorCall) -> Rule:
    """The dim of the vectors counts the dims of the broadcast operands."""
    n = max(map(len, call.shapes))
    dim = call["dim"] % n
    operands = ["~" + " ".join(f"d{d}" for d in range(n - len(s), n)) for s in call.shapes]
    return call.rule(
        f"{', '.join(operands)} -> {' '.join(f'd{d}' for d in range(n) if d != dim)}",
        whole=[f"d{dim}"],
    )
