"""The module tree of a compiled model: it has the model's parameter names and none of its code.
Where a user asks for that code, it raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.module import mode_overrides
from autopar.runtime.module.load_hooks import copy_load_hooks
from autopar.runtime.parameters.model_state import check_dtype_and_device

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel

Replace = Callable[[str, torch.Tensor], "torch.Tensor | None"]

_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)
_STATE = ("_parameters", "_buffers", "_modules")
_SEALED = "_sealed_attributes"
_CODE = (staticmethod, classmethod, property)
_PLAIN = (
    "to run other code of the model, write the values (compiled.save_pretrained(folder)) and load "
    "them into a model (load_state_dict, from_pretrained)"
)


class ModuleShell(nn.Module):
    """A module of a compiled model: it holds parameters and buffers, and is never called."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(self, name)
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            f"compiled.{self.__dict__[_SEALED][0]} cannot be called: it has parameters and none of "
            "the model's code. Call compiled itself, and return from forward what you need; "
            f"{_PLAIN}"
        )


class SealedDict(dict[str, Any]):
    """The parameters, buffers or children of a module, which the user cannot replace.

    Attributes:
        owner: the module's path.
        frozen: attributes of a module of torch that cannot be set. ``nn.Module.__setattr__`` looks
            for the name in the module's parameters. So the module can keep its class, and this
            dictionary of its parameters refuses the name.
    """

    owner = ""
    frozen: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        if name in self.frozen:
            raise _fixed(self.owner, str(name))
        return super().__contains__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name) is not value or value is None:
            raise self._refused(name)

    def __delitem__(self, name: str) -> None:
        raise self._refused(name)

    def pop(self, name: str, *default: Any) -> NoReturn:
        raise self._refused(name)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _refused(self, name: str) -> RunError:
        path = f"compiled.{self.owner}.{name}" if self.owner else f"compiled.{name}"
        return RunError(
            f"{path} cannot be set, replaced or deleted: the program was made of the model's "
            "parts as they were when it was compiled. To change values write into a tensor (under "
            f"torch.no_grad(), {path}.copy_(...), or load_state_dict); to change the model change "
            "it before compiling, and compile again"
        )


def copy_tree(model: nn.Module, root: nn.Module, replace: Replace) -> None:
    """Gives ``root`` the children, parameters, buffers and modes of ``model``, in their order and
    under their names.

    ``replace(name, tensor)`` returns the new tensor, or None to leave it out. For tied tensors it
    must return the same object. Buffers keep their persistence. Modules of ``torch.nn`` keep their
    class, because users make optimizer groups by class (no weight decay on ``LayerNorm``).
    """
    root.training = model.training
    copy_load_hooks(model, root)
    _fill(model, root, "", replace, {})
    mode_overrides.copy_mode_overrides(model, root, "")


def _fill(
    source: nn.Module, target: nn.Module, prefix: str, replace: Replace, done: dict[int, nn.Module]
) -> None:
    for name, tensor in source._parameters.items():
        target._parameters[name] = None if tensor is None else replace(prefix + name, tensor)  # type: ignore[assignment]
    for name, buffer in source._buffers.items():
        target._buffers[name] = None if buffer is None else replace(prefix + name, buffer)
    target._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        if child is None:
            target._modules[name] = None
            continue
        if id(child) not in done:  # a module with two names remains one module
            done[id(child)] = _shell(child)
            _fill(child, done[id(child)], f"{prefix}{name}.", replace, done)
            _finish(child, done[id(child)], f"{prefix}{name}")
        target._modules[name] = done[id(child)]


def _shell(module: nn.Module) -> nn.Module:
    shell: nn.Module = ModuleShell()
    if type(module).__module__.startswith("torch.nn.modules.") and type(module) is not nn.Module:
        shell = object.__new__(type(module))
        shell.__dict__.update(module.__dict__)
        shell.__dict__.update(nn.Module().__dict__)
    shell.training = module.training
    return shell


def _finish(module: nn.Module, shell: nn.Module, path: str) -> None:
    for name in _HOOKS:
        shell.__dict__[name] = partial(_refuse_hook, path, name)
    copy_load_hooks(module, shell)
    shell.__dict__["_apply"] = partial(_stay, weakref.ref(shell))
    mode_overrides.copy_mode_overrides(module, shell, path)
    seal(shell, path, forward_attributes(module))


def seal(module: nn.Module, path: str, names: Collection[str]) -> None:
    """From now on the tensors, the children and the attributes ``names`` of the module cannot be
    replaced. ``path`` is the module's.
    """
    for state in _STATE:
        module.__dict__[state] = sealed = SealedDict(module.__dict__[state])
        sealed.owner = path
    module.__dict__[_SEALED] = path, frozenset(names)
    if type(module).__module__.startswith("torch.nn.modules."):
        module._parameters.frozen = frozenset(names & module.__dict__.keys())  # type: ignore[attr-defined]


def forward_attributes(module: nn.Module) -> set[str]:
    """The attributes that the module's forward may read: not those of every ``nn.Module``, and no
    functions.
    """
    if _SEALED in module.__dict__:
        return set(module.__dict__[_SEALED][1])
    own = set(module.__dict__) - set(nn.Module().__dict__)
    for kind in type(module).__mro__:
        if kind not in nn.Module.__mro__:
            own |= {
                name
                for name, value in vars(kind).items()
                if not callable(value) and not isinstance(value, _CODE)
            }
    return {name for name in own if not name.startswith("__")} - {"training", "config"}


def check_attribute(module: nn.Module, name: str) -> None:
    """Raises :class:`RunError` if ``name`` is an attribute that the model's forward may read."""
    path, names = module.__dict__.get(_SEALED, ("", ()))
    if name in names:
        raise _fixed(path, name)


def code_error(model_class: type, name: str) -> AttributeError:
    """The error for a method or a property of the model that a compiled model is asked for."""
    return AttributeError(
        f"compiled has no {name}: it has the parameters of {model_class.__name__} and none of its "
        f"code; {_PLAIN}",
        name=name,
    )


def _fixed(path: str, name: str) -> RunError:
    place = f"compiled.{path}.{name}" if path else f"compiled.{name}"
    return RunError(
        f"{place} cannot be set: the program has the value that {name} had when the model was "
        "compiled. Set it on the model and compile again, or make it a buffer (register_buffer, "
        f"before compiling), whose value the program reads: {place}.fill_(...)"
    )


def _refuse_hook(path: str, name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RunError(
        f"compiled.{path}.{name}: parts of a compiled model are never called, so a hook on one "
        "would not run. Register a forward hook on the model before compiling, where it is traced "
        "with the model; return the tensor from forward to read it; for gradients use "
        "register_post_accumulate_grad_hook on a parameter, or a hook on the compiled model itself"
    )


def _stay(part: weakref.ref[nn.Module], fn: Any, recurse: bool = True) -> nn.Module:
    """Replaces ``_apply``, which ``to``, ``half``, ``cuda`` and others call, in a module of the
    tree: raises an error for another device or dtype.
    """
    shell = part()
    assert shell is not None
    for tensor in (*shell.parameters(), *shell.buffers()):
        if tensor.is_floating_point():
            check_dtype_and_device([tensor], tensor.device, fn)
    return shell


def build_tree(
    root: nn.Module,
    captured: CapturedModel,
    user_tensor: Callable[[str, Mapping[str, str]], torch.Tensor | None],
) -> None:
    """Gives ``root`` the parameters and buffers of ``captured`` under their dotted names, for a
    model that is not there. ``user_tensor(name, aliases)`` returns the new tensor, or None to leave
    it out.
    """
    constants = {i.target for i in captured.inputs if i.kind == "constant"}
    for name in (*captured.state, *captured.aliases):
        tensor = None if name in constants else user_tensor(name, captured.aliases)
        if tensor is None:
            continue
        *path, last = name.split(".")
        owner = root
        for part in path:
            owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            owner._parameters[last] = tensor
        else:
            owner._buffers[last] = tensor
