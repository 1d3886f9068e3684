"""A module tree that has a model's parameter names and none of its code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

Replace = Callable[[str, torch.Tensor], "torch.Tensor | None"]


def copy_tree(model: nn.Module, root: nn.Module, replace: Replace) -> None:
    """Gives ``root`` the children, parameters and buffers of ``model``, in its order and under its names.

    ``replace(name, tensor)`` makes the new tensor, None to leave it out; it must return the same object for the same tied tensor. Buffers
    keep their persistence.
    Modules of ``torch.nn`` keep their class, so that optimizer groups made by class (no weight decay on ``LayerNorm``) come out alike.
    """
    _fill(model, root, "", replace, {})


def _fill(source: nn.Module, target: nn.Module, prefix: str, replace: Replace, done: dict[int, nn.Module]) -> None:
    for name, tensor in source._parameters.items():
        target._parameters[name] = None if tensor is None else replace(prefix + name, tensor)  # type: ignore[assignment]
    for name, buffer in source._buffers.items():
        target._buffers[name] = None if buffer is None else replace(prefix + name, buffer)
    target._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        if child is None:
            target._modules[name] = None
            continue
        if id(child) not in done:  # a module that stands in two places stands in two places here
            done[id(child)] = _shell(child)
            _fill(child, done[id(child)], f"{prefix}{name}.", replace, done)
        target._modules[name] = done[id(child)]


def _shell(module: nn.Module) -> nn.Module:
    if not type(module).__module__.startswith("torch.nn.modules."):
        return nn.Module()
    shell: nn.Module = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    shell.__dict__.update(nn.Module().__dict__)
    shell.training = module.training
    return shell


def build_tree(root: nn.Module, tensors: Mapping[str, torch.Tensor], persistent: Iterable[str]) -> None:
    """Gives ``root`` these parameters and buffers under their dotted names. Buffers not in ``persistent`` stay out of ``state_dict()``."""
    keep = set(persistent)
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            owner._parameters[last] = tensor
        else:
            owner._buffers[last] = tensor
            if name not in keep:
                owner._non_persistent_buffers_set.add(last)
