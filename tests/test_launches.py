"""The traced kernels of a call against torch's profiler, torch's own counts of FLOPs, and bytes by
hand.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopar.cost_model.device import KERNEL_KINDS
from autopar.kernel_trace.kernel_launches import TEMPORARY
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import TensorSpec, contiguous_spec

aten = torch.ops.aten
f32 = torch.float32


def c(*shape: int, dtype: torch.dtype = f32) -> TensorSpec:
    return contiguous_spec(shape, dtype, dtype.is_floating_point)


def trace(target: Any, *args: Any, device: str = "cpu") -> OperatorTrace:
    return OperatorTracer(device).trace(target, args, {})


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "linear": (aten.linear.default, (c(4, 32, 16), c(24, 16), c(24))),
    "matmul": (aten.matmul.default, (c(2, 3, 16, 8), c(2, 3, 8, 16))),
    "gelu": (aten.gelu.default, (c(8, 16),)),
    "layer norm": (aten.layer_norm.default, (c(8, 16), [16], c(16), c(16))),
    "softmax": (aten.softmax.int, (c(8, 16), -1)),
    "embedding": (aten.embedding.default, (c(20, 16), c(8, dtype=torch.int64))),
    "cross entropy": (aten.cross_entropy_loss.default, (c(8, 16), c(8, dtype=torch.int64))),
    "residual": (aten.add.Tensor, (c(8, 16), c(8, 16))),
    "bias": (aten.add.Tensor, (c(8, 16), c(16))),
    "product": (aten.mul.Tensor, (c(8, 16), c(8, 16))),
    "transposed copy": (aten.clone.default, (c(8, 16),)),
}
# What the profiler sees besides: views, allocations, and what composed operators call themselves.
LEAVES = """
addmm mm bmm sum gelu gelu_backward native_layer_norm native_layer_norm_backward _softmax
_softmax_backward_data embedding embedding_dense_backward _log_softmax _log_softmax_backward_data
nll_loss_forward nll_loss_backward add mul clone
""".split()  # noqa: SIM905


def real(value: Any) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, dtype=value.dtype).requires_grad_(value.grad)
    return torch.randint(0, 4, value.shape)


@pytest.mark.parametrize("name", CALLS)
def test_torch_launches_them(name: str) -> None:
    target, args = CALLS[name]
    answer, given = trace(target, *args), [real(a) for a in args]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = target(*given)
        torch.autograd.grad(
            out,
            [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad],
            torch.ones_like(out),
        )
    ran = Counter({e.key.removeprefix("aten::"): e.count for e in profile.key_averages()})
    ours = Counter(launch.operator for launch in (*answer.forward, *answer.backward))
    assert {k: ours[k] for k in LEAVES if ours[k]} == {
        k: ran[k] for k in LEAVES if ran[k] and k in ours
    }
    assert set(ours) <= set(ran)
    assert {launch.kind for launch in (*answer.forward, *answer.backward)} <= set(KERNEL_KINDS)


def test_a_residual_costs_nothing_backward() -> None:
    assert not trace(*_flat("residual")).backward
    assert [launch.operator for launch in trace(*_flat("bias")).backward] == ["sum"]


def _flat(name: str) -> tuple[Any, ...]:
    target, args = CALLS[name]
    return target, *args


def test_what_is_read_and_written() -> None:
    """A linear layer of 128 rows, from 16 to 24 features: y = x w + b; dx = dy w; dw = dy x; db =
    sum dy.
    """
    answer = trace(*_flat("linear"))
    x, w, b, y = (4 * n for n in (128 * 16, 24 * 16, 24, 128 * 24))
    assert [sorted(launch.touched) for launch in answer.forward] == [
        sorted([(0, x), (1, w), (2, b), (-1, y)])
    ]
    backward = {
        launch.operator + str(launch.writes): sorted(launch.touched) for launch in answer.backward
    }
    assert backward == {
        "mm0": sorted([(-1, y), (1, w), (0, x)]),
        "mm1": sorted([(-1, y), (0, x), (1, w)]),
        "sum2": sorted([(-1, y), (2, b)]),
    }


def test_a_table_is_read_where_it_is_picked_from() -> None:
    (launch,) = trace(aten.embedding.default, c(50000, 16), c(8, dtype=torch.int64)).forward
    assert launch.nbytes == 2 * 8 * 16 * 4 + 8 * 8
    (launch,) = trace(aten.embedding.default, c(50000, 16), c(8, dtype=torch.int64)).backward
    assert (
        launch.nbytes == 50000 * 16 * 4 + 8 * 16 * 4 + 8 * 8
    )  # the gradient of all of it is written


def test_temporaries_are_neither_operand_nor_result() -> None:
    (launch,) = trace(aten.dropout.default, c(8, 16), 0.1, True).forward
    assert sorted(launch.touched) == sorted(
        [(0, 512), (-1, 512), (TEMPORARY, 128)]
    )  # the mask has a byte for each element


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linear.default, (c(4, 32, 16), c(24, 16), c(24))),
        (aten.matmul.default, (c(2, 3, 16, 8), c(2, 3, 8, 16))),
        (aten.conv2d.default, (c(2, 8, 12, 12), c(16, 8, 3, 3), None, [1, 1], [1, 1])),
    ],
    ids=["linear", "matmul", "convolution"],
)
def test_flops_are_those_that_torch_counts(target: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        target(*(real(a) for a in args)).sum().backward()
    answer = trace(target, *args)
    assert (
        sum(launch.flops for launch in (*answer.forward, *answer.backward))
        == counter.get_total_flops()
    )


def test_each_group_of_a_convolution_sees_its_own_channels() -> None:
    (launch,) = trace(
        aten.conv2d.default, c(2, 8, 12, 12), c(16, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 4
    ).forward
    assert launch.flops == 2 * (2 * 16 * 12 * 12) * (2 * 3 * 3)


def test_flops_of_fused_attention() -> None:
    q = c(2, 4, 64, 16, dtype=torch.bfloat16)
    answer = trace(aten.scaled_dot_product_attention.default, q, q, q, device="cuda")
    counted = flop_registry[aten._scaled_dot_product_flash_attention](q.shape, q.shape, q.shape)
    assert [launch.flops for launch in answer.forward] == [counted]
    assert [launch.flops for launch in answer.backward] == [2.5 * counted]
    causal = trace(
        aten.scaled_dot_product_attention.default, q, q, q, None, 0.0, True, device="cuda"
    )
    assert [launch.flops for launch in causal.forward] == [counted / 2]  # half of the scores


def test_an_operator_without_a_backward_on_meta_tensors_reads_all() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.new_empty(x.shape)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError

    (launch,) = trace(Square.apply, c(8, 16)).backward
    assert sorted(launch.touched) == [(-1, 512), (0, 512), (0, 512)]
