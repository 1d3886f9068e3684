"""``recompute="selective"`` recomputes what torch's own selective checkpoint recomputes under
torchtitan's policy, computes the numbers of one device, and saves what ranks sum.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import equivalence
import peaks
import pytest
import torch
import torch.fx as fx
import zoo
from pool import Pools
from torch import nn
from torch.ops import aten
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autopar
from autopar.errors import BudgetError
from autopar.frontend.traced_model import TracedModel
from autopar.plan import Plan
from autopar.runtime.measure.live_bytes import LiveBytes

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
TENSOR = dict(tensor=dict(size=2, mode="1d"))


class Products(TorchDispatchMode):
    """Notes the weights by which products multiply transposed: those of a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.weights: list[str] = []
        self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_forward = func is aten.mm.default and args[1].stride(0) == 1
        if is_forward and args[1].data_ptr() in self.names:
            self.weights.append(self.names[args[1].data_ptr()])
        self.attentions += func is ATTENTION
        return func(*args, **(kwargs or {}))


def every_second_product() -> Any:
    """The contexts of a checkpoint that saves attention and every second product, counted from the
    first one on.
    """
    counts = Counter[bool]()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1
        else:
            saves = operator is ATTENTION
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(model: Any) -> Any:
    """A Llama of which each layer is a selective checkpoint of torch."""
    for layer in model.model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=every_second_product
        )
    return model


def planned(model: nn.Module, sample: Any, world_size: int = 1, **options: Any) -> Plan:
    return autopar.plan(model, sample, world_size, progress=False, **options)


def recomputed_nodes(model: nn.Module, sample: Any, plan: Plan) -> list[fx.Node]:
    """The nodes whose results a plan recomputes."""
    nodes = TracedModel(model, sample, None).analyse(plan.microbatches)[0].graph.nodes
    return [node for node in nodes if node.name in plan.recomputed]


def test_the_products_of_torchs_selective_checkpoint_are_recomputed() -> None:
    model, sample = zoo.llama(layers=3)
    nodes = recomputed_nodes(model, sample, planned(model, sample, recompute="selective"))
    found = {n.meta["module"] + ".weight" for n in nodes if n.target is aten.linear.default}
    assert {name.rsplit(".", 2)[1] for name in found} == {"k_proj", "o_proj", "up_proj"}
    with Products(model) as again:
        loss = checkpointed(model)(**sample, use_cache=False).loss
        again.weights.clear()
        again.attentions = 0
        loss.backward()
    assert found == set(again.weights)
    assert again.attentions == 0


def test_a_plan_saves_what_torchs_selective_checkpoint_saves() -> None:
    """torch saves besides each layer's last product, which no backward reads, and the positions."""
    batch = 16
    model, sample = peaks.made("llama", batch)
    plan = planned(model, sample, recompute="selective")
    with LiveBytes() as live:
        before = live.alive()
        loss = checkpointed(model)(**sample, use_cache=False).loss
        held = live.alive() - before
    assert loss.requires_grad
    tokens = batch * peaks.SEQUENCE
    last_products = peaks.LAYERS * tokens * peaks.WIDTH * loss.itemsize
    assert abs(held - last_products - plan.stages[0].kept) <= 1024


def test_everything_else_is_recomputed_as_under_full() -> None:
    model, sample = zoo.llama(layers=3)
    selective, full = (planned(model, sample, recompute=option) for option in ("selective", "full"))
    assert set(selective.recomputed) < set(full.recomputed)
    nodes = recomputed_nodes(model, sample, full)
    saved = [n for n in nodes if n.name not in selective.recomputed]
    kinds = {(n.target, n.meta["module"].rpartition(".")[2]) for n in saved}
    products = {(aten.linear.default, name) for name in ("q_proj", "v_proj", "gate_proj")}
    assert kinds == products | {(aten.scaled_dot_product_attention.default, "self_attn")}
    assert len(saved) == 3 * len(kinds)


def test_the_sums_of_products_are_saved() -> None:
    """A product that ranks sum is not computed again, nor is its sum."""
    model, sample = zoo.llama()
    found = {}
    for option in ("selective", "full"):
        plan = planned(model, sample, 2, parallel=TENSOR, recompute=option)
        nodes = recomputed_nodes(model, sample, plan)
        found[option] = {
            name: any(n.meta["module"].endswith(name) for n in nodes)
            for name in ("k_proj", "o_proj", "up_proj", "down_proj")
        }
        sums = [name for name in plan.recomputed if name.startswith("linear") and " -> " in name]
        assert bool(sums) == (option == "full")
    assert list(found["selective"].values()) == [True, False, True, False]
    # The result of a block's last product is read by an addition alone.
    assert list(found["full"].values()) == [True, True, True, False]


class Layer(nn.Module):
    """Products by a matrix, one of them without a parameter's transposition, and one of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second = nn.Parameter(torch.randn(8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        h = (h @ self.second).tanh()
        scores = (h @ h.transpose(-1, -2)).tanh()
        return x + self.third(scores @ h).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_products_of_batches_of_matrices_are_not_counted() -> None:
    model, sample = Layers(), {"x": torch.randn(4, 6, 8)}
    plan = planned(model, sample, recompute="selective")
    nodes = recomputed_nodes(model, sample, plan)
    targets = Counter(n.target for n in nodes)
    by_matrix = [n for n in nodes if n.target in (aten.linear.default, aten.matmul.default)]
    # In each block the product with "second", and the two products of batches.
    assert targets[aten.linear.default] + targets[aten.matmul.default] == 6
    assert all(not n.meta["module"].endswith(("first", "third")) for n in by_matrix)


WAYS = {
    1: {"one": {}, "microbatches": dict(micro_batch_size=2)},
    2: {
        "data": dict(parallel=dict(data=2), zero=3),
        "tensor": dict(parallel=TENSOR),
        "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=2, schedule="1f1b"),
    },
}


@pytest.mark.parametrize("world_size", WAYS)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_it_computes_the_numbers_of_one_device(ranks: Pools, name: str, world_size: int) -> None:
    ways = {label: dict(recompute="selective") | way for label, way in WAYS[world_size].items()}
    for found in ranks(world_size).run(equivalence.check, name, torch.float64, ways, timeout=150):
        assert len(found) == len(ways)
        for label, outcome in found.items():
            assert outcome.plan.recomputed, label
            assert outcome.worst[0] < 1e-9, (label, outcome.worst)


@pytest.mark.slow
def test_where_too_much_is_saved_the_error_names_auto() -> None:
    whole_batch: dict[str, Any] = dict(micro_batch_size=16)
    model, sample = peaks.made("llama", 16)
    whole = planned(model, sample, recompute="selective", **whole_batch)
    budget = 0.85 * max(whole.peak_memory)
    with pytest.raises(BudgetError, match=r'recompute="auto", about half of the activations'):
        planned(model, sample, recompute="selective", **whole_batch, memory_budget=budget)
    auto = planned(model, sample, **whole_batch, memory_budget=budget)
    assert max(auto.peak_memory) <= budget
    full = planned(model, sample, recompute="full", **whole_batch)
    assert full.memory[0]["activations"] < whole.memory[0]["activations"] / 2
