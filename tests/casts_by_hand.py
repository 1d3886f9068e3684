"""A model in mixed precision by casts of hand, beside which tests set the plan's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from equivalence import Step, full, shared, step
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.func import functional_call

import autopar

TENSOR = dict(tensor=dict(size=2, mode="1d"))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PAIR: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2), zero=0),
    "tensor": dict(parallel=TENSOR),
    "zero 1": dict(parallel=dict(data=2), zero=1),
    "zero 3": dict(parallel=dict(data=2), zero=3),
    "microbatches": dict(parallel=dict(data=2), zero=0, micro_batch_size=2),
    "zero 1, microbatches": dict(parallel=dict(data=2), zero=1, micro_batch_size=2),
    "recomputed": dict(parallel=dict(data=2), zero=3, recompute="full"),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=2),
}
SHORT = {
    label: options
    for label, options in PAIR.items()
    if label not in ("zero 1, microbatches", "recomputed")
}
FOUR: dict[str, dict[str, Any]] = {
    "data x tensor": dict(parallel=dict(data=2, **TENSOR)),
    "zero 3": dict(parallel=dict(data=4), zero=3),
    "pipeline x data": dict(
        parallel=dict(data=2, pipeline=2), zero=1, micro_batch_size=2, schedule="1f1b"
    ),
    "zero bubble x tensor": dict(
        parallel=dict(pipeline=2, **TENSOR), micro_batch_size=4, schedule="zero-bubble"
    ),
}


class ByHand(nn.Module):
    """``model`` with parameters and inputs cast, except those of batch norm. The targets "y" are in
    float32, and so is the loss.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        norms = (
            name
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        )
        self.kept = tuple(f"{name}." for name in norms)

    def forward(self, **sample: torch.Tensor) -> Any:
        cast = {
            n: p if self.kept and n.startswith(self.kept) else p.to(self.dtype)
            for n, p in self.model.named_parameters()
        }
        given = {
            k: v.to(torch.float32 if k == "y" else self.dtype) if v.is_floating_point() else v
            for k, v in sample.items()
        }
        return functional_call(self.model, cast, (), given)


def by_hand(model: nn.Module, sample: Mapping[str, Any], dtype: torch.dtype) -> Step:
    """One step of the reference."""
    alone = ByHand(copy.deepcopy(model), dtype)
    found = step(alone, sample)
    gradients = {n.removeprefix("model."): g for n, g in found.gradients.items()}
    return Step(
        found.outputs, gradients, {n.removeprefix("model."): b for n, b in found.buffers.items()}
    )


def build(model: nn.Module, sample: Mapping[str, Any], **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds process groups of earlier tests
    return autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )


def planned(
    model: nn.Module, sample: Any, configurations: dict[str, dict[str, Any]], precision: str
) -> dict[str, autopar.Plan]:
    given = dict(progress=False, precision=precision)
    return shared(
        {
            label: partial(autopar.plan, model, sample, dist.get_world_size(), **given, **o)
            for label, o in configurations.items()
        }
    )


def distance(found: Step, expected: Step) -> float:
    """The distance of all gradients together, relative to their norm."""
    pairs = [
        (g.double(), full(found.gradients[n]).double())
        for n, g in expected.gradients.items()
        if g is not None
    ]  # type: ignore[arg-type]
    square = sum(float((a - b).square().sum()) for a, b in pairs)
    return (square / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5
