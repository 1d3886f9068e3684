"""Checks the hooks on a model's modules: a trace loses backward hooks and effects of forward
hooks.
"""

from __future__ import annotations

import warnings

from torch import nn

from autopar.errors import CaptureError


def check_hooks(model: nn.Module) -> None:
    """Checks the hooks of all modules.

    A trace contains only the operators of a forward hook, so forward hooks get a warning. Hooks of
    ``torch.nn.utils``, such as those of ``weight_norm``, only compute with tensors and get none.

    Raises:
        CaptureError: a module has a backward hook, which no trace contains.
    """
    for name, module in model.named_modules():
        place = f"module {name or '(root)'} ({type(module).__name__})"
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{place} has a backward hook, which would not run in the compiled program: "
                "remove it, and register a hook on the compiled "
                "model itself or on its parameters (register_post_accumulate_grad_hook), or write "
                "a torch.autograd.Function in forward"
            )
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if any(not type(hook).__module__.startswith("torch.nn.utils") for hook in hooks):
            warnings.warn(
                f"{place} has a forward hook: it runs while the model is traced, and the compiled "
                "program has what it computes with "
                "tensors and nothing else (it will not print, count or store); return a tensor "
                "from forward to read it",
                stacklevel=4,
            )
