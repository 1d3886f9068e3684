"""Operators that work element by element, broadcast from the right."""

from __future__ import annotations

from autopar.rules.reduce import reduced
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

# The operand the backward reads: its input (0), its output (-1), or nothing. All are nonlinear.
_INPUT = """abs acos acosh asin asinh atan atanh celu clamp clamp_max clamp_min cos cosh elu erf erfc gelu hardsigmoid hardswish hardtanh
leaky_relu log log10 log1p log2 log_sigmoid logaddexp logit mish pow relu6 selu silu sin sinh softplus xlogy
copysign fmax fmin hardshrink hypot logaddexp2 sinc softshrink threshold"""
_OUTPUT = "exp exp2 expm1 reciprocal relu rsqrt sigmoid sqrt tan tanh"
_NOTHING = """bitwise_and bitwise_not bitwise_or bitwise_xor ceil eq floor floor_divide fmod frac ge gt isfinite isinf isnan le logical_and
logical_not logical_or logical_xor lt nan_to_num ne remainder round sign trunc
conj_physical _conj_physical deg2rad heaviside isneginf isposinf nextafter rad2deg sgn signbit"""
_SPECIAL = """digamma erfinv i0 igamma igammac ldexp lgamma mvlgamma polygamma special_entr special_erfcx special_i0e special_i1 special_i1e
special_log_ndtr special_ndtri special_xlog1py special_zeta"""


@register_rule(*(f"aten.{n}" for n in _INPUT.split()))
def unary_reading_input(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule(*(f"aten.{n}" for n in _OUTPUT.split()))
def unary_reading_output(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule(
    *(f"aten.{n}" for n in _SPECIAL.split()),
    "aten._prelu_kernel",
    "aten.complex",
    "aten.polar",
    "aten.angle",
)
def special_function(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule(*(f"aten.{n}" for n in _NOTHING.split()))
def reading_nothing(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule("aten.minimum", "aten.maximum", "aten.min", "aten.max", "aten.atan2")
def comparison(call: OperatorCall) -> Rule | None:
    """Of two tensors; of one, the largest or smallest along a dim, with its place, or of all."""
    if len(call.inputs) == 2:
        return call.rule(_nonlinear(call))
    dims, spec = reduced(call)
    return call.rule("~" + spec, whole=[f"d{d}" for d in dims])


@register_rule("aten.neg", "aten.to", "aten.detach")
def linear_unary(call: OperatorCall) -> Rule:
    # A conversion to an integer rounds, so a pending sum may not pass it.
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
    # Adding a number to a pending sum would add it once a rank.
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


@register_rule("aten.masked_fill")
def masked_fill(call: OperatorCall) -> Rule:
    return call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ...")


@register_rule("aten.addcmul", "aten.addcdiv", "aten.lerp")
def ternary(call: OperatorCall) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule("aten.dropout")
def dropout(call: OperatorCall) -> Rule:
    # Every split draws different numbers, so every factor that is split tells the kernel.
    factors = call.rule("... -> ...").sizes
    return call.rule("... -> ...", kernels=dict.fromkeys(factors, "dropout"))


def _nonlinear(call: OperatorCall) -> str:
    return ", ".join(["~..."] * len(call.inputs)) + " -> ..."
