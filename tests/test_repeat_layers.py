"""Layers that are alike are traced twice and repeated: the graph is the graph of a full trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from torch import fx, nn

import autopar
from autopar.capture.capture_graph import capture
from autopar.frontend import traced_model
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import result_tensors
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.passes.canonical.repeat_layers import NotRepeatedError

REPEATING = [*zoo.MODELS, "mixtral", "fused"]
REPEATING.remove("mlp")  # its list holds no layers with modules inside


def full(model: nn.Module, sample: Any) -> CapturedModel:
    return canonicalise(capture(model, sample))


def repeats(model: nn.Module, sample: Any) -> int:
    """The number of layers that are not traced."""
    graph = capture(model, sample, repeat_layers=True).graph
    return sum(str(n.target) == "autopar_layers.repeat.default" for n in graph.nodes)


def described(node: fx.Node) -> tuple[Any, ...]:
    tensors = [
        (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in result_tensors(node)
    ]
    meta = {k: v for k, v in node.meta.items() if k != "val"}
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), meta, tensors


def assert_same(one: CapturedModel, two: CapturedModel) -> None:
    for a, b in zip(one.graph.nodes, two.graph.nodes, strict=True):
        assert described(a) == described(b)
    assert one.fingerprint == two.fingerprint
    fields = ("inputs", "in_spec", "out_spec", "loss", "updates", "aliases", "notes")
    for name in fields:
        assert getattr(one, name) == getattr(two, name)
    assert list(one.state) == list(two.state)
    for name, tensor in one.state.items():
        assert tensor is two.state[name] or torch.equal(tensor, two.state[name])


@pytest.mark.parametrize("name", [*zoo.MODELS, "mixtral", "fused", "unet"])
def test_graph_of_a_full_trace(name: str) -> None:
    make = getattr(zoo, name)
    model, sample = make(layers=4, dropout=0.1)
    assert_same(TracedModel(model, sample, None).whole, full(model, sample))
    assert (repeats(model, sample) > 0) == (name in REPEATING)


@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_memory_and_plan_of_a_full_trace(name: str) -> None:
    model, sample = zoo.MODELS[name](layers=4)
    options: dict[str, Any] = dict(
        parallel=dict(data=2, pipeline=2),
        micro_batch_size=2,
        schedule="1f1b",
        recompute="none",
        zero=1,
        cluster="h100-sxm",
    )

    def plan() -> Any:
        made = autopar.plan(model, sample, 4, progress=False, **options)
        return dataclasses.replace(made, timings={})

    repeated = plan()
    with mock.patch.object(traced_model, "capture", lambda *args, repeat_layers: capture(*args)):
        traced = plan()
    assert repeated == traced
    assert repeated.peak_memory == traced.peak_memory


class Layer(nn.Module):
    """A layer of a list. ``act`` is what the tests vary."""

    def __init__(self, index: int, act: Callable[..., torch.Tensor], config: Any) -> None:
        super().__init__()
        self.index, self.act, self.config = index, act, config
        self.linear = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return x + self.act(self, self.linear(x), extra)


class Stack(nn.Module):
    """A list of layers. ``between`` runs before each layer, and gives its second argument."""

    def __init__(
        self,
        act: Callable[..., torch.Tensor] = lambda layer, y, extra: y.relu(),
        between: Callable[..., Any] = lambda stack, index: None,
        count: int = 8,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(step=0, table=[1.0, {"scale": 2.0}])
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(i, act, self.config) for i in range(count))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, self.between(self, index))
        kept = [t.sum() for layer in self.layers for t in layer.kept]
        return torch.stack([x.sum(), *kept]).sum()


SAMPLE = (torch.randn(4, 8),)
COUNTER = {"calls": 0}


def test_equal_layers_are_repeated() -> None:
    model = Stack()
    assert repeats(model, SAMPLE) == 6
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))


def test_an_attribute_that_no_forward_reads_makes_no_difference() -> None:
    model = Stack(lambda layer, y, extra: y.relu() if extra is None else y * layer.index)
    assert repeats(model, SAMPLE) == 6


def _at_seven(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y.sigmoid() if layer.index == 7 else y.relu()


def _scaled(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * layer.config.table[1]["scale"]


def _counts(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    layer.config.step += 1
    return y * layer.config.step


def _counts_globally(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    COUNTER["calls"] += 1
    return y.relu() if COUNTER["calls"] % 8 < 6 else y.sigmoid()


def _keeps(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    layer.kept[:] = [y]
    return y.relu()


def _caches(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    if "mask" not in extra:
        extra["mask"] = torch.ones(8)
    return y * extra["mask"]


def _reads_number(layer: Layer, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return y.relu() if extra.item() < 6 else y.sigmoid()


def _own_constant(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * torch.tensor([2.0] * 8)


def _in_place(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    y.relu_()
    y[:, 0] = 3.0
    return y


def _writes_operand(layer: Layer, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    extra.add_(1.0)
    return y * extra


def _set_step(stack: Stack, index: int) -> None:
    stack.config.step = index


def _set_scale(stack: Stack, index: int) -> None:
    stack.config.table[1]["scale"] = float(index)


def _read_step(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * layer.config.step


def _one_dict(stack: Stack, index: int) -> dict[str, torch.Tensor]:
    if index == 0:
        stack.layers[0].__dict__["cache"] = {}
    return stack.layers[0].__dict__["cache"]  # type: ignore[no-any-return]


def _number(stack: Stack, index: int) -> torch.Tensor:
    return torch.tensor(index)


def _one_tensor(stack: Stack, index: int) -> torch.Tensor:
    if index == 0:
        stack.__dict__["shared"] = torch.ones(8)
    return stack.__dict__["shared"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "between"),
    [
        (_at_seven, None),
        (_scaled, _set_scale),
        (_counts, None),
        (_counts_globally, None),
        (_keeps, None),
        (_caches, _one_dict),
        (_reads_number, _number),
        (_own_constant, None),
        (_in_place, None),
        (_writes_operand, _one_tensor),
        (_read_step, _set_step),
    ],
)
def test_layers_that_differ_are_traced(act: Any, between: Any) -> None:
    model = Stack(act, between) if between else Stack(act)
    COUNTER["calls"] = 0
    model.config.step = 0
    repeated = TracedModel(model, SAMPLE, None).whole
    COUNTER["calls"] = 0
    model.config.step = 0
    assert_same(repeated, full(model, SAMPLE))


def test_a_layer_that_writes_in_place_is_repeated() -> None:
    for act in (_in_place, _own_constant):
        model = Stack(act)
        assert repeats(model, SAMPLE) == 6
        canonicalise(capture(model, SAMPLE, repeat_layers=True))


def test_two_kinds_of_layers_are_repeated() -> None:
    model = Stack(lambda layer, y, extra: y.relu() if layer.config.even else y.sigmoid())
    for layer in model.layers:
        layer.config = SimpleNamespace(even=layer.index % 2 == 0)
    assert repeats(model, SAMPLE) == 4
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))


def test_a_layer_with_a_hook_is_traced() -> None:
    model = Stack()
    model.layers[5].linear.register_forward_hook(lambda module, args, made: made * 2)
    with pytest.warns(UserWarning, match="forward hook"):
        repeated = TracedModel(model, SAMPLE, None).whole
    assert repeats(model, SAMPLE) == 5
    assert_same(repeated, full(model, SAMPLE))


def test_frozen_and_tied_layers() -> None:
    model = Stack()
    model.layers[3].linear.weight.requires_grad_(False)
    model.layers[5].linear.weight = model.layers[4].linear.weight
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))


class _LeakingStack(Stack):
    """The layers leave tensors in a list that no attribute leads to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        LEAK.set(made)
        loss = super().forward(x)
        return loss + torch.stack([t.sum() for t in made]).sum()


class _Leak:
    __slots__ = ("made",)

    def set(self, made: list[torch.Tensor]) -> None:
        self.made = made


LEAK = _Leak()


def _leaks(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    LEAK.made.append(y)
    return y.relu()


def test_a_tensor_that_leaves_a_layer_on_the_side_is_noticed() -> None:
    model = _LeakingStack(_leaks)
    with pytest.raises(NotRepeatedError, match="read outside"):
        canonicalise(capture(model, SAMPLE, repeat_layers=True))
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))


def test_depth_costs_little() -> None:
    """Of a deep stack, only two layers' operators are traced."""
    graph = capture(Stack(count=40), SAMPLE, repeat_layers=True).graph
    relus = [n for n in graph.nodes if n.target is torch.ops.aten.relu.default]
    assert len(relus) == 2
