"""Calls a model with a sample of its input, with the user's loss behind the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ir.captured import LossFunction


def traced_call(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module to trace for a sample, with its positional and keyword arguments.

    The module is the model, or the model with the user's loss behind it.
    """
    args, kwargs = sample_arguments(sample)
    extra = cache_off(model, args, kwargs)
    if loss_fn is not None:
        return _WithLoss(model, loss_fn, type(sample), extra), args, kwargs
    return model, args, {**kwargs, **extra}


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a sample stands for.

    Raises:
        CaptureError: the sample is no tensor, tuple or dict.
    """
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    try:
        return (), dict(sample)  # transformers' BatchEncoding too
    except (TypeError, ValueError):
        kind = type(sample).__name__
        raise CaptureError(
            f"sample_input is a {kind}; give a tensor, a tuple of arguments or a dict of keywords"
        ) from None


def cache_off(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``use_cache=False`` for a model of transformers, where the sample does not give it.

    Such a model returns a key-value cache by default, which torch.export cannot return.
    """
    names = list(inspect.signature(model.forward).parameters)
    return (
        {"use_cache": False}
        if "use_cache" in names[len(args) :] and "use_cache" not in kwargs
        else {}
    )


class _WithLoss(nn.Module):
    """The model followed by the user's loss.

    ``kind`` is the type of the sample; ``extra`` are keyword arguments for the model.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, kind: type, extra: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.kind, self.extra = model, loss_fn, kind, extra
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {p.kind for p in parameters}
        self.names = (
            None if inspect.Parameter.VAR_KEYWORD in kinds else {p.name for p in parameters}
        )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.count = (
            None
            if inspect.Parameter.VAR_POSITIONAL in kinds
            else sum(p.kind in positional for p in parameters)
        )

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        known = {k: v for k, v in kwargs.items() if self.names is None or k in self.names}
        output = self.model(*args[: self.count], **known, **self.extra)
        batch = (
            args[0]
            if issubclass(self.kind, torch.Tensor)
            else args
            if issubclass(self.kind, (tuple, list))
            else kwargs
        )
        return {"loss": self.loss_fn(output, batch), "output": output}
