"""The model that was compiled keeps its values while the compiled model is trained: a warning where
it is saved nevertheless.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.utils.hooks import RemovableHandle


class WarnUntrained:
    """A hook on ``state_dict()`` of the model that was compiled. It warns where no parameter was
    written to since the hook was made, which is when an optimizer first steps the compiled model.
    Code that keeps the variables saves nothing: it asks for names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = _versions(model)

    def __call__(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        hooks = [h for h in model._state_dict_pre_hooks.values() if isinstance(h, WarnUntrained)]
        if not keep_vars and self is hooks[-1] and _versions(model) == self._versions:
            warnings.warn(
                "state_dict() of the model that was compiled: an optimizer steps the parameters of "
                "the compiled model, and this model has the values that it had at compile. Save "
                "compiled.state_dict(), compiled.save(path) or compiled.save_pretrained(folder)",
                stacklevel=3,
            )


def warn_where_saved(model: nn.Module) -> RemovableHandle:
    """From now on ``state_dict()`` of the model that was compiled warns, until the hook is removed.
    Of the hooks of several programs the last one warns.
    """
    handle: RemovableHandle = model.register_state_dict_pre_hook(WarnUntrained(model))
    return handle


def _versions(model: nn.Module) -> list[int]:
    return [0 if p.is_inference() else p._version for p in model.parameters()]
