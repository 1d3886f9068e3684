"""Rows of elementwise operators, whose rules are in ``autopar/rules/elementwise.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, fixed, overload, row

operands = Operands()
b, f, i, n = operands.b, operands.f, operands.i, operands.n
UNARY = """abs acos acosh asin asinh atan atanh ceil celu cos cosh elu erf erfc exp exp2 expm1 floor
frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p
log2 log_sigmoid logical_not logit mish nan_to_num neg reciprocal relu relu6 round rsqrt
selu sigmoid sign silu sin sinh softplus sqrt tan tanh trunc deg2rad hardshrink isneginf
isposinf rad2deg sgn signbit sinc softshrink digamma erfinv i0 lgamma special_entr
special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri angle"""
BINARY = """ldexp.Tensor special_xlog1py.default copysign.Tensor fmax.default fmin.default
hypot.default logaddexp2.default atan2.default eq.Tensor fmod.Tensor ge.Tensor gt.Tensor
le.Tensor logaddexp.default logical_and.default logical_or.default logical_xor.default
lt.Tensor max.other maximum.default min.other minimum.default ne.Tensor remainder.Tensor
xlogy.Tensor"""
SCALAR = """clamp_max.default clamp_min.default eq.Scalar fmod.Scalar ge.Scalar gt.Scalar le.Scalar
lt.Scalar ne.Scalar pow.Tensor_Scalar remainder.Scalar"""
x_twice = f(4, 6)

ROWS: list[Row] = [
    *(row(overload(name), f(4, 6) + (name == "acosh")) for name in UNARY.split()),
    *(row(overload(name), f(4, 6), f(4, 1)) for name in BINARY.split()),
    *(row(overload(name), n(4, 6), 2.0) for name in SCALAR.split()),
    row(aten.pow.Tensor_Tensor, f(4, 6), f(6)),
    row(aten.pow.Scalar, 2.0, f(4, 6)),
    row(aten.threshold.default, n(4, 6), 0.1, 0.5),
    row(aten.floor_divide.default, i(99, 4, 6), i(8, 4, 1) + 1),
    row(aten.clamp.default, n(4, 6), -0.5, 0.5),
    row(aten.clamp.Tensor, n(4, 6), f(6) - 1.0, f(4, 1)),
    *(row(getattr(aten, f"bitwise_{name}").Tensor, b(4, 6), b(6)) for name in ("and", "or", "xor")),
    row(aten.bitwise_and.Tensor, i(8, 4, 6), i(8, 4, 1)),
    row(aten.bitwise_not.default, b(4, 6)),
    row(aten.addcmul.default, f(4, 6), f(6), f(4, 1), value=2.0),
    row(aten.addcdiv.default, f(4, 6), f(6), f(4, 1), value=2.0),
    row(aten.lerp.Scalar, f(4, 6), f(6), 0.3),
    row(aten.lerp.Tensor, f(4, 6), f(6), f(4, 1)),
    row(aten.neg.default, i(8, 4, 6)),
    row(aten.to.dtype, n(4, 6), torch.float32),
    row(aten.to.dtype, n(4, 6) * 9, torch.int64),
    row(aten.to.dtype, i(8, 4, 6), torch.float64),
    row(aten.to.dtype, b(4, 6), torch.float64),
    row(aten.detach.default, n(4, 6)),
    row(aten.add.Tensor, n(4, 6), n(4, 6)),
    row(aten.add.Tensor, n(4, 6), n(6), alpha=3),
    row(aten.add.Tensor, n(4, 1, 6), n(2, 1)),
    row(aten.add.Tensor, n(4, 6), n()),
    row(aten.add.Tensor, n(4, 6), 2.0),
    row(aten.add.Scalar, n(4, 6), 2.0),
    row(aten.sub.Tensor, n(4, 6), n(4, 1)),
    row(aten.sub.Tensor, x_twice, x_twice),
    row(aten.rsub.Scalar, n(4, 6), 1.0),
    row(aten.rsub.Tensor, n(4, 6), n(6)),
    row(aten.mul.Tensor, n(4, 6), n(6)),
    row(aten.mul.Tensor, n(1), n(4, 6)),
    row(aten.mul.Tensor, x_twice, x_twice),
    row(aten.mul.Tensor, n(4, 6), 2.0),
    row(aten.mul.Scalar, n(4, 6), 2.0),
    row(aten.div.Tensor, n(4, 6), f(4, 1)),
    row(aten.div.Tensor, x_twice, x_twice),
    row(aten.div.Tensor, n(4, 6), 2.0),
    row(aten.div.Scalar, n(4, 6), 2.0),
    row(aten.div.Tensor_mode, n(4, 6) * 9, f(6), rounding_mode="floor"),
    row(aten.div.Tensor_mode, n(4, 6) * 9, 2.0, rounding_mode="trunc"),
    row(aten.div.Tensor_mode, n(4, 6) * 9, f(6), rounding_mode=None),
    row(aten.where.self, b(4, 1), n(4, 6), n(6)),
    row(aten.where.ScalarOther, b(4, 6), n(6), 0.5),
    row(aten.where.ScalarSelf, b(4, 6), 0.5, n(6)),
    row(aten.where.Scalar, b(4, 6), 0.5, 2.0),
    row(aten.masked_fill.Scalar, n(4, 6), b(4, 1), 2.0),
    row(aten.masked_fill.Tensor, n(4, 6), b(6), n()),
]
MORE: list[Row] = [
    *(
        fixed(row(overload(name), f(4, 6) + 1.5, f(4, 1)), 0, 1)
        for name in ("heaviside", "nextafter", "special_zeta")
    ),
    *(fixed(row(overload(name), f(4, 6), f(4, 1)), 0) for name in ("igamma", "igammac")),
    row(aten.polygamma.default, 1, f(4, 6)),
    row(aten.mvlgamma.default, f(4, 6) + 2, 2),
    row(aten._prelu_kernel.default, n(4, 6, 2), n(1, 6, 1)),
    row(aten.complex.default, n(4, 6), n(4, 1)),
    row(aten.polar.default, n(4, 6), n(4, 1)),
    row(aten.conj_physical.default, torch.complex(n(4, 6), n(4, 6))),
    row(aten._conj_physical.default, torch.complex(n(4, 6), n(4, 6))),
]
