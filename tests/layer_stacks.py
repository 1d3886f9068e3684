"""Lists of layers that are alike, or differ in one way each, and the comparison of their graphs."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.capture_graph import capture
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import result_tensors
from autopar.passes.canonical.canonicalise import canonicalise


def full(model: nn.Module, sample: Any) -> CapturedModel:
    """The canonical graph of a trace of all layers."""
    return canonicalise(capture(model, sample))


def repeated(model: nn.Module, sample: Any) -> CapturedModel:
    """The canonical graph of a trace of few layers."""
    return canonicalise(capture(model, sample, repeat_layers=True))


def repeats(model: nn.Module, sample: Any) -> int:
    """The number of layers that are not traced."""
    graph = capture(model, sample, repeat_layers=True).graph
    return sum(str(n.target) == "autopar_layers.repeat.default" for n in graph.nodes)


def described(node: fx.Node) -> tuple[Any, ...]:
    """All that passes read of a node."""
    tensors = [
        (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in result_tensors(node)
    ]
    meta = {k: v for k, v in node.meta.items() if k != "val"}
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), meta, tensors


def assert_same(one: CapturedModel, two: CapturedModel) -> None:
    """The graphs have the same nodes in the same order, and all else is equal."""
    for a, b in zip(one.graph.nodes, two.graph.nodes, strict=True):
        assert described(a) == described(b)
    for field in dataclasses.fields(CapturedModel):
        if field.name not in ("graph", "state", "tensors_read"):
            assert getattr(one, field.name) == getattr(two, field.name)
    assert list(one.state) == list(two.state)
    for name, tensor in one.state.items():
        assert tensor is two.state[name] or torch.equal(tensor, two.state[name])


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
        act: Callable[..., torch.Tensor],
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


def relu(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y.relu()


def indexed_with_extra(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y.relu() if extra is None else y * layer.index


def at_seven(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y.sigmoid() if layer.index == 7 else y.relu()


def windowed(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y if layer.config.window is None else y[:, : layer.config.window].sum(1, keepdim=True)


def dropped(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return nn.functional.dropout(y, 0.1, layer.training)


def scaled(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * layer.config.table[1]["scale"]


def counts(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    layer.config.step += 1
    return y * layer.config.step


def counts_globally(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    COUNTER["calls"] += 1
    return y.relu() if COUNTER["calls"] % 8 < 6 else y.sigmoid()


def counts_in_list(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    layer.config.table[0] += 1.0
    return y * layer.config.table[0]


def keeps(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    layer.kept[:] = [y]
    return y.relu()


def caches(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    if "mask" not in extra:
        extra["mask"] = torch.ones(8)
    return y * extra["mask"]


def reads_number(layer: Layer, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return y.relu() if extra.item() < 6 else y.sigmoid()


def own_constant(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * torch.tensor([2.0] * 8)


def in_place(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    y.relu_()
    y[:, 0] = 3.0
    return y


def writes_operand(layer: Layer, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    extra.add_(1.0)
    return y * extra


def set_step(stack: Stack, index: int) -> None:
    stack.config.step = index


def set_scale(stack: Stack, index: int) -> None:
    stack.config.table[1]["scale"] = float(index)


def read_step(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    return y * layer.config.step


def one_dict(stack: Stack, index: int) -> dict[str, torch.Tensor]:
    if index == 0:
        stack.layers[0].__dict__["cache"] = {}
    return stack.layers[0].__dict__["cache"]  # type: ignore[no-any-return]


def number(stack: Stack, index: int) -> torch.Tensor:
    return torch.tensor(index)


def one_tensor(stack: Stack, index: int) -> torch.Tensor:
    if index == 0:
        stack.__dict__["shared"] = torch.ones(8)
    return stack.__dict__["shared"]  # type: ignore[no-any-return]


LEAK: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()  # nobody can look into it


class Leaking(Stack):
    """The layers leave tensors where only the model's code finds them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        while not LEAK.empty():
            loss = loss + LEAK.get().sum()
        return loss


def leaks(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    LEAK.put(y)
    return y.relu()


def caches_elsewhere(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
    mask = torch.ones(8) * 2.0 if LEAK.empty() else LEAK.get()
    LEAK.put(mask)
    return y * mask


def added(layer: Layer, y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return y + extra


def a_weight(stack: Stack, index: int) -> torch.Tensor:
    return stack.layers[6].linear.weight.sum()  # type: ignore[union-attr,operator,no-any-return]


def all_weights(stack: Stack, index: int) -> torch.Tensor:
    return torch.stack([p.sum() for p in stack.parameters()]).sum()


def a_module(stack: Stack, index: int) -> torch.Tensor:
    return stack.layers[6].linear(torch.ones(8))  # type: ignore[union-attr,operator,no-any-return]


def attributes(stack: Stack, index: int) -> torch.Tensor:
    held = vars(stack.layers[5].linear)
    return held["_parameters"]["weight"].sum()  # type: ignore[no-any-return]


def weight_or_not(stack: Stack, index: int) -> torch.Tensor:
    try:
        return a_weight(stack, index)
    except Exception:  # as code does that tries several things
        return torch.ones(())
