"""Fused weights, such as a query, key and value in one weight, or a gate and up: each part is cut,
so that no collective is needed to take the parts apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from equivalence import TOLERANCE, check
from pool import Pools

import autopar
from autopar.capture.capture_graph import capture
from autopar.cost_model import Cluster
from autopar.ir.layout import is_legal, local_shape, parse_type, strided
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.rules.analysis import Analysis
from autopar.search.space.choices.fused_weights import fused_dims

# The models here are so small that on real links all bytes of a layer take as long as one message.
# Without latency, bytes count as they do in large models. And with several microbatches, to take
# products apart costs more than to move their weights once a step.
A100 = Cluster.load("a100-sxm")
LINKS = tuple(replace(level, latency=0.0, startup=0.0) for level in A100.links)
CLUSTER = replace(A100, links=LINKS)
TENSOR = {size: dict(tensor=dict(size=size, mode="1d")) for size in (2, 4)}


def test_types() -> None:
    t = parse_type("S1/3")
    assert t is strided(1, 3)
    assert repr(t) == "S1/3"
    assert [t.pieces_of(rank, 2) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert local_shape((5, 24), (t, t), (2, 2)) == (5, 6)
    assert is_legal((5, 24), (t, t), (2, 4))
    assert not is_legal((5, 24), (t, t), (4, 4))
    for text in ("S1/1", "S1/0", "Z1/2", "S/2"):
        with pytest.raises(ValueError, match="is no type"):
            parse_type(text)


def _taken_apart(name: str) -> dict[str, dict[int, int]]:
    captured = capture(*getattr(zoo, name)(batch=8, dropout=0.0))
    canonicalise(captured)
    analysis = Analysis(captured)
    return {analysis.state[node].target: dims for node, dims in fused_dims(analysis)[1].items()}


def test_weights_whose_parts_all_readers_take_apart_are_found() -> None:
    block = {"attn.c_attn.weight": {1: 3}, "attn.c_attn.bias": {0: 3}}
    assert _taken_apart("gpt2") == {
        f"transformer.h.{i}.{name}": dims for i in range(2) for name, dims in block.items()
    }
    block = {"qkv.weight": {0: 3}, "qkv.bias": {0: 3}, "gate_up.weight": {0: 2}}
    assert _taken_apart("fused") == {
        f"body.{i}.{name}": dims for i in range(2) for name, dims in block.items()
    }


@pytest.mark.parametrize("name", ["llama", "vit", "mlp"])
def test_other_weights_are_not_found(name: str) -> None:
    """A rotary embedding takes heads apart into halves, which are not parts of a whole weight."""
    assert not _taken_apart(name)


@pytest.mark.parametrize("name", ["gpt2", "fused"])
def test_no_collective_takes_a_product_apart(name: str) -> None:
    model, sample = getattr(zoo, name)(batch=8, dropout=0.0)
    plan = autopar.plan(
        model,
        sample,
        4,
        cluster=CLUSTER,
        parallel=TENSOR[4],
        zero=0,
        micro_batch_size=2,
        progress=False,
    )
    weights = {
        n: p
        for n, p in plan.parameters.items()
        if n.endswith(("c_attn.weight", "qkv.weight", "gate_up.weight"))
    }
    assert len(weights) == (2 if name == "gpt2" else 4)
    for parameter in weights.values():
        assert parameter.stored[0].is_shard
        assert parameter.stored[0].pieces == 1
        assert parameter.used[0] is strided(parameter.stored[0].dim, parameter.used[0].pieces)
        assert parameter.used[0].pieces > 1
    products = {name for name, n in plan.nodes.items() if n.out and n.out[0].pieces > 1}
    parts = {
        name
        for name, n in plan.nodes.items()
        if n.ins and n.ins[0][0].pieces > 1 and n.out[0].is_shard and n.out[0].pieces == 1
    }
    assert len(parts) >= 4
    converted = {
        tensor
        for tensor, steps in plan.conversions.items()
        if any("S" in s[1] and "S" in s[2] for each in steps.values() for s in each)
    }
    assert not converted & (products | parts)  # from one shard layout to another


CONFIGS: dict[str, dict[str, Any]] = {
    "1d": dict(parallel=TENSOR[4], micro_batch_size=4),
    "zero": dict(parallel=TENSOR[2], zero=1, micro_batch_size=1),
    "microbatches": dict(parallel=TENSOR[4], micro_batch_size=2),
    "2d": dict(parallel=dict(tensor=dict(size=4, mode="2d"))),
}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", ["gpt2", "fused"])
def test_plans_with_cut_parts_compute_what_one_device_computes(ranks: Pools, name: str) -> None:
    configs = {way: dict(cluster=CLUSTER, **config) for way, config in CONFIGS.items()}
    found = ranks(4).run(check, name, torch.float64, configs, timeout=240)
    for way in configs:
        assert max(each[way].worst for each in found)[0] < TOLERANCE[torch.float64], way
    for way in ("1d", "zero", "microbatches"):
        used = [t for p in found[0][way].plan.parameters.values() for t in p.used]
        assert any(t.pieces > 1 for t in used), way


def test_a_model_trains_and_its_checkpoint_is_the_whole_weight(ranks: Pools) -> None:
    found = ranks(2).run(_trained, timeout=120)
    for names, worst in found:
        assert names
        assert worst < 1e-6


def _trained() -> tuple[list[str], float]:
    """Train three steps on all ranks and on one device: the names of weights whose parts are cut,
    and the largest difference between the weights at the end.
    """
    model, sample = zoo.fused(batch=8, dropout=0.0)
    alone, batch = zoo.fused(batch=8, dropout=0.0)
    alone.load_state_dict(model.state_dict())
    compiled = autopar.compile(
        model, sample, 2, cluster=CLUSTER, parallel=TENSOR[2], progress=False
    )
    for net, data in ((compiled, sample), (alone, batch)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            net(**data)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = alone.state_dict()
    cut_inside_parts = [
        name for name, p in compiled.plan.parameters.items() if any(t.pieces > 1 for t in p.used)
    ]
    differences = [
        (value.full_tensor() - expected[name]).abs().max().item()
        for name, value in compiled.state_dict().items()
    ]
    assert len(differences) == len(expected)
    assert all(map(math.isfinite, differences))
    return cut_inside_parts, max(differences)
