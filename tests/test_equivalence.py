"""Every model family, planned in many ways, has the loss, outputs, gradients and statistics of one
device.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
import zoo
from equivalence import TOLERANCE, Outcome, check
from pool import Pools

import autopar
from autopar.cost_model import Level, Software

# Slow at arithmetic and quick to start and send: even tiny models are worth splitting.
_CPU = autopar.Cluster.load("cpu")
_IDEAL = {"matmul": ((1.0, 1.0),), "elementwise": ((1.0, 1.0),)}
_SLOW = dataclasses.replace(
    _CPU.device,
    peak=dict.fromkeys(_CPU.device.peak, 1e9),
    memory_bandwidth=1e9,
    efficiency=_IDEAL,
)
_AT_ONCE = Software("at once", launch=0.0)
FAST = autopar.Cluster(
    "fast", _SLOW, _AT_ONCE, (Level("links", None, latency=1e-7, bandwidth=2e10),)
)
FREE = autopar.Cluster(
    "free", _SLOW, _AT_ONCE, (Level("links", None, latency=0.0, bandwidth=1e18),)
)

# The end of the residual stream, [batch, sequence, features].
STREAMS = {
    "gpt2": "transformer.ln_f",
    "llama": "model.norm",
    "qwen3": "model.norm",
    "bert": "bert.encoder.layer.1.output.LayerNorm",
    "t5": "decoder.final_layer_norm",
    "mixer": "body.1.norm2",
}


def _tensor(size: int) -> dict[str, Any]:
    return dict(size=size, mode="1d")


def configurations(name: str, world_size: int) -> dict[str, dict[str, Any]]:
    """compile's options by what they ask for."""
    found: dict[str, dict[str, Any]] = {
        "its own choice, slow links": dict(cluster="cpu"),
        "its own choice, fast links": dict(cluster=FAST),
        "data": dict(parallel=dict(data=world_size), zero=0),
        "tensor": dict(parallel=dict(tensor=_tensor(world_size))),
        "zero": dict(parallel=dict(data=world_size), zero=2),
    }
    if name in STREAMS:
        found["sequence"] = dict(
            parallel=dict(tensor=_tensor(world_size)), constraints={STREAMS[name]: "S1"}
        )
    if world_size == 4:
        both = dict(parallel=dict(data=2, tensor=_tensor(2)))
        found["data x tensor"] = both
        found["free mesh, free links"] = dict(mesh=(2, 2), cluster=FREE)
        found["microbatches of 2"] = both | dict(micro_batch_size=2)
        found["microbatches of 1"] = dict(parallel=dict(data=4), micro_batch_size=1)
    else:
        found["microbatches of 2"] = dict(parallel=dict(data=2), micro_batch_size=2)
        found["microbatches of 1"] = dict(parallel=dict(data=2), micro_batch_size=1, zero=1)
    return found


def check_plans(plans: dict[str, autopar.Plan], world_size: int) -> None:
    """The configurations are what they are called."""

    def cuts(plan: autopar.Plan) -> bool:
        return any(t.is_shard for node in plan.nodes.values() for t in node.out)

    def gathers(plan: autopar.Plan) -> bool:
        return any(
            s.is_shard and not u.is_shard
            for p in plan.parameters.values()
            for s, u in zip(p.stored, p.used, strict=True)
        )

    assert cuts(plans["its own choice, fast links"])
    assert plans["data"].data_degree == plans["zero"].data_degree == world_size
    assert gathers(plans["zero"])
    assert not gathers(plans["data"])
    assert any(t.is_shard for p in plans["tensor"].parameters.values() for t in p.used)
    assert plans["tensor"].data_degree == 1
    if "sequence" in plans:
        assert "sequence-sharded" in plans["sequence"].report()
    if world_size == 4:
        assert plans["data x tensor"].mesh == {"data": 2, "tensor": 2}
        free = plans["free mesh, free links"]
        assert all(any(node.out[axis].is_shard for node in free.nodes.values()) for axis in (0, 1))
    per_rank = 8 // (2 if world_size == 2 else 4)
    assert plans["microbatches of 1"].microbatches == per_rank
    assert plans["microbatches of 2"].microbatches == 2


SHORT = [
    ("mlp", 4),
    *((name, 2) for name in ("gpt2", "cnn", "mlp")),
]  # and not slow

LONG = [
    ("t5", 2),
    *((name, 4) for name in ("t5", "qwen3", "bert", "cnn", "llama", "vit", "mixer")),
]  # and exhaustive, as float32 is


def _marks(dtype: torch.dtype, name: str, ranks: int) -> list[pytest.MarkDecorator]:
    if dtype is torch.float32 or (name, ranks) in LONG:
        return [pytest.mark.slow if (name, ranks) == ("gpt2", 2) else pytest.mark.exhaustive]
    return [] if (name, ranks) in SHORT else [pytest.mark.slow]


CASES = [
    pytest.param(
        dtype, name, ranks, id=f"{str(dtype)[6:]}-{name}-{ranks}", marks=_marks(dtype, name, ranks)
    )
    for dtype, name, ranks in product((torch.float64, torch.float32), zoo.MODELS, (2, 4))
]


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize(("dtype", "name", "world_size"), CASES)
def test_equals_one_device(ranks: Pools, dtype: torch.dtype, name: str, world_size: int) -> None:
    everywhere: list[dict[str, Outcome]] = ranks(world_size).run(
        check, name, dtype, configurations(name, world_size), timeout=240
    )
    check_plans({label: outcome.plan for label, outcome in everywhere[0].items()}, world_size)
    errors = {label: max(found[label].worst for found in everywhere) for label in everywhere[0]}
    assert all(e < TOLERANCE[dtype] for e, _ in errors.values()), errors
