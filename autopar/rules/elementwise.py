"""Operators that work element by element, broadcast from the right."""

from __future__ import annotations

from autopar.rules.reduce import reduced
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

_NONLINEAR = """
abs acos acosh angle asin asinh atan atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
celu clamp clamp_max clamp_min complex conj_physical copysign cos cosh deg2rad digamma elu eq
erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu gt hardshrink
hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf
isposinf ldexp le leaky_relu lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt mish mvlgamma nan_to_num ne nextafter
polar polygamma pow rad2deg reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign
signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1
special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta sqrt tan tanh threshold
trunc xlogy _conj_physical _prelu_kernel
addcdiv addcmul lerp masked_fill
"""


@register_rule(*(f"aten.{n}" for n in _NONLINEAR.split()))
def nonlinear(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule("aten.minimum", "aten.maximum", "aten.min", "aten.max", "aten.atan2")
def comparison(call: OperatorCall) -> Rule | None:
    """The larger or smaller of two tensors, element by element; for one tensor, its largest or
    smallest element, of each row or of all.
    """
    if len(call.inputs) == 2:
        return call.rule(_nonlinear(call))
    dims, spec = reduced(call)
    return call.rule("~" + spec, whole=[f"d{d}" for d in dims])


@register_rule("aten.neg", "aten.to", "aten.detach")
def linear_unary(call: OperatorCall) -> Rule:
    # A cast to an integer rounds, so that a pending sum must not pass through it.
    linear = (
        call.node.meta["val"].dtype.is_floating_point
        and call.inputs[0].meta["val"].dtype.is_floating_point
    )
    return call.rule(
        "... -> ..." if linear else "~... -> ...",
        kind="view" if call.name == "aten.detach" else "elementwise",
    )


@register_rule("aten.add", "aten.sub", "aten.rsub")
def addition(call: OperatorCall) -> Rule:
    # A number must not be added to a pending sum: every rank would add it.
    return call.rule("... + ... -> ..." if len(call.inputs) == 2 else "~... -> ...")


@register_rule("aten.mul")
def multiplication(call: OperatorCall) -> Rule:
    if len(call.inputs) == 1:
        return call.rule("... -> ...")
    if call.inputs[0] is call.inputs[1]:
        return call.rule("~..., ~... -> ...")
    return call.rule("..., ... -> ...")


@register_rule("aten.div")
def division(call: OperatorCall) -> Rule:
    if call.arguments.get("rounding_mode") is not None:
        return call.rule(_nonlinear(call))
    if call.node.args[0] is not call.inputs[0]:  # number / tensor
        return call.rule("~... -> ...")
    if len(call.inputs) == 1:
        return call.rule("... -> ...")
    return call.rule("..., ~... -> ...")


@register_rule("aten.where")
def selection(call: OperatorCall) -> Rule:
    if len(call.inputs) == 3:
        return call.rule("~..., ... + ... -> ...")
    return call.rule("~..., ~... -> ..." if len(call.inputs) == 2 else "~... -> ...")


@register_rule("aten.dropout")
def dropout(call: OperatorCall) -> Rule:
    # Each chunk draws other numbers, so that every split factor needs the kernel.
    factors = call.rule("... -> ...").sizes
    return call.rule("... -> ...", kernels=dict.fromkeys(factors, "dropout"))


def _nonlinear(call: OperatorCall) -> str:
    """The rule's text for an operator that is linear in no operand."""
    return ", ".join(["~..."] * len(call.inputs)) + " -> ..."
