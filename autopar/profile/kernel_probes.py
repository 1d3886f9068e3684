"""What a profile measures: calls whose forward and backward launch the kernels that models are made
of, in several sizes.
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
SIZES = {  # elements; of 32 MiB and more the C library takes new memory each time
    "cpu": (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 23),
    "cuda": (1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26),
}
MOST = {"cpu": 2.5e9, "cuda": 5e12}  # FLOPs of a probe
WIDTH, ROWS = 512, 256  # of what is normalised; of a linear layer's input, at least


def launches(device_type: str, dtype: torch.dtype) -> Iterator[KernelLaunch]:
    """Kernels to measure."""
    autograd = OperatorTracer(device_type)
    few = device_type == "cpu" and dtype is not torch.float32  # it is for training on GPUs
    for size in SIZES[device_type][1::3] if few else SIZES[device_type]:
        for answer in _answers(autograd, size, dtype):
            yield from (
                n
                for n in (*answer.forward, *answer.backward)
                if n.call is not None and n.flops < MOST[device_type]
            )


def _answers(autograd: OperatorTracer, size: int, dtype: torch.dtype) -> Iterator[OperatorTrace]:
    rows = size // WIDTH
    x, vector = contiguous_spec((rows, WIDTH), dtype, True), contiguous_spec((WIDTH,), dtype, True)
    index = contiguous_spec((rows,), torch.int64)
    for call in _CALLS.values():
        yield autograd.trace(call[0], *call[1](x, vector, index))
    side = max(16, 1 << round(math.log2(size) / 2))
    for n, k in {
        (side, side),
        (min(side, WIDTH), min(side, WIDTH)),
        (min(4 * side, 4096), min(side, 1024)),
    }:
        yield autograd.trace(
            aten.linear.default,
            (
                contiguous_spec((max(size // k, ROWS), k), dtype, True),
                _w(dtype, n, k),
                _w(dtype, n),
            ),
            {},
        )
    sequence = min(1024, max(32, rows // 8))
    heads = max(1, size // (sequence * 64))
    q = contiguous_spec((max(1, heads // 8), min(heads, 8), sequence, 64), dtype, True)
    yield autograd.trace(
        aten.matmul.default, (q, contiguous_spec((*q.shape[:2], 64, sequence), dtype, True)), {}
    )
    for causal in (False, True):
        yield autograd.trace(
            aten.scaled_dot_product_attention.default, (q, q, q, None, 0.0, causal), {}
        )
    yield autograd.trace(aten.embedding.default, (_w(dtype, 8192, WIDTH), index), {})
    channels = min(64, max(16, size // 4096))
    image = contiguous_spec((max(1, size // (channels * 256)), channels, 16, 16), dtype, True)
    per_channel = _w(dtype, channels)
    yield autograd.trace(
        aten.conv2d.default,
        (image, _w(dtype, channels, channels, 3, 3), per_channel, [1, 1], [1, 1]),
        {},
    )
    yield autograd.trace(
        aten.batch_norm.default,
        (image, per_channel, per_channel, None, None, True, 0.1, 1e-5, False),
        {},
    )
    yield autograd.trace(aten.max_pool2d.default, (image, [2, 2], [2, 2]), {})


def _w(dtype: torch.dtype, *shape: int) -> TensorSpec:
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
