"""Checks what a compiled program has no code for: hooks on a model's modules and parameters, code
of modules that adds to their ``state_dict()``, and modules that cannot be traced.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autopar.errors import CaptureError


def check_modules(model: nn.Module) -> None:
    """Checks all modules and parameters of a model, or of a loss function.

    A trace contains only the operators of a forward hook, so forward hooks get a warning. Hooks of
    ``torch.nn.utils``, such as those of ``weight_norm``, only compute with tensors and get none.

    Raises:
        CaptureError: a module has a backward hook, which no trace contains; a parameter has a hook,
            or no shape yet; a module adds something to the ``state_dict()`` of its tensors, or is
            one of TorchScript; or the model is distributed already.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CaptureError(
                f"parameter {name} has no shape yet, because its module is lazy: call the model "
                "once on a batch, then compile"
            )
        if isinstance(parameter, DTensor):
            raise CaptureError(
                f"parameter {name} is a DTensor, so the model is distributed already (by FSDP, "
                "tensor parallelism or autopar.compile): give the plain model"
            )
    for name, module in model.named_modules():
        _check_module(module, f"module {name or '(root)'} ({type(module).__name__})")
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise CaptureError(
                f"parameter {name} has a hook (register_hook or "
                "register_post_accumulate_grad_hook), which the compiled program would not call: "
                "it has parameters of its own. Remove the hook, and register it on the parameter "
                "of that name of compiled.named_parameters(), after compile"
            )


def _check_module(module: nn.Module, place: str) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise CaptureError(
            f"{place} distributes the model already: give the model inside (its attribute module)"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{place} is TorchScript, which has no Python code to trace: give the module that it "
            "was made of"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise CaptureError(
            f"{place} has a backward hook, which would not run in the compiled program: "
            "remove it, and register a hook on the compiled "
            "model itself or on its parameters (register_post_accumulate_grad_hook), or write "
            "a torch.autograd.Function in forward"
        )
    if addition := _state_addition(module):
        raise CaptureError(
            f"{place} has {addition}: the compiled model has its tensors and none of its code, "
            "so that checkpoints would lack the addition. Make tensors of it, registered with "
            "register_buffer, or leave it out and save it yourself "
            "(compiled.save(path, extra=...))"
        )
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(not comes_from("torch.nn.utils.", hook) for hook in hooks):
        warnings.warn(
            f"{place} has a forward hook: it runs while the model is traced, and the compiled "
            "program has what it computes with "
            "tensors and nothing else (it will not print, count or store); return a tensor "
            "from forward to read it",
            stacklevel=5,
        )


def check_no_gradients(model: nn.Module) -> None:
    """Raises :class:`CaptureError` where a parameter has a gradient: further gradients would be
    added to it on one device, and the compiled program has parameters of its own.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise CaptureError(
                f"parameter {name} has a gradient, which the compiled model would not have: let an "
                "optimizer step, and call model.zero_grad(), before compile"
            )


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks wait for the parameter's gradient."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def _state_addition(module: nn.Module) -> str:
    """The code of a module that adds to the ``state_dict()`` of its tensors; "" where there is
    none.
    """
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    if any(not comes_from(("torch.", "autopar."), hook) for hook in hooks):
        return "a hook on its state_dict()"
    for method in ("get_extra_state", "_save_to_state_dict", "state_dict"):
        found = getattr(type(module), method)
        if found is not getattr(nn.Module, method) and not comes_from("torch.", found):
            return f"a {method}() of its own"
    return ""


def comes_from(package: str | tuple[str, ...], code: Any) -> bool:
    """Whether a function, or an object of a class, is of a package such as ``torch.``, or of one of
    several.
    """
    return str(getattr(code, "__module__", "")).startswith(package)
