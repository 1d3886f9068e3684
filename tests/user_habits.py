"""The loops in which users train: what a step of each computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from equivalence import Step, full
from program_blocks import Batch
from torch import nn


@dataclass(frozen=True)
class Habits:
    """What a user does in the loop beside the usual."""

    # a second loss, of an output; where the batch is cut, its gradient cannot arrive, and the
    # backward raises
    second: bool
    unfreeze: bool  # all parameters are trained from the second step on
    inputs: bool  # the gradient of the input is wanted
    accumulate: bool  # gradients are not cleared after the first step
    scale: float  # of the loss before its backward

    @staticmethod
    def of(seed: int, whole: bool) -> Habits:
        """``whole``: the batch goes through the model in one piece."""
        numbers = random.Random(f"habits {seed}")
        second, unfreeze, inputs, accumulate = (
            numbers.random() < share for share in (0.06, 0.3, 0.06, 0.1)
        )
        return Habits(
            second and whole, unfreeze, inputs, accumulate, 0.5 if numbers.random() < 0.1 else 1.0
        )


def trained(model: nn.Module, batches: Sequence[Batch], habits: Habits) -> list[Step]:
    """A step of SGD on each batch: what each computed."""
    trainable = list(model.parameters())
    optimizer = torch.optim.SGD(trainable, lr=0.05) if trainable else None  # a stage may have none
    found = []
    for batch in batches:
        found.append(_step(model, batch, habits))
        if optimizer is not None:
            optimizer.step()
        if not habits.accumulate:
            model.zero_grad()
        if habits.unfreeze:
            model.requires_grad_(True)
    return found


def _step(model: nn.Module, batch: Batch, habits: Habits) -> Step:
    batch = dict(batch)
    if habits.inputs and batch["x"].is_floating_point():
        batch["x"] = batch["x"].clone().requires_grad_()
    output = model(**batch)
    outputs = {"loss": output} if isinstance(output, torch.Tensor) else output
    total = outputs["loss"] * habits.scale
    if habits.second and "hidden" in outputs:
        total = total + full(outputs["hidden"]).square().mean()
    total.backward()
    tensors = {
        name: full(value).detach()
        for name, value in outputs.items()
        if isinstance(value, torch.Tensor)
    }
    named = {
        name: value.long() if value.dtype == torch.bool else value
        for name, value in tensors.items()
    }
    gradients = {
        n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()
    }
    if batch["x"].requires_grad:
        gradients["the input x"] = batch["x"].grad
    return Step(named, gradients, {n: full(b).clone() for n, b in model.named_buffers()})
