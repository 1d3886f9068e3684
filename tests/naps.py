"""Naps of known length in the forward and the backward of a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zoo
from equivalence import loss_of

import autopar
from autopar import Comparison

SLACK = 0.1  # seconds that tiny models and a busy machine add to a nap
STEPS = 7


class Nap(torch.autograd.Function):
    """The same tensor after some seconds; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None, None


def nap(x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    return Nap.apply(x, forward, backward)


def insert_nap(program: torch.fx.GraphModule, forward: float, backward: float) -> None:
    """Inserts a nap after the first product of a program, whose result needs a gradient."""
    names = ("linear", "addmm", "mm", "matmul")
    node = next(
        n
        for n in program.graph.nodes
        if n.op == "call_function" and any(name in str(n.target) for name in names)
    )
    with program.graph.inserting_after(node):
        later = program.graph.call_function(nap, (node, forward, backward))
    node.replace_all_uses_with(later, delete_user_cb=lambda user: user is not later)
    program.recompile()


def train(
    model: torch.nn.Module,
    batches: Callable[[int], dict[str, Any]],
    steps: int = STEPS,
    between: float = 0.0,
) -> None:
    optimizer = Slow(model.parameters(), between)
    for number in range(steps):
        loss_of(model(**batches(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(between)


class Slow(torch.optim.SGD):
    """An optimizer whose step sleeps half as long as the loop sleeps between steps."""

    def __init__(self, parameters: Any, between: float) -> None:
        super().__init__(parameters, lr=0.01)
        self.between = between

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.between / 2)
        return super().step(closure)


def about(measured: float | None, slept: float) -> None:
    assert measured is not None
    assert slept <= measured <= slept + SLACK, (slept, measured)


def seconds_of(found: Comparison) -> dict[tuple[str, str], float | None]:
    return {(row.where, row.what): row.measured for row in found.rows}


def compiled_gpt2(**options: Any) -> tuple[autopar.Compiled, dict[str, Any]]:
    model, sample = zoo.gpt2()
    return autopar.compile(model, sample, dist.get_world_size(), progress=False, **options), sample
