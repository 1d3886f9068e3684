"""Rules against torch: the operands of each operator are cut as each option says, the operator runs
on the parts, and the joined results are compared with the operator on the whole operands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from emulate import Program, Row, cut, every, local

from autopar.errors import RunError
from autopar.ir.layout import I, P, R, S
from autopar.ir.nodes import set_operand
from autopar.rules import Rule, make_rule
from autopar.rules.registry import _MAKERS
from autopar.rules.views import factorise
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.checker import check_types
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.strategies import Strategy

aten = torch.ops.aten
MESHES = ((2,), (3,), (2, 2))
STRATEGIES = 24  # the options that are tried of each operator on each mesh
# these need kernels: see tests/test_kernels.py and tests/test_random_operators.py
DRAWN = {"aten.dropout"} | {
    name for name, maker in _MAKERS.items() if maker.__module__ == "autopar.rules.random"
}

# --- The operators: every registered one, with examples of its arguments.


def row(target: Any, *args: Any, **kwargs: Any) -> Row:
    return Row(target, args, kwargs)


def fixed(example: Row, *places: int) -> Row:
    return replace(example, fixed=places)


_numbers = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    """Numbers in (0.1, 0.9), where every function is defined and smooth."""
    return torch.rand(shape, generator=_numbers, dtype=torch.float64) * 0.8 + 0.1


def n(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_numbers, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_numbers)


def b(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape, generator=_numbers).bool()


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
LOSSES = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss
kl_div poisson_nll_loss smooth_l1_loss soft_margin_loss"""


OF_MATRICES = """cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex lu_factor
lu_factor_ex matrix_exp qr slogdet svd svdvals"""
WINDOWS = "hann hamming blackman bartlett kaiser"


def matrices(*shape: int) -> torch.Tensor:
    """A batch of positive definite matrices with well separated eigenvalues; the last dim is the
    size of a matrix.
    """
    x = n(*shape, shape[-1]) * 0.1
    return x @ x.mT + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))


def _lstm(inputs: int) -> list[torch.Tensor]:
    return [n(8, inputs), n(8, 2)]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _loss(name: str) -> Row:
    target = _overload(name)
    x = f(4, 6).log() if name == "kl_div" else f(4, 6)
    more: dict[str, Any] = (
        {"log_input": True, "full": False, "eps": 1e-8} if name == "poisson_nll_loss" else {}
    )
    return fixed(row(target, x, f(4, 6), **more, reduction=0), 1)


x_twice = f(4, 6)
# Fourier transforms, windows and writes: operators of these families have several kinds of calls.
SPACES: dict[str, tuple[int, ...]] = {"1": (8,), "2": (4, 6), "3": (2, 4, 4)}
POOLS = [
    *(
        row(getattr(aten, f"adaptive_{kind}_pool{d}d").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
        for kind in ("avg", "max")
    ),
    *(
        row(getattr(aten, f"{kind}_pool{d}d").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
        for kind in ("avg", "max")
    ),
    *(
        row(getattr(aten, f"max_pool{d}d_with_indices").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
    ),
    *(
        row(
            getattr(aten, f"_upsample_nearest_exact{d}d").vec, n(4, 6, *space), None, [2.0] * int(d)
        )
        for d, space in SPACES.items()
    ),
    *(
        row(getattr(aten, f"upsample_nearest{d}d").vec, n(4, 6, *SPACES[d]), None, [2.0] * int(d))
        for d in "13"
    ),
    *(
        row(
            getattr(aten, f"upsample_{kind}").vec,
            n(4, 6, *SPACES[kind[-2]]),
            None,
            False,
            [2.0] * int(kind[-2]),
        )
        for kind in ("linear1d", "bicubic2d", "trilinear3d")
    ),
    row(aten.max_pool2d.default, n(6, 4, 4), [2, 2]),
    row(aten.avg_pool3d.default, n(6, 2, 4, 4), [2, 2, 2]),
    row(
        aten.max_unpool2d.default,
        n(4, 6, 2, 2),
        torch.arange(0, 16, 4).expand(4, 6, 4).reshape(4, 6, 2, 2),
        [4, 4],
    ),
    row(
        aten.max_unpool3d.default,
        n(4, 6, 1, 2, 2),
        torch.arange(0, 16, 4).expand(4, 6, 4).reshape(4, 6, 1, 2, 2),
        [1, 4, 4],
        [1, 2, 2],
        [0, 0, 0],
    ),
]
LATER = [
    *(
        fixed(row(_overload(name), f(4, 6) + 1.5, f(4, 1)), 0, 1)
        for name in ("heaviside", "nextafter", "special_zeta")
    ),
    *(fixed(row(_overload(name), f(4, 6), f(4, 1)), 0) for name in ("igamma", "igammac")),
    row(aten.polygamma.default, 1, f(4, 6)),
    row(aten.mvlgamma.default, f(4, 6) + 2, 2),
    row(aten._prelu_kernel.default, n(4, 6, 2), n(1, 6, 1)),
    row(aten.complex.default, n(4, 6), n(4, 1)),
    row(aten.polar.default, n(4, 6), n(4, 1)),
    row(aten.view_as_real.default, torch.complex(n(4, 6), n(4, 6))),
    row(aten.conj_physical.default, torch.complex(n(4, 6), n(4, 6))),
    row(aten._conj_physical.default, torch.complex(n(4, 6), n(4, 6))),
    row(aten.view_as_complex.default, n(4, 6, 2)),
    row(aten._fft_r2c.default, n(4, 6, 8), [2], 0, True),
    row(aten._fft_c2c.default, torch.complex(n(4, 6, 2), n(4, 6, 2)), [0, 1], 0, True),
    row(aten._fft_c2r.default, torch.complex(n(4, 6), n(4, 6)), [1], 2, 10),
    row(aten.einsum.default, "bij,bjk->bik", [n(4, 2, 6), n(4, 6, 3)]),
    row(aten.einsum.default, "ij,jk", [n(4, 6), n(6, 2)]),
    row(aten.einsum.default, "...qhd,...khd->...hqk", [n(4, 2, 6, 2), n(4, 3, 6, 2)]),
    row(aten.einsum.default, "i...,i... -> ...", [n(4, 6, 2), n(4, 1, 2)]),
    row(aten.einsum.default, "bij,j", [n(2, 4, 6), n(6)]),
    row(aten.einsum.default, "bii->bi", [n(4, 6, 6)]),
    row(aten.einsum.default, "bij->jb", [n(4, 2, 6)]),
    row(aten.einsum.default, "ij->", [n(4, 6)]),
    row(aten.einsum.default, "i,j->ij", [n(4), n(6)]),
    row(aten.einsum.default, "ij,j,k->ik", [n(4, 6), n(6), n(2)]),
    row(aten.bilinear.default, n(4, 2, 3), n(4, 2, 6), n(4, 3, 6), n(4)),
    row(aten.bilinear.default, n(4, 3), n(4, 6), n(2, 3, 6)),
    row(aten.cdist.default, n(2, 4, 3), n(6, 3)),
    row(aten.cdist.default, n(4, 3), n(6, 3), 1.0),
    row(aten.addmv.default, n(4), n(4, 6), n(6), beta=0.5),
    row(aten.addr.default, n(4, 6), n(4), n(6), alpha=2.0),
    row(aten.addbmm.default, n(4, 3), n(2, 4, 6), n(2, 6, 3)),
    row(aten.baddbmm.default, n(2, 3), n(4, 2, 6), n(4, 6, 3)),
    row(aten.conv_transpose1d.default, n(4, 6, 8), n(6, 4, 3), n(4), [2], [1]),
    row(
        aten.conv_transpose2d.input, n(4, 8, 4, 4), n(8, 3, 2, 2), n(12), [2, 2], [0, 0], [0, 0], 4
    ),
    row(aten.conv_transpose3d.input, n(2, 4, 2, 2, 2), n(4, 6, 2, 2, 2)),
    fixed(
        row(
            aten.instance_norm.default, n(4, 6, 8), n(6), n(6), n(6), f(6), False, 0.1, 1e-5, False
        ),
        3,
        4,
    ),
    row(aten.group_norm.default, n(4, 12, 2), 6, n(12), n(12)),
    row(aten.nansum.default, n(4, 6), [1]),
    row(aten.count_nonzero.dim_IntList, b(4, 6), [0]),
    row(aten.count_nonzero.default, i(3, 4, 6)),
    row(aten.histc.default, i(4, 12).double(), 4, 0, 3),
    row(aten.histc.default, n(4, 6), 3),
    row(aten.cosine_similarity.default, n(4, 6, 2), n(6, 1), 1),
    row(aten.cosine_similarity.default, n(4, 6), n(4, 6), -1),
    row(aten._safe_softmax.default, n(4, 6, 2), 1),
    row(aten.unfold.default, n(4, 8, 6), 1, 4, 2),
    row(aten.im2col.default, n(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    row(aten.im2col.default, n(6, 4, 4), [2, 2], [1, 1], [1, 1], [1, 1]),
    row(aten.col2im.default, n(4, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    row(aten.pixel_shuffle.default, n(4, 24, 3, 2), 2),
    row(aten.pixel_unshuffle.default, n(4, 6, 4, 2), 2),
    row(aten.channel_shuffle.default, n(4, 6, 2, 2), 3),
    row(aten.grid_sampler_2d.default, n(4, 6, 3, 3), n(4, 2, 6, 2) * 0.4, 0, 0, True),
    row(aten.grid_sampler_3d.default, n(4, 2, 3, 3, 2), n(4, 2, 2, 3, 3) * 0.4, 0, 0, True),
    row(aten.affine_grid_generator.default, n(6, 2, 3), [6, 4, 3, 2], True),
    row(aten.index_add.default, n(6, 4), 0, i(6, 12), n(12, 4), alpha=2.0),
    row(aten.index_add.default, n(4, 6, 2), 1, i(6, 4), n(4, 4, 2)),
    row(aten.index_copy.default, n(4, 6), 1, torch.tensor([0, 3]), n(4, 2)),
    row(aten.index_fill.int_Scalar, n(4, 6), 1, i(6, 2), 0.5),
    row(aten.index_reduce.default, n(4, 6), 1, i(6, 4), f(4, 4), "amax"),
    row(aten.scatter.src, n(4, 6), 1, torch.tensor([[0, 3]] * 4), n(4, 2)),
    row(aten.scatter.value, n(4, 6), 1, i(6, 4, 2), 0.5),
    row(aten.scatter_add.default, n(4, 6), 1, i(6, 4, 8), n(4, 8)),
    # torch has a gradient of the source only if the index has its shape
    fixed(row(aten.scatter_add.default, n(4, 6), 0, i(4, 2, 6), n(4, 6)), 2),
    fixed(row(aten.scatter_add.default, n(4, 6), 1, i(6, 2, 4), n(3, 4)), 2),
    row(aten.scatter_reduce.two, n(4, 6), 1, i(6, 4, 8), f(4, 8), "amax"),
    row(aten.scatter_reduce.two, n(4, 6), 1, i(6, 4, 8), f(4, 8), "mean", include_self=False),
    row(aten.index_put.default, n(6, 4), [i(6, 12)], n(12, 4), True),
    row(aten.index_put.default, n(6, 4, 2), [None, torch.tensor([0, 3])], n(6, 2, 2)),
    row(aten.index_put.default, n(6, 4, 2), [i(6, 3, 1), i(4, 2)], n(2, 2), True),
    row(aten.index_put.default, n(4, 6, 2), [b(4, 6)], n()),
    row(aten.diagonal.default, n(4, 6, 6), 1, 1, 2),
    row(aten.diag_embed.default, n(4, 6), 0, -2, -1),
    row(aten.diag_embed.default, n(4, 6), 1, 0, 2),
    row(aten.bucketize.Tensor, n(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)),
    row(aten.isin.Tensor_Tensor, i(9, 4, 6), i(9, 2, 2)),
    row(aten.searchsorted.Tensor, n(6).sort()[0], n(4, 6)),
    row(aten.searchsorted.Tensor, n(4, 6).sort()[0], n(4, 2)),
    row(aten.logcumsumexp.default, n(4, 6), 1),
    row(aten.reshape.default, n(4, 0, 6), [0, 24]),
    fixed(row(aten.cosine_embedding_loss.default, n(4, 6), n(4, 6), n(4).sign(), 0.1, 0), 2),
    row(aten.triplet_margin_loss.default, n(4, 6), n(4, 6), n(4, 6), 1.0, 2.0, 1e-6, False, 0),
    row(
        aten.triplet_margin_loss.default,
        n(4, 2, 6),
        n(4, 2, 6),
        n(4, 2, 6),
        1.0,
        2.0,
        1e-6,
        True,
        0,
    ),
    row(aten.multi_margin_loss.default, n(4, 6), i(6, 4), 1, 1.0, None, 0),
    fixed(row(aten.multi_margin_loss.default, n(4, 6), i(6, 4), 1, 1.0, f(6), 0), 2),
    row(aten.multilabel_margin_loss.default, n(4, 6), i(6, 4, 6), 0),
    row(
        aten._ctc_loss.Tensor,
        n(8, 4, 6).log_softmax(-1),
        i(5, 4, 2) + 1,
        torch.full((4,), 8),
        torch.full((4,), 2),
    ),
]
ROWS = [
    *(row(_overload(name), f(4, 6) + (name == "acosh")) for name in UNARY.split()),
    *(row(_overload(name), f(4, 6), f(4, 1)) for name in BINARY.split()),
    *(row(_overload(name), n(4, 6), 2.0) for name in SCALAR.split()),
    *map(_loss, LOSSES.split()),
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
    row(graph_kernels.send, n(4, 6)),
    row(graph_kernels.send, b(4, 6)),
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
    row(aten.embedding.default, n(12, 4), i(12, 4, 6), 3),
    row(aten.gather.default, n(4, 6, 3), 1, i(6, 4, 2, 3)),
    row(aten.gather.default, n(4, 6), -1, i(6, 2, 4)),
    row(aten.take_along_dim.default, n(4, 6), i(6, 4, 2), 1),
    row(aten.take_along_dim.default, n(4, 6), i(6, 1, 2), 1),
    row(aten.index_select.default, n(4, 6, 2), 1, i(6, 8)),
    row(aten.index.Tensor, n(6, 4, 8), [i(6, 4)]),
    row(aten.index.Tensor, n(6, 4, 8), [None, i(4, 2, 6)]),
    row(aten.index.Tensor, n(6, 4, 8), [i(6, 2, 1), i(4, 6)]),
    row(aten.index.Tensor, n(6, 4, 8), [None, i(4, 4, 1), i(8, 1, 2)]),
    row(aten.index.Tensor, n(6, 4, 8), [i(6)]),
    row(aten.zeros.default, [4, 6], dtype=torch.float64),
    row(aten.ones.default, [4, 6], dtype=torch.float64),
    row(aten.full.default, [4, 6], 2.0, dtype=torch.float64),
    row(aten.new_zeros.default, n(4, 6), [6, 4]),
    row(aten.new_ones.default, n(4, 6), [6, 4]),
    row(aten.new_full.default, n(4, 6), [6, 4], 3.0),
    row(aten.zeros_like.default, n(4, 6)),
    row(aten.ones_like.default, n(4, 6)),
    row(aten.full_like.default, n(4, 6), 3.0),
    row(aten.arange.default, 12),
    row(aten.scalar_tensor.default, 2.0, dtype=torch.float64),
    row(aten.triu.default, n(4, 6, 6), 1),
    row(aten.tril.default, n(6, 4)),
    row(aten.one_hot.default, i(6, 4, 2), 6),
    row(graph_kernels.cross_entropy, n(4, 6, 12), i(12, 4, 6), None, 3, 0.1),
    fixed(row(graph_kernels.cross_entropy, n(4, 12), i(12, 4), f(12), -100, 0.0), 2),
    row(graph_kernels.target_count, i(12, 4, 6), None, 3, torch.float64),
    fixed(row(graph_kernels.target_count, i(12, 4, 6), f(12), 3, torch.float64), 1),
    fixed(
        row(aten.binary_cross_entropy_with_logits.default, n(4, 6), f(4, 6), f(4, 1), f(6), 0), 2, 3
    ),
    fixed(row(aten.binary_cross_entropy.default, f(4, 6), f(4, 6), f(6), 0), 2),
    row(aten.margin_ranking_loss.default, n(4, 6), n(4, 6), n(4, 6).sign(), 0.1, 0),
    row(aten.cross_entropy_loss.default, n(4, 12), i(12, 4), None, 0, 3, 0.1),
    fixed(row(aten.cross_entropy_loss.default, n(4, 12), i(12, 4), f(12), 0), 2),
    row(aten.cross_entropy_loss.default, n(4, 6, 12), i(6, 4, 12), None, 0),
    row(aten.cross_entropy_loss.default, n(4, 12), f(4, 12), None, 0),
    row(aten.nll_loss.default, n(4, 12), i(12, 4), None, 0, 3),
    fixed(row(aten.nll_loss_nd.default, n(4, 6, 12), i(6, 4, 12), f(6), 0), 2),
    row(aten.nll_loss2d.default, n(4, 6, 12, 2), i(6, 4, 12, 2), None, 0),
    # Matrix products and convolutions
    row(aten.linear.default, n(4, 2, 6), n(12, 6), n(12)),
    row(aten.linear.default, n(4, 6), n(12, 6)),
    row(aten.linear.default, n(6), n(12, 6), n(12)),
    row(aten.matmul.default, n(6), n(6)),
    row(aten.matmul.default, n(4, 6), n(6)),
    row(aten.matmul.default, n(6), n(6, 4)),
    row(aten.matmul.default, n(4, 6), n(6, 12)),
    row(aten.matmul.default, n(2, 4, 6), n(6, 12)),
    row(aten.matmul.default, n(4, 6), n(2, 6, 12)),
    row(aten.matmul.default, n(6), n(2, 6, 12)),
    row(aten.matmul.default, n(2, 4, 6), n(6)),
    row(aten.matmul.default, n(2, 1, 4, 6), n(6, 6, 2)),
    row(aten.bmm.default, n(4, 2, 6), n(4, 6, 3)),
    row(aten.mv.default, n(4, 6), n(6)),
    row(aten.dot.default, n(6), n(6)),
    row(aten.baddbmm.default, n(4, 2, 3), n(4, 2, 6), n(4, 6, 3), beta=2.0, alpha=0.5),
    row(aten.baddbmm.default, n(4, 1, 3), n(4, 2, 6), n(4, 6, 3)),
    row(aten.addmm.default, n(4, 3), n(4, 6), n(6, 3), alpha=0.5),
    row(aten.addmm.default, n(3), n(4, 6), n(6, 3), beta=0.5),
    row(aten.conv1d.default, n(4, 6, 8), n(4, 6, 3), n(4), [1], [1]),
    row(aten.conv2d.default, n(4, 6, 8, 8), n(4, 6, 3, 3), None, [2, 2], [1, 1]),
    row(aten.conv2d.padding, n(2, 4, 6, 6), n(4, 4, 3, 3), n(4), [1, 1], "same"),
    row(aten.conv2d.default, n(2, 8, 6, 6), n(12, 2, 3, 3), n(12), [1, 1], [1, 1], [1, 1], 4),
    row(aten.conv2d.default, n(2, 6, 6, 6), n(12, 1, 3, 3), n(12), [1, 1], [1, 1], [1, 1], 6),
    row(aten.conv2d.default, n(2, 4, 12, 8), n(6, 4, 3, 2), n(6), [3, 2]),
    row(aten.conv2d.default, n(2, 4, 8, 6), n(4, 4, 5, 1), n(4), [2, 1], [2, 0]),
    row(aten.conv3d.default, n(2, 4, 4, 4, 4), n(6, 4, 2, 2, 2), n(6)),
    # Normalisations and attention
    row(aten.layer_norm.default, n(4, 2, 6), [6], n(6), n(6), 1e-5),
    row(aten.layer_norm.default, n(4, 6), [6]),
    row(aten.layer_norm.default, n(4, 2, 6), [2, 6], n(2, 6)),
    row(aten.rms_norm.default, n(4, 2, 6), [6], n(6)),
    row(aten.group_norm.default, n(4, 6, 2, 2), 3, n(6), n(6)),
    fixed(
        row(
            aten.batch_norm.default, n(4, 6, 2, 2), n(6), n(6), n(6), f(6), False, 0.1, 1e-5, False
        ),
        3,
        4,
    ),
    fixed(
        row(aten.batch_norm.default, n(4, 6), None, None, n(6), f(6), True, 0.1, 1e-5, False), 1, 2
    ),
    row(aten.batch_norm.default, n(4, 6, 2), n(6), n(6), None, None, True, 0.1, 1e-5, False),
    row(aten.scaled_dot_product_attention.default, n(4, 6, 2, 4), n(4, 6, 8, 4), n(4, 6, 8, 3)),
    row(
        aten.scaled_dot_product_attention.default,
        n(4, 6, 4, 4),
        n(4, 6, 4, 4),
        n(4, 6, 4, 4),
        None,
        0.0,
        True,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(4, 6, 4, 2),
        n(4, 6, 4, 2),
        n(4, 6, 4, 2),
        b(4, 1, 4, 4) | torch.eye(4).bool(),
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 6, 4, 2),
        n(2, 6, 4, 2),
        n(2, 6, 4, 2),
        n(6, 4, 4),
        0.0,
        False,
        scale=0.3,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 12, 4, 2),
        n(2, 4, 4, 2),
        n(2, 4, 4, 2),
        enable_gqa=True,
    ),
    row(
        aten.scaled_dot_product_attention.default,
        n(2, 6, 4, 2),
        n(2, 1, 4, 2),
        n(2, 1, 4, 2),
        n(2, 6, 4, 4),
        enable_gqa=True,
    ),
    # Reductions and pooling
    row(aten.sum.dim_IntList, n(4, 6, 2), [0, 2], False),
    row(aten.sum.dim_IntList, n(4, 6, 2), [1], True),
    row(aten.sum.dim_IntList, i(8, 4, 6), [1]),
    row(aten.mean.dim, n(4, 6, 2), [0, 1], False),
    row(aten.mean.dim, n(4, 6, 2), [-1], True),
    *(
        row(getattr(aten, name).default, n(4, 6, 2), [1], True)
        for name in ("amax", "amin", "logsumexp")
    ),
    row(aten.amax.default, n(4, 6)),
    *(
        row(getattr(aten, name).correction, n(4, 6, 2), [1], correction=1)
        for name in ("var", "std")
    ),
    row(aten.var.dim, n(4, 6), None),
    *(row(getattr(aten, name).dim, n(4, 6) > 0, 1) for name in ("any", "all")),
    row(aten.any.default, b(4, 6)),
    row(aten.prod.dim_int, n(4, 6), 0, True),
    row(aten.prod.default, n(4, 6)),
    *(row(getattr(aten, name).default, n(4, 6), 1) for name in ("argmax", "argmin")),
    row(aten.argmax.default, n(4, 6)),
    row(aten.linalg_vector_norm.default, n(4, 6), 2, [1], True),
    row(aten.linalg_vector_norm.default, n(4, 6)),
    row(aten.norm.ScalarOpt_dim, n(4, 6), 2, [1]),
    row(aten.norm.Scalar, n(4, 6), 2),
    row(aten.softmax.int, n(4, 6, 2), 1),
    row(aten.log_softmax.int, n(4, 6), -1),
    row(aten.cumsum.default, n(4, 6), 1),
    row(aten.cumprod.default, n(4, 6), 0),
    row(aten.diff.default, n(4, 6), 1, 1),
    row(aten.diff.default, n(4, 6), 1, 1, n(4, 2), n(4, 1)),
    row(aten.max_pool2d.default, n(4, 6, 4, 4), [2, 2]),
    row(aten.avg_pool2d.default, n(4, 6, 4, 4), [2, 2]),
    row(aten.adaptive_avg_pool2d.default, n(4, 6, 6, 6), [2, 2]),
    row(aten.upsample_nearest2d.vec, n(4, 6, 2, 2), None, [2.0, 2.0]),
    row(aten.upsample_bilinear2d.vec, n(4, 6, 2, 2), [4, 4], False, None),
    # Views and moves
    row(aten.reshape.default, n(4, 6), [24]),
    row(aten.reshape.default, n(24), [4, 6]),
    row(aten.reshape.default, n(4, 6, 2), [12, 4]),
    row(aten.reshape.default, n(4, 6), [3, 8]),
    row(aten.reshape.default, n(6, 4), [8, 3]),
    row(aten.reshape.default, n(4, 1, 6), [1, 2, 2, 1, 6]),
    row(aten.reshape.default, n(1), []),
    row(aten.squeeze.dims, n(4, 1, 6, 1), [1, 3]),
    row(aten.unsqueeze.default, n(4, 6), 1),
    row(aten.permute.default, n(4, 6, 2), [2, 0, 1]),
    row(aten.transpose.int, n(4, 6, 2), -1, 0),
    row(aten.t.default, n(4, 6)),
    row(aten.t.default, n(4)),
    row(aten.expand.default, n(4, 1, 6), [2, 4, 6, 6]),
    row(aten.expand.default, n(), [4, 6]),
    row(aten.slice.Tensor, n(4, 6), 1, 2, 6, 2),
    row(aten.roll.default, n(4, 6), [1, -2], [1, 0]),
    row(aten.roll.default, n(4, 6), [1]),
    row(aten.flip.default, n(4, 6, 2), [0, -1]),
    row(aten.select.int, n(4, 6, 2), 1, -1),
    row(aten.slice_scatter.default, n(4, 6), n(4, 2), 1, 2, 4),
    row(aten.select_scatter.default, n(4, 6), n(4), 1, -1),
    row(aten.constant_pad_nd.default, n(4, 6), [1, 1]),
    row(aten.constant_pad_nd.default, n(4, 6, 2), [0, 0, 1, -1]),
    row(aten.constant_pad_nd.default, n(4, 6), [0, 2], 1.5),
    row(aten.pad.default, n(4, 6, 6), [2, 1], "reflect"),
    row(aten.cat.default, [n(4, 6), n(4, 2), n(4, 6)], 1),
    row(aten.cat.default, [n(4, 6), n(4, 6)], -2),
    row(aten.stack.default, [n(4, 6), n(4, 6)], 1),
    row(aten.stack.default, [n(4, 6), n(4, 6), n(4, 6)], -1),
    row(aten.repeat.default, n(4, 6), [2, 1, 3]),
    # Several results
    row(aten.topk.default, n(4, 6), 2),
    row(aten.topk.default, n(4, 6, 2), 3, 1),
    row(aten.sort.default, n(4, 6), 0),
    row(aten.sort.stable, n(4, 6), stable=True),
    row(aten.argsort.default, n(4, 6), 1),
    row(aten.msort.default, n(4, 6)),
    *(
        row(getattr(aten, name).dim, n(4, 6, 2), 1)
        for name in ("max", "min", "median", "nanmedian")
    ),
    *(row(getattr(aten, name).default, n(4, 6)) for name in ("max", "min", "median", "aminmax")),
    row(aten.max.dim, n(4, 6), 0, True),
    row(aten.mode.default, n(4, 6), 1, True),
    row(aten.kthvalue.default, n(4, 6), 2, 0),
    row(aten.cummax.default, n(4, 6), 1),
    row(aten.cummin.default, n(4, 6), 0),
    row(aten.aminmax.default, n(4, 6), dim=1),
    *(
        row(getattr(aten, name).correction, n(4, 6, 2), [1], correction=1)
        for name in ("var_mean", "std_mean")
    ),
    row(aten.frexp.Tensor, n(4, 6)),
    *(row(getattr(aten, f"linalg_{name}").default, matrices(4, 6)) for name in OF_MATRICES.split()),
    *(
        row(getattr(aten, name).default, matrices(4, 6))
        for name in ("cholesky", "det", "inverse", "logdet", "matrix_exp", "pinverse")
    ),
    *(row(getattr(aten, name).default, matrices(4, 6)) for name in ("qr", "slogdet", "svd")),
    row(aten.linalg_lu.default, matrices(4, 2, 6)),
    row(aten.linalg_matrix_rank.default, matrices(4, 6), 1e-9),
    row(aten.linalg_pinv.default, matrices(4, 6), 1e-9),
    *(
        fixed(row(getattr(aten, f"linalg_ldl_factor{ex}").default, matrices(4, 6)), 0)
        for ex in ("", "_ex")
    ),  # has no derivative
    row(aten.linalg_solve.default, matrices(4, 6), n(4, 6, 2)),
    row(aten.linalg_solve_triangular.default, matrices(4, 6), n(4, 6, 2), upper=True),
    row(
        aten.gru.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(6, 6), n(6, 2), n(6), n(6)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row(
        aten.lstm.input,
        n(3, 4, 6),
        [n(2, 4, 2), n(2, 4, 2)],
        [*_lstm(6), *_lstm(6)],
        False,
        1,
        0.0,
        True,
        True,
        False,
    ),
    row(
        aten.rnn_tanh.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(2, 6), n(2, 2)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row(
        aten.rnn_relu.input,
        n(2, 4, 6),
        n(1, 4, 2),
        [n(2, 6), n(2, 2)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
    # New tensors
    row(aten.linspace.default, 0.0, 1.0, 12, dtype=torch.float64),
    row(aten.logspace.default, 0.0, 1.0, 12, dtype=torch.float64),
    row(aten.eye.default, 6, dtype=torch.float64),
    row(aten.triu_indices.default, 4, 6),
    row(aten.tril_indices.default, 4, 6),
    *(
        row(getattr(aten, f"{name}_window").default, 12, dtype=torch.float64)
        for name in WINDOWS.split()
    ),
]
MORE = [
    *POOLS,
    *LATER,
]  # families of similar operators: all options along one axis are tried, and some along two
UNDEFINED = {"aten.empty", "aten.new_empty", "aten.empty_like"}  # any values are right
UNDEFINED |= {"aten.randperm"}  # it is random, but stays whole

# --- Every option, on ranks that benchmarks/emulate.py emulates.


def _some(program: Program, sizes: Sequence[int], at_most: int = STRATEGIES) -> list[Strategy]:
    """The strategies that a single process can run, at most as many as take a moment."""
    found = local(every(program, sizes))
    return random.Random(0).sample(found, min(at_most, len(found)))


@pytest.mark.parametrize(
    ("example", "meshes"),
    [
        *((r, dict.fromkeys(MESHES, STRATEGIES)) for r in ROWS),
        *((r, {(2,): STRATEGIES, (2, 2): 3}) for r in MORE),
    ],
    ids=lambda given: str(given) if isinstance(given, Row) else "",
)
def test_every_option_is_the_operator(example: Row, meshes: dict[tuple[int, ...], int]) -> None:
    program = Program(example)
    assert program.rule is not None
    for sizes, at_most in meshes.items():
        for strategy in _some(program, sizes, at_most):
            try:
                program.check(strategy, sizes)
            except Exception as e:
                raise AssertionError(f"{example.name}: {strategy} on {sizes}: {e}") from e


def test_sparse_tensors_are_not_split() -> None:
    assert Program(row(aten.mul.Tensor, n(4, 6).to_sparse(), n(4, 6))).rule is None


def test_every_rule_has_a_row() -> None:
    ours = {
        name for name in _MAKERS if not name.startswith("program_parts.")
    }  # the rules of these operators are in tests/program_parts.py
    assert {r.name for r in (*ROWS, *MORE)} | DRAWN | UNDEFINED == ours


# --- The notation.


def _written(rule: Rule) -> set[str]:
    return {f"{' '.join(map(repr, o.ins))} -> {o.out!r}" for o in rule.options()}


def test_options_of_a_linear_layer() -> None:
    rule = make_rule("... k, n k + n -> ... n", [(4, 2, 6), (12, 6), (12,)], (4, 2, 12))
    assert _written(rule) == {
        "I I I -> I", "R R R -> R",
        "P R P -> P", "R P P -> P",  # linear in input and weight, each while the other is fixed
        "S0 R R -> S0", "S1 R R -> S1",  # batch and sequence
        "R S0 S0 -> S2",  # columns
        "S2 S1 P -> P",  # rows: the result is a pending sum, and the bias must be one
    }  # fmt: skip


def test_options_of_a_nonlinear_operator() -> None:
    assert _written(make_rule("~a b -> a b", [(4, 6)], (4, 6), whole="b")) == {
        "I -> I",
        "R -> R",
        "S0 -> S0",
    }


def test_dims_of_size_1_are_broadcast() -> None:
    rule = make_rule("..., ... -> ...", [(4, 1, 6), (2, 1)], (4, 2, 6))
    assert rule.operands == (((".2",), (), (".0",)), ((".1",), ()))
    assert rule.sizes == {".0": 6, ".1": 2, ".2": 4}
    assert "S0 R -> S0" in _written(rule)
    assert "R S0 -> S1" in _written(rule)


def test_an_absent_operand_is_left_out() -> None:
    assert _written(make_rule("k, n k + n -> n", [(6,), (12, 6)], (12,))) >= {
        "S0 S1 -> P",
        "R S0 -> S0",
    }


def test_a_product_is_split_major_factor_first() -> None:
    rule = make_rule("(a b) -> a b", [(24,)], (4, 6))
    found = {str(s) for s in node_strategies(rule, [True], True, (2, 2), lambda *_: True)}
    assert "S0 S0 -> S0 S0" in found
    assert "S0 R -> S1 R" not in found  # b is split, while a is whole
    assert {str(s) for s in node_strategies(rule, [True], True, (4, 2), lambda *_: True)} >= {
        "S0 S0 -> S0 S1"
    }
    assert not any(
        s.out == (S(0), S(0)) for s in node_strategies(rule, [True], True, (4, 2), lambda *_: True)
    )  # 4 is 2 times 2


def test_types_without_gradient_know_no_r() -> None:
    rule = make_rule("~a, a -> a", [(4,), (4,)], (4,))
    found = node_strategies(rule, [False, True], True, (2,), lambda *_: True)
    assert not any(R in s.ins[0] for s in found)
    assert any(s.ins == ((I,), (P,)) for s in found)


def test_a_rule_must_fit_the_shapes() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_rule("a b -> a", [(4, 6, 2)], (4,))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), ("a", "b", "->", "ab")),
        ((24,), (4, 6), ("ab", "->", "a", "b")),
        ((4, 6, 2), (12, 4), ("a", "bc", "d", "->", "ab", "cd")),
        ((4, 1, 6), (1, 4, 6, 1), ("a", "", "b", "->", "", "a", "b", "")),
        ((2, 6, 5), (4, 3, 5), ("a", "bc", "d", "->", "ab", "c", "d")),
        (
            (6, 4, 5),
            (8, 3, 5),
            ("ab", "c", "d", "->", "ae", "f", "d"),
        ),  # 6 and 8 share the factor 2, and no other up to the 5
        ((3, 4), (4, 3), ("a", "b", "->", "c", "d")),
    ],
)
def test_factors_of_views(
    before: tuple[int, ...], after: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    left, right, sizes = factorise(before, after)
    names = dict(zip(dict.fromkeys(x for d in (*left, *right) for x in d), "abcdef", strict=False))
    assert (
        *("".join(names[x] for x in d) for d in left),
        "->",
        *("".join(names[x] for x in d) for d in right),
    ) == expected
    assert [math.prod(sizes[x] for x in d) for d in (*left, *right)] == [*before, *after]


def _shapes(seed: int) -> tuple[list[int], list[int]]:
    """Two shapes with the same number of elements, whose dims need not divide each other."""
    numbers = random.Random(seed)
    primes = numbers.choices((1, 2, 2, 3), k=6)
    result = []
    for _ in range(2):
        numbers.shuffle(primes)
        shape = [1] * numbers.randint(1, 4)
        for p in primes:
            shape[numbers.randrange(len(shape))] *= p
        result.append(shape)
    return result[0], result[1]


@pytest.mark.parametrize("seed", range(30))
def test_any_view_is_right(seed: int) -> None:
    before, after = _shapes(seed)
    if before == after:
        return
    program = Program(row(aten.reshape.default, n(*before), after))
    for sizes in ((2,), (3,), (4,), (2, 2), (2, 3), (6,)):
        for strategy in _some(program, sizes):
            program.check(strategy, sizes)


# --- The second opinion: ``autopar.runtime.typecheck.checker`` was written apart, and must find
# every option is well typed, too.


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=0, world_size=4)
    yield Mesh((2, 2), ("a", "b"))
    dist.destroy_process_group()


def _typed(program: Program, strategy: Strategy, mesh: Mesh) -> list[str]:
    call = program.local(strategy, mesh.sizes)
    values = [
        cut(x, layout, mesh.sizes)[0].requires_grad_(g)
        for x, layout, g in zip(program.tensors, strategy.ins, program.trains, strict=True)
    ]
    with call.graph.inserting_before(call):
        inputs = [
            call.graph.placeholder(f"operand_{k}") for k in range(len(values))
        ]  # a tensor that is read twice may have two layouts
    for k, placeholder in enumerate(inputs):
        set_operand(call, k, placeholder)
    for old in [
        n
        for n in call.graph.nodes
        if n.op == "placeholder" and n.name != "mesh" and n not in inputs
    ]:
        call.graph.erase_node(old)
    return check_types(fx.GraphModule(torch.nn.Module(), call.graph), mesh, values, strategy.ins)


@pytest.mark.parametrize(
    ("example", "at_most"),
    [*((r, None) for r in ROWS), *((r, 4) for r in MORE)],
    ids=lambda given: str(given) if isinstance(given, Row) else "",
)
def test_every_option_is_well_typed(example: Row, at_most: int | None, mesh: Mesh) -> None:
    program = Program(example)
    for strategy in (
        every(program, mesh.sizes) if at_most is None else _some(program, mesh.sizes, at_most)
    ):
        try:
            _typed(program, strategy, mesh)
        except RunError as e:
            raise AssertionError(f"{example.name}: {strategy}: {e}") from e
