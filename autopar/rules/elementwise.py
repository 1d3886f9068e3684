"""Operators that work element by element, broadcast from the right."""

from __future__ import annotations

from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Rule

# The operand the backward reads: its input (0), its output (-1), or nothing. All are nonlinear.
_INPUT = (
    "gelu silu pow log abs sin cos erf square clamp clamp_min clamp_max hardtanh hardswish softplus mish log1p log2 leaky_relu elu selu"
)
_OUTPUT = "relu tanh sigmoid exp rsqrt sqrt reciprocal expm1"
_NOTHING = """sign floor ceil round trunc logical_not bitwise_not isnan isinf isfinite eq ne lt le gt ge logical_and logical_or
logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ remainder fmod floor_divide triu_indices"""


@register_rule(*(f"aten.{n}" for n in _INPUT.split()))
def unary_reading_input(call: Call) -> Rule:
    return call.rule(_nonlinear(call), saves=tuple(range(len(call.inputs))))


@register_rule(*(f"aten.{n}" for n in _OUTPUT.split()))
def unary_reading_output(call: Call) -> Rule:
    return call.rule(_nonlinear(call), saves=(-1,))


@register_rule(*(f"aten.{n}" for n in _NOTHING.split()))
def reading_nothing(call: Call) -> Rule:
    return call.rule(_nonlinear(call))


@register_rule("aten.minimum", "aten.maximum", "aten.min", "aten.max", "aten.atan2")
def comparison(call: Call) -> Rule | None:
    return call.rule(_nonlinear(call), saves=(0, 1)) if len(call.inputs) == 2 else None


@register_rule("aten.neg", "aten.to", "aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten._to_copy", "aten.positive")
def linear_unary(call: Call) -> Rule:
    # A conversion to an integer rounds, so a pending sum may not pass it.
    linear = call.node.meta["val"].dtype.is_floating_point and call.inputs[0].meta["val"].dtype.is_floating_point
    return call.rule(
        "... -> ..." if linear else "~... -> ...", kind="view" if call.name in ("aten.alias", "aten.detach") else "elementwise"
    )


@register_rule("aten.add", "aten.sub", "aten.rsub")
def addition(call: Call) -> Rule:
    # Adding a number to a pending sum would add it once a rank.
    return call.rule("... + ... -> ..." if len(call.inputs) == 2 else "~... -> ...")


@register_rule("aten.mul")
def multiplication(call: Call) -> Rule:
    if len(call.inputs) == 1:
        return call.rule("... -> ...")
    if call.inputs[0] is call.inputs[1]:
        return call.rule("~..., ~... -> ...", saves=(0,))
    return call.rule("..., ... -> ...", saves=(0, 1))


@register_rule("aten.div", "aten.true_divide")
def division(call: Call) -> Rule:
    if call.node.args[0] is not call.inputs[0]:  # number / tensor
        return call.rule("~... -> ...", saves=(0, -1))
    if len(call.inputs) == 1:
        return call.rule("... -> ..." if "rounding_mode" not in call.node.kwargs else "~... -> ...")
    return call.rule("..., ~... -> ...", saves=(0, 1))


@register_rule("aten.where")
def selection(call: Call) -> Rule:
    if len(call.inputs) == 3:
        return call.rule("~..., ... + ... -> ...", saves=(0,))
    return call.rule("~..., ~... -> ..." if len(call.inputs) == 2 else "~... -> ...", saves=(0,))


@register_rule("aten.masked_fill")
def masked_fill(call: Call) -> Rule:
    return call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ...", saves=(1,))


@register_rule("aten.addcmul", "aten.addcdiv", "aten.lerp")
def ternary(call: Call) -> Rule:
    return call.rule(_nonlinear(call), saves=tuple(range(len(call.inputs))))


@register_rule("aten.dropout", "aten.feature_dropout")
def dropout(call: Call) -> Rule:
    # Every split draws different numbers, so every factor that is split tells the kernel.
    rule = call.rule("... -> ...", saved_bytes=float(_elements(call.shape)))
    if not call["train"] or call["p"] == 0.0:
        return call.rule("... -> ...", kind="view")
    return call.rule("... -> ...", saved_bytes=rule.saved_bytes, kernels=dict.fromkeys(rule.sizes, "dropout"))


def _nonlinear(call: Call) -> str:
    return ", ".join(["~..."] * len(call.inputs)) + " -> ..."


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
