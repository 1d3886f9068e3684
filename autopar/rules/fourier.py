"""Complex numbers as pairs of real numbers, and Fourier transforms, whose dims are whole."""

from __future__ import annotations

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.view_as_real")
def view_as_real(call: OperatorCall) -> Rule:
    return call.rule("~... -> ... p", whole="p")


@register_rule("aten.view_as_complex")
def view_as_complex(call: OperatorCall) -> Rule:
    return call.rule("~... p -> ...", whole="p")


@register_rule("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def fourier_transform(call: OperatorCall) -> Rule:
    dims = call.dims("dim")
    before, after = (
        " ".join(f"{x}{d}" if d in dims else f"d{d}" for d in range(len(call.shape))) for x in "xy"
    )
    return call.rule(f"~{before} -> {after}", whole=[f"{x}{d}" for d in dims for x in "xy"])
