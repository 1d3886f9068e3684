"""The kernels that a profile measures: the forward and backward kernels of common operators, in
several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec, contiguous_spec

aten = torch.ops.aten
# Elements of a tensor. A CPU's C library allocates new memory for each tensor of 32 MiB or more.
# The most needed size comes first.
SIZES = {
    "cpu": (1 << 15, 1 << 20, 1 << 18, 1 << 12, 1 << 22, 1 << 23),
    "cuda": (1 << 18, 1 << 24, 1 << 21, 1 << 15, 1 << 26),
}
MAX_FLOPS = {"cpu": 2.5e9, "cuda": 5e12}  # larger kernels are left out
WIDTH = 512  # the size of a normalised dim
MIN_ROWS = 256  # the least rows of a linear layer's input


def probe_sizes(device_type: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Elements of the tensors to measure the kernels of one dtype on, the most needed first."""
    # On a CPU other dtypes than float32 matter little, so they get fewer sizes.
    few = device_type == "cpu" and dtype is not torch.float32
    return (1 << 15, 1 << 22) if few else SIZES[device_type]


def probe_launches(device_type: str, dtype: torch.dtype, size: int) -> Iterator[KernelLaunch]:
    """The kernels to measure for one dtype, on tensors of about ``size`` elements."""
    for trace in _traces(OperatorTracer(device_type), size, dtype):
        yield from (
            n
            for n in (*trace.forward, *trace.backward)
            if n.call is not None and n.flops < MAX_FLOPS[device_type]
        )


def _traces(tracer: OperatorTracer, size: int, dtype: torch.dtype) -> Iterator[OperatorTrace]:
    """Traces of all calls, on tensors of about ``size`` elements."""
    rows = size // WIDTH
    x, vector = contiguous_spec((rows, WIDTH), dtype, True), contiguous_spec((WIDTH,), dtype, True)
    index = contiguous_spec((rows,), torch.int64)
    for target, arguments in _CALLS.values():
        yield tracer.trace(target, *arguments(x, vector, index))
    yield from _products(tracer, size, dtype)
    yield tracer.trace(aten.embedding.default, (_parameter(dtype, 8192, WIDTH), index), {})
    yield from _images(tracer, size, dtype)


def _products(tracer: OperatorTracer, size: int, dtype: torch.dtype) -> Iterator[OperatorTrace]:
    """Traces of linear layers, batched products and attention."""
    side = max(16, 1 << round(math.log2(size) / 2))
    for n, width in {
        (side, side),
        (min(side, WIDTH), min(side, WIDTH)),
        (min(4 * side, 4096), min(side, 1024)),
    }:
        x = contiguous_spec((max(size // width, MIN_ROWS), width), dtype, True)
        weights = _parameter(dtype, n, width), _parameter(dtype, n)
        yield tracer.trace(aten.linear.default, (x, *weights), {})
    sequence = min(1024, max(32, size // WIDTH // 8))
    heads = max(1, size // (sequence * 64))
    q = contiguous_spec((max(1, heads // 8), min(heads, 8), sequence, 64), dtype, True)
    k = contiguous_spec((*q.shape[:2], 64, sequence), dtype, True)
    yield tracer.trace(aten.matmul.default, (q, k), {})
    for causal in (False, True):
        arguments = (q, q, q, None, 0.0, causal)
        yield tracer.trace(aten.scaled_dot_product_attention.default, arguments, {})


def _images(tracer: OperatorTracer, size: int, dtype: torch.dtype) -> Iterator[OperatorTrace]:
    """Traces of convolution, batch normalisation and pooling."""
    channels = min(64, max(16, size // 4096))
    image = contiguous_spec((max(1, size // (channels * 256)), channels, 16, 16), dtype, True)
    each = _parameter(dtype, channels)
    weight = _parameter(dtype, channels, channels, 3, 3)
    yield tracer.trace(aten.conv2d.default, (image, weight, each, [1, 1], [1, 1]), {})
    statistics = (None, None, True, 0.1, 1e-5, False)
    yield tracer.trace(aten.batch_norm.default, (image, each, each, *statistics), {})
    yield tracer.trace(aten.max_pool2d.default, (image, [2, 2], [2, 2]), {})


def _parameter(dtype: torch.dtype, *shape: int) -> TensorSpec:
    return contiguous_spec(shape, dtype, True)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CALLS: dict[
    str, tuple[Callable[..., Any], Callable[[TensorSpec, TensorSpec, TensorSpec], Arguments]]
] = {
    **{
        name: (getattr(aten, name).default, lambda x, v, i: ((x,), {}))
        for name in ("gelu", "silu", "relu", "tanh", "exp", "sigmoid", "rsqrt", "neg", "sum")
    },
    "softmax": (aten.softmax.int, lambda x, v, i: ((x, -1), {})),
    "log_softmax": (aten.log_softmax.int, lambda x, v, i: ((x, -1), {})),
    "layer_norm": (aten.layer_norm.default, lambda x, v, i: ((x, list(v.shape), v, v), {})),
    "mul": (aten.mul.Tensor, lambda x, v, i: ((x, x._replace()), {})),
    "add": (aten.add.Tensor, lambda x, v, i: ((x, x._replace()), {})),
    "div": (aten.div.Tensor, lambda x, v, i: ((x, 3.0), {})),
    "where": (
        aten.where.self,
        lambda x, v, i: ((contiguous_spec(x.shape, torch.bool), x, x._replace()), {}),
    ),
    "cat": (aten.cat.default, lambda x, v, i: (([x, x._replace()], -1), {})),
    "pow": (aten.pow.Tensor_Scalar, lambda x, v, i: ((x, 2), {})),
    "dropout": (aten.dropout.default, lambda x, v, i: ((x, 0.1, True), {})),
    "mean": (aten.mean.dim, lambda x, v, i: ((x, [-1], True), {})),
    "transpose": (
        aten.clone.default,
        lambda x, v, i: (
            (x._replace(shape=x.shape[::-1], stride=x.stride[::-1]),),
            {"memory_format": torch.contiguous_format},
        ),
    ),
    "cast": (
        aten.to.dtype,
        lambda x, v, i: ((x, torch.bfloat16 if x.dtype is torch.float32 else torch.float32), {}),
    ),
    "cross_entropy": (aten.cross_entropy_loss.default, lambda x, v, i: ((x, i), {})),
}
