"""Runs on each rank: a compiled model's loss, outputs and gradients against the same model on one device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch.overrides import TorchFunctionMode

import autopar


class Double(TorchFunctionMode):
    """Keeps float64 where a model casts to float32: transformers' normalisations, rotary embeddings and losses do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, of a DTensor or a plain one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def loss_of(output: Any) -> torch.Tensor:
    """The loss among what a zoo model returns."""
    return output if isinstance(output, torch.Tensor) else output["loss"]


def error(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """The largest difference, relative to the largest expected value (or ``scale``, where that is more)."""
    return float((found - expected).abs().max() / max(float(expected.abs().max()), scale, 1e-30))


def compare(model: torch.nn.Module, sample: dict[str, Any], compiled: torch.nn.Module, microbatches: int = 1) -> dict[str, float]:
    """Relative errors of the loss, of each output and each gradient; ``model`` has not been run yet."""
    batch = next(v for v in sample.values() if isinstance(v, torch.Tensor))
    expected = model(**sample)
    loss_of(expected).backward()
    found = compiled(**sample)
    loss_of(found).backward()
    errors = {"loss": error(loss_of(found).detach(), loss_of(expected).detach())}
    if not isinstance(expected, torch.Tensor) and "logits" in expected:
        errors["logits"] = error(full(found["logits"]).detach(), expected["logits"].detach())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    scale = 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    mine = dict(compiled.named_parameters())
    for name, gradient in gradients.items():
        assert (gradient is None) == (mine[name].grad is None), f"{name}: one of the gradients is missing"
        if gradient is not None:
            errors[name] = error(full(mine[name].grad), gradient, scale)
    for name, buffer in model.named_buffers():
        if name in dict(compiled.named_buffers()) and buffer.is_floating_point():
            errors[name] = error(full(compiled.get_buffer(name)), buffer)
    assert batch.shape[0] % microbatches == 0
    return errors


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error, and of what."""
    return max((e, name) for name, e in errors.items())


def check(name: str, dtype: torch.dtype, configurations: dict[str, dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """The worst error of one zoo model under each configuration of compile's options."""
    found = {}
    with Double() if dtype == torch.float64 else contextlib.nullcontext():
        for label, options in configurations.items():
            model, sample = getattr(zoo, name)(dtype=dtype)
            compiled = autopar.compile(copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options)
            found[label] = worst(compare(model, sample, compiled))
    return found
