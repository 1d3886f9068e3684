"""Models whose layers find out how often they were called, through state of many kinds."""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import layer_counter
import torch
from layer_counter import count as count_in_file
from layer_stacks import Layer, Stack

Counter = tuple[Callable[[], int], Callable[[], None]]
"""A function that counts its calls, and one that sets the count to 0."""


class _Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def of_object(state: Any) -> Counter:
    def count() -> int:
        state.calls += 1
        return int(state.calls)

    def reset() -> None:
        state.calls = 0

    return count, reset


def of_context() -> Counter:
    calls = ContextVar("calls", default=0)

    def count() -> int:
        calls.set(calls.get() + 1)
        return calls.get()

    return count, lambda: calls.set(0) and None


def of_closure() -> Counter:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    def reset() -> None:
        nonlocal calls
        calls = 0

    return count, reset


def of_containers() -> Counter:
    held = ({"calls": [0]},)

    def count() -> int:
        held[0]["calls"][0] += 1
        return held[0]["calls"][0]

    def reset() -> None:
        held[0]["calls"][0] = 0

    return count, reset


def of_iterator() -> Counter:
    held = [itertools.count(1)]

    def reset() -> None:
        held[0] = itertools.count(1)

    return lambda: next(held[0]), reset


def of_function() -> Counter:
    def count() -> int:
        count.calls += 1  # type: ignore[attr-defined]
        return int(count.calls)  # type: ignore[attr-defined]

    def reset() -> None:
        count.calls = 0  # type: ignore[attr-defined]

    reset()
    return count, reset


def of_file() -> Counter:
    return lambda: count_in_file(), _reset_file


def of_module() -> Counter:
    def count() -> int:
        layer_counter.calls += 1
        return layer_counter.calls

    return count, _reset_file


def _reset_file() -> None:
    layer_counter.calls = 0


COUNTERS: dict[str, Callable[[], Counter]] = {
    "none": lambda: (lambda: 0, lambda: None),
    "namespace": lambda: of_object(SimpleNamespace()),
    "slots": lambda: of_object(_Slots()),
    "class": lambda: of_object(type("Calls", (), {"__module__": __name__})),
    "thread": lambda: of_object(threading.local()),
    "context": of_context,
    "closure": of_closure,
    "containers": of_containers,
    "iterator": of_iterator,
    "function": of_function,
    "file": of_file,
    "module": of_module,
    "builtins": lambda: of_object(builtins),
}


class Counting(Stack):
    """The layers apply a sigmoid from the sixth on. Each forward starts with a count of 0."""

    def __init__(self, counter: Counter) -> None:
        count, self.reset = counter

        def act(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
            return y.relu() if count() < 6 else y.sigmoid()

        super().__init__(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reset()
        return super().forward(x)


def told_by_the_model() -> Stack:
    """The model tells its layers, by a value that it sets between them, that they are late."""
    context = SimpleNamespace(late=False)

    def between(stack: Stack, index: int) -> None:
        context.late = index >= 6

    def act(layer: Layer, y: torch.Tensor, extra: Any) -> torch.Tensor:
        return y.sigmoid() if context.late else y.relu()

    return Stack(act, between)
