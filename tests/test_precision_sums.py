"""The dtypes in which gradients are summed and everything else is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from casts_by_hand import NAMES, PAIR, build
from equivalence import full, loss_of
from pool import Pools
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """The dtypes of the collectives that ran, by kind. Scalars (losses, counts) are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and not name.endswith("wait_tensor"):
            kind = name.partition("::")[2].replace("_coalesced", "")
            sent = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            for tensor in sent:
                if tensor.numel() > 1:
                    self.dtypes.setdefault(kind, set()).add(tensor.dtype)
        return func(*args, **(kwargs or {}))


def _sends(options: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    model, sample = zoo.mlp()
    compiled = build(model, sample, precision="bf16", **options)
    with Sent() as sent:
        loss_of(compiled(**sample)).backward()
    return sent.dtypes


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16", "fp16"])
def test_gradients_are_summed_in_reduce_dtype_and_all_else_in_the_compute_dtype(
    ranks: Pools, reduce_dtype: str | None
) -> None:
    summed = {dtype for dtype, name in NAMES.items() if name == (reduce_dtype or "fp32")}
    for label, expected in {
        "data": {"all_reduce_": summed},
        "microbatches": {"all_reduce_": summed},
        "zero 1": {"reduce_scatter_tensor": summed, "all_gather_into_tensor": {torch.bfloat16}},
        "zero 1, microbatches": {
            "reduce_scatter_tensor": summed,
            "all_gather_into_tensor": {torch.bfloat16},
        },
        "zero 3": {"reduce_scatter_tensor": summed, "all_gather_into_tensor": {torch.bfloat16}},
    }.items():
        for found in ranks(2).run(_sends, PAIR[label] | dict(reduce_dtype=reduce_dtype)):
            assert found == expected, label
    for found in ranks(2).run(_sends, PAIR["tensor"] | dict(reduce_dtype=reduce_dtype)):
        assert found
        assert set().union(*found.values()) == {torch.bfloat16}


class Scale(nn.Module):
    """A scale whose gradient is the sum of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def sums(options: dict[str, Any], parts: int) -> torch.Tensor:
    """The gradient of a batch whose first of ``parts`` has the sum 256, and each other part the sum
    1: bfloat16 cannot represent 257.
    """
    x = torch.full((2 * parts, 4), 0.5)
    x[:2] = 128.0
    compiled = build(Scale(), {"x": x}, precision="bf16", **options)
    compiled(x=x).backward()
    assert compiled.plan.microbatches * compiled.plan.data_degree == parts
    return full(compiled.weight.grad)


def test_microbatches_add_up_in_the_dtype_of_parameters(ranks: Pools) -> None:
    assert ranks(1).run(sums, dict(micro_batch_size=2), 8)[0].tolist() == [263.0] * 4
    for zero in (0, 1):
        for found in ranks(2).run(
            sums, dict(parallel=dict(data=2), zero=zero, micro_batch_size=2), 8
        ):
            assert found.tolist() == [263.0] * 4


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_add_up_in_reduce_dtype(ranks: Pools, zero: int) -> None:
    for reduce_dtype, expected in (
        (None, 257.0),
        ("fp32", 257.0),
        ("fp16", 257.0),
        ("bf16", 256.0),
    ):
        for found in ranks(2).run(
            sums, dict(parallel=dict(data=2), zero=zero, reduce_dtype=reduce_dtype), 2
        ):
            assert found.tolist() == [expected] * 4, reduce_dtype
