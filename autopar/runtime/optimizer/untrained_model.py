"""The model that was compiled keeps its values while the compiled model is trained: a warning where
it is saved nevertheless.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_SAMPLED = 8  # elements of each parameter


class WarnUntrained:
    """A hook on ``state_dict()`` of the model that was compiled, made when an optimizer first steps
    the compiled model. It warns while the first elements of each parameter are what they were.
    Code that keeps the variables saves nothing: it asks for names.
    """

    def __init__(self, model: nn.Module) -> None:
        # Numbers, so that no tensor of the hook counts where memory is measured.
        self._samples = [_first(p).tolist() for p in model.parameters()]

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        hooks = [h for h in model._state_dict_pre_hooks.values() if isinstance(h, WarnUntrained)]
        if not keep_vars and self is hooks[-1] and self._is_unchanged(model):
            warnings.warn(
                "state_dict() of the model that was compiled: an optimizer steps the parameters of "
                "the compiled model, and this model has the values that it had at compile. Save "
                "compiled.state_dict(), compiled.save(path) or compiled.save_pretrained(folder)",
                stacklevel=3,
            )

    def _is_unchanged(self, model: nn.Module) -> bool:
        """Also where the model has another dtype or device now. Versions of tensors do not tell:
        writes to ``parameter.data`` count none.
        """
        parameters = list(model.parameters())
        return len(parameters) == len(self._samples) and all(
            torch.equal(now, torch.tensor(sample, dtype=now.dtype, device=now.device))
            for now, sample in zip(map(_first, parameters), self._samples, strict=True)
        )


def warn_where_saved(model: nn.Module) -> RemovableHandle:
    """From now on ``state_dict()`` of the model that was compiled warns, until the hook is removed.
    Of the hooks of several programs the last one warns.
    """
    handle: RemovableHandle = model.register_state_dict_pre_hook(WarnUntrained(model))
    return handle


def _first(parameter: torch.Tensor) -> torch.Tensor:
    """The first elements; none of a tensor without values."""
    if parameter.is_meta:
        return parameter.new_empty(0, device="cpu")
    return parameter.detach().flatten()[:_SAMPLED]
