"""Rules against torch: each operator cut as each option says, run part by part, put together, and compared with the operator itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch.fx.node import map_arg

from autopar.errors import RunError
from autopar.graph import operands, set_operand
from autopar.layout import I, Layout, P, R, S, dual
from autopar.passes.choose_kernels import choose_kernels
from autopar.passes.localise import localise
from autopar.passes.normal_form import normal_form
from autopar.plan import NodePlan
from autopar.rules import Rule, make_rule, rule_of
from autopar.rules.registry import _MAKERS, operator_name
from autopar.rules.views import factorise
from autopar.runtime import kernels
from autopar.runtime.mesh import Mesh
from autopar.runtime.typecheck import check_types
from autopar.search.strategies import Strategy, strategies

aten = torch.ops.aten
MESHES = ((2,), (3,), (2, 2))
STRATEGIES = 24  # tried of each operator on each mesh
DRAWN = {"aten.dropout"}  # its kernel draws for each part: tests/test_kernels.py
LOCAL_KERNELS = {None, "mean"}  # the others communicate: tests/test_kernels.py and test_any_plan.py have them

# --- The operators: every registered one, with examples of its arguments.


@dataclass(frozen=True)
class Row:
    """A call; ``fixed`` are the operands that get no gradient although they are floating-point."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return operator_name(self.target)

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in _tensors((self.args, self.kwargs))]
        return f"{self.name.removeprefix('aten.')}{''.join(str(list(s)).replace(' ', '') for s in shapes)}"


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


UNARY = """abs acos acosh asin asinh atan atanh ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardsigmoid hardswish
hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg reciprocal relu relu6 round
rsqrt selu sigmoid sign silu sin sinh softplus sqrt tan tanh trunc"""
BINARY = """atan2.default eq.Tensor fmod.Tensor ge.Tensor gt.Tensor le.Tensor logaddexp.default logical_and.default logical_or.default
logical_xor.default lt.Tensor max.other maximum.default min.other minimum.default ne.Tensor remainder.Tensor xlogy.Tensor"""
SCALAR = """clamp_max.default clamp_min.default eq.Scalar fmod.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar ne.Scalar pow.Tensor_Scalar
remainder.Scalar"""
LOSSES = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div poisson_nll_loss smooth_l1_loss
soft_margin_loss"""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _loss(name: str) -> Row:
    target = _overload(name)
    x = f(4, 6).log() if name == "kl_div" else f(4, 6)
    more: dict[str, Any] = {"log_input": True, "full": False, "eps": 1e-8} if name == "poisson_nll_loss" else {}
    return fixed(row(target, x, f(4, 6), **more, reduction=0), 1)


x_twice = f(4, 6)
ROWS = [
    *(row(_overload(name), f(4, 6) + (name == "acosh")) for name in UNARY.split()),
    *(row(_overload(name), f(4, 6), f(4, 1)) for name in BINARY.split()),
    *(row(_overload(name), n(4, 6), 2.0) for name in SCALAR.split()),
    *map(_loss, LOSSES.split()),
    row(aten.pow.Tensor_Tensor, f(4, 6), f(6)),
    row(aten.pow.Scalar, 2.0, f(4, 6)),
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
    row(kernels.send, n(4, 6)),
    row(kernels.send, b(4, 6)),
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
    row(kernels.cross_entropy, n(4, 6, 12), i(12, 4, 6), None, 3, 0.1),
    fixed(row(kernels.cross_entropy, n(4, 12), i(12, 4), f(12), -100, 0.0), 2),
    row(kernels.target_count, i(12, 4, 6), None, 3, torch.float64),
    fixed(row(kernels.target_count, i(12, 4, 6), f(12), 3, torch.float64), 1),
    fixed(row(aten.binary_cross_entropy_with_logits.default, n(4, 6), f(4, 6), f(4, 1), f(6), 0), 2, 3),
    fixed(row(aten.binary_cross_entropy.default, f(4, 6), f(4, 6), f(6), 0), 2),
    row(aten.margin_ranking_loss.default, n(4, 6), n(4, 6), n(4, 6).sign(), 0.1, 0),
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
    fixed(row(aten.batch_norm.default, n(4, 6, 2, 2), n(6), n(6), n(6), f(6), False, 0.1, 1e-5, False), 3, 4),
    fixed(row(aten.batch_norm.default, n(4, 6), None, None, n(6), f(6), True, 0.1, 1e-5, False), 1, 2),
    row(aten.batch_norm.default, n(4, 6, 2), n(6), n(6), None, None, True, 0.1, 1e-5, False),
    row(aten.scaled_dot_product_attention.default, n(4, 6, 2, 4), n(4, 6, 8, 4), n(4, 6, 8, 3)),
    row(aten.scaled_dot_product_attention.default, n(4, 6, 4, 4), n(4, 6, 4, 4), n(4, 6, 4, 4), None, 0.0, True),
    row(aten.scaled_dot_product_attention.default, n(4, 6, 4, 2), n(4, 6, 4, 2), n(4, 6, 4, 2), b(4, 1, 4, 4) | torch.eye(4).bool()),
    row(aten.scaled_dot_product_attention.default, n(2, 6, 4, 2), n(2, 6, 4, 2), n(2, 6, 4, 2), n(6, 4, 4), 0.0, False, scale=0.3),
    row(aten.scaled_dot_product_attention.default, n(2, 12, 4, 2), n(2, 4, 4, 2), n(2, 4, 4, 2), enable_gqa=True),
    row(aten.scaled_dot_product_attention.default, n(2, 6, 4, 2), n(2, 1, 4, 2), n(2, 1, 4, 2), n(2, 6, 4, 4), enable_gqa=True),
    # Reductions and pooling
    row(aten.sum.dim_IntList, n(4, 6, 2), [0, 2], False),
    row(aten.sum.dim_IntList, n(4, 6, 2), [1], True),
    row(aten.sum.dim_IntList, i(8, 4, 6), [1]),
    row(aten.mean.dim, n(4, 6, 2), [0, 1], False),
    row(aten.mean.dim, n(4, 6, 2), [-1], True),
    *(row(getattr(aten, name).default, n(4, 6, 2), [1], True) for name in ("amax", "amin", "logsumexp")),
    row(aten.amax.default, n(4, 6)),
    *(row(getattr(aten, name).correction, n(4, 6, 2), [1], correction=1) for name in ("var", "std")),
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
]

# --- Emulation: a tensor's parts on all ranks of a mesh, in the order of ranks.


def cut(x: torch.Tensor, layout: Layout, sizes: Sequence[int]) -> list[torch.Tensor]:
    if not layout:
        return [x]
    t, size = layout[0], sizes[0]
    if t.is_shard:
        pieces = list(x.chunk(size, t.dim))
    elif t is P:
        pieces = _summands(x, size)
    else:
        pieces = [x] * size
    return [part for piece in pieces for part in cut(piece, layout[1:], sizes[1:])]


def _summands(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    if x.dtype == torch.bool:  # a sum of booleans is their "or"
        owner = torch.randint(count, x.shape, generator=_numbers)
        return [x & (owner == k) for k in range(count)]
    if not x.is_floating_point():
        first = [torch.randint(-5, 5, x.shape, generator=_numbers).to(x.dtype) for _ in range(count - 1)]
    else:
        first = [torch.randn(x.shape, generator=_numbers, dtype=torch.float64).to(x.dtype) for _ in range(count - 1)]
    return [*first, x - sum(first)]


def join(parts: Sequence[torch.Tensor], layout: Layout, sizes: Sequence[int], tolerance: float = 1e-10) -> torch.Tensor:
    if not layout:
        return parts[0]
    t, size = layout[0], len(parts) // sizes[0]
    pieces = [join(parts[k * size : (k + 1) * size], layout[1:], sizes[1:], tolerance) for k in range(sizes[0])]
    if t.is_shard:
        return torch.cat(pieces, t.dim)
    if t is P:
        return torch.stack(pieces).any(0) if pieces[0].dtype == torch.bool else torch.stack(pieces).sum(0)
    for piece in pieces[1:]:
        _close(piece, pieces[0], "ranks differ", tolerance)
    return pieces[0]


def _close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False, msg=lambda m: f"{what}: {m}")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Program:
    """One call as a captured graph, its rule, and what it computes."""

    def __init__(self, example: Row) -> None:
        graph = fx.Graph()
        graph.placeholder("mesh").meta["val"] = None
        made: dict[int, fx.Node] = {}

        def node(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                if id(x) not in made:
                    made[id(x)] = graph.placeholder(f"x{len(made)}")
                    made[id(x)].meta["val"] = x
                return made[id(x)]
            return type(x)(map(node, x)) if isinstance(x, (list, tuple)) else x

        args = tuple(node(a) for a in example.args)
        kwargs = {k: node(v) for k, v in example.kwargs.items()}
        self.call = graph.call_function(example.target, args, kwargs)
        self.call.meta["val"] = example.target(*example.args, **example.kwargs)
        graph.output(self.call)
        normal_form(graph)
        self.graph, self.rule = graph, rule_of(self.call)
        self.tensors = [n.meta["val"] for n, _ in operands(self.call)]
        self.trains = [x.is_floating_point() and k not in example.fixed for k, x in enumerate(self.tensors)]
        self.tolerance = 1e-5 if self.output.dtype == torch.float32 else 1e-10

    @property
    def output(self) -> torch.Tensor:
        return self.call.meta["val"]

    def local(self, strategy: Strategy, sizes: Sequence[int]) -> fx.Node:
        """The call as the passes make it for one rank."""
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        call = next(c for c in copy.nodes if c.op == "call_function")
        plan = NodePlan(strategy.ins, strategy.out, strategy.factors, strategy.kernels)
        call.meta.update(layout=strategy.out, plan=plan, plan_name="it")
        choose_kernels(copy)
        localise(copy, {"it": self.rule}, sizes)
        return call

    def check(self, strategy: Strategy, sizes: Sequence[int]) -> None:
        call = self.local(strategy, sizes)
        ranks = math.prod(sizes)
        pieces = [cut(x, layout, sizes) for x, layout in zip(self.tensors, strategy.ins, strict=True)]
        leaves = [[p.clone().requires_grad_(grad) for p in parts] for parts, grad in zip(pieces, self.trains, strict=True)]
        outputs = [_run(call, [parts[rank] for parts in leaves]) for rank in range(ranks)]
        found = join([o.detach() for o in outputs], strategy.out, sizes, self.tolerance)
        _close(found, self.output, "value", self.tolerance)
        if outputs[0].requires_grad:
            self._check_gradients(strategy, sizes, leaves, outputs)

    def _check_gradients(
        self, strategy: Strategy, sizes: Sequence[int], leaves: list[list[torch.Tensor]], outputs: list[torch.Tensor]
    ) -> None:
        weights = torch.randn(self.output.shape, generator=_numbers, dtype=torch.float64).to(self.output.dtype)
        wholes = [x.clone().requires_grad_(grad) for x, grad in zip(self.tensors, self.trains, strict=True)]
        _run(self.call, wholes).backward(weights)
        for output, weight in zip(outputs, cut(weights, dual(strategy.out), sizes), strict=True):
            output.backward(weight)
        for k, (parts, whole) in enumerate(zip(leaves, wholes, strict=True)):
            if whole.grad is not None:
                found = join([p.grad for p in parts], dual(strategy.ins[k]), sizes, self.tolerance)  # type: ignore[misc]
                _close(found, whole.grad, f"gradient of operand {k}", self.tolerance)


def _run(call: fx.Node, values: Sequence[torch.Tensor]) -> torch.Tensor:
    remaining = iter(values)  # operands come in the order in which map_arg meets them, one by one where a node stands twice
    args, kwargs = map_arg((call.args, call.kwargs), lambda _: next(remaining))
    return call.target(*args, **kwargs)  # type: ignore[operator]


def _all(program: Program, sizes: Sequence[int]) -> list[Strategy]:
    output = any(program.trains) and program.output.is_floating_point()
    return strategies(program.rule, program.trains, output, sizes, lambda *_: True)


def _some(program: Program, sizes: Sequence[int]) -> list[Strategy]:
    """Those that can be run here, no more of them than take a moment."""
    found = [s for s in _all(program, sizes) if set(s.kernels) <= LOCAL_KERNELS]
    return random.Random(0).sample(found, min(STRATEGIES, len(found)))


@pytest.mark.parametrize("example", ROWS, ids=str)
def test_every_option_is_the_operator(example: Row) -> None:
    program = Program(example)
    assert program.rule is not None
    for sizes in MESHES:
        for strategy in _some(program, sizes):
            try:
                program.check(strategy, sizes)
            except Exception as e:
                raise AssertionError(f"{example.name}: {strategy} on {sizes}: {e}") from e


def test_every_rule_has_a_row() -> None:
    assert {r.name for r in ROWS} | DRAWN == set(_MAKERS)


# --- The notation.


def _written(rule: Rule) -> set[str]:
    return {f"{' '.join(map(repr, o.ins))} -> {o.out!r}" for o in rule.options()}


def test_options_of_a_linear_layer() -> None:
    rule = make_rule("... k, n k + n -> ... n", [(4, 2, 6), (12, 6), (12,)], (4, 2, 12))
    assert _written(rule) == {
        "I I I -> I", "R R R -> R",
        "P R P -> P", "R P P -> P",  # linear in input and weight, each while the other is held
        "S0 R R -> S0", "S1 R R -> S1",  # batch and sequence
        "R S0 S0 -> S2",  # columns
        "S2 S1 P -> P",  # rows: a sum is pending, and the bias comes as one
    }  # fmt: skip


def test_options_of_a_nonlinear_operator() -> None:
    assert _written(make_rule("~a b -> a b", [(4, 6)], (4, 6), whole="b")) == {"I -> I", "R -> R", "S0 -> S0"}


def test_dims_of_size_1_are_broadcast() -> None:
    rule = make_rule("..., ... -> ...", [(4, 1, 6), (2, 1)], (4, 2, 6))
    assert rule.operands == (((".2",), (), (".0",)), ((".1",), ()))
    assert rule.sizes == {".0": 6, ".1": 2, ".2": 4}
    assert "S0 R -> S0" in _written(rule)
    assert "R S0 -> S1" in _written(rule)


def test_an_absent_operand_is_left_out() -> None:
    assert _written(make_rule("k, n k + n -> n", [(6,), (12, 6)], (12,))) >= {"S0 S1 -> P", "R S0 -> S0"}


def test_a_product_is_split_major_factor_first() -> None:
    rule = make_rule("(a b) -> a b", [(24,)], (4, 6))
    found = {str(s) for s in strategies(rule, [True], True, (2, 2), lambda *_: True)}
    assert "S0 S0 -> S0 S0" in found
    assert "S0 R -> S1 R" not in found  # b, while a is whole
    assert {str(s) for s in strategies(rule, [True], True, (4, 2), lambda *_: True)} >= {"S0 S0 -> S0 S1"}
    assert not any(s.out == (S(0), S(0)) for s in strategies(rule, [True], True, (4, 2), lambda *_: True))  # 4 is split up


def test_types_without_gradient_know_no_r() -> None:
    rule = make_rule("~a, a -> a", [(4,), (4,)], (4,))
    found = strategies(rule, [False, True], True, (2,), lambda *_: True)
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
        ((6, 4, 5), (8, 3, 5), ("ab", "c", "d", "->", "ae", "f", "d")),  # 6 and 8 share 2, then nothing up to the 5
        ((3, 4), (4, 3), ("a", "b", "->", "c", "d")),
    ],
)
def test_factors_of_views(before: tuple[int, ...], after: tuple[int, ...], expected: tuple[str, ...]) -> None:
    left, right, sizes = factorise(before, after)
    names = dict(zip(dict.fromkeys(x for d in (*left, *right) for x in d), "abcdef", strict=False))
    assert (*("".join(names[x] for x in d) for d in left), "->", *("".join(names[x] for x in d) for d in right)) == expected
    assert [math.prod(sizes[x] for x in d) for d in (*left, *right)] == [*before, *after]


def _shapes(seed: int) -> tuple[list[int], list[int]]:
    """Two shapes of the same number of elements, with dims that need not divide one another."""
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


# --- The second opinion: ``autopar.runtime.typecheck`` was written apart, and must find every option well typed too.


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=0, world_size=4)
    yield Mesh((2, 2), ("a", "b"))
    dist.destroy_process_group()


def _typed(program: Program, strategy: Strategy, mesh: Mesh) -> list[str]:
    call = program.local(strategy, mesh.sizes)
    values = [
        cut(x, layout, mesh.sizes)[0].requires_grad_(g) for x, layout, g in zip(program.tensors, strategy.ins, program.trains, strict=True)
    ]
    with call.graph.inserting_before(call):
        inputs = [call.graph.placeholder(f"operand_{k}") for k in range(len(values))]  # a tensor read twice may come in two layouts
    for k, placeholder in enumerate(inputs):
        set_operand(call, k, placeholder)
    for old in [n for n in call.graph.nodes if n.op == "placeholder" and n.name != "mesh" and n not in inputs]:
        call.graph.erase_node(old)
    return check_types(fx.GraphModule(torch.nn.Module(), call.graph), mesh, values, strategy.ins)


@pytest.mark.parametrize("example", ROWS, ids=str)
def test_every_option_is_well_typed(example: Row, mesh: Mesh) -> None:
    program = Program(example)
    for strategy in _all(program, mesh.sizes):
        try:
            _typed(program, strategy, mesh)
        except RunError as e:
            raise AssertionError(f"{example.name}: {strategy}: {e}") from e
