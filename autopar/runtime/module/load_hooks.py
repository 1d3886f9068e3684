"""What the code of a model's modules does to a state dict that is loaded: their hooks run on the
compiled model's modules, too. A ``_load_from_state_dict()`` of their own does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from autopar.capture.hooks import comes_from
from autopar.errors import RunError

Convert = Callable[[str, Any], Any]

_METHODS = ("_load_from_state_dict", "load_state_dict")
_OWN = "_own_loading"


def copy_load_hooks(source: nn.Module, target: nn.Module) -> None:
    """Registers the hooks of ``source`` on ``load_state_dict`` with ``target``, but for those of
    torch, and remembers a method of its own that changes what is loaded.

    A hook that is a method of ``source`` becomes that of a copy without tensors, so that nothing
    keeps the tensors of ``source``.
    """
    wrapped: Any  # torch keeps each hook with whether it takes the module
    for wrapped in source._load_state_dict_pre_hooks.values():
        if not comes_from("torch.", wrapped.hook):
            hook = _of_copy(wrapped.hook, source)
            target._register_load_state_dict_pre_hook(hook, wrapped.with_module)
    for hook in source._load_state_dict_post_hooks.values():
        if not comes_from("torch.", hook):
            target.register_load_state_dict_post_hook(_of_copy(hook, source))
    for name in _METHODS:
        method = getattr(type(source), name)
        if method is not getattr(nn.Module, name) and not comes_from("torch.", method):
            target.__dict__[_OWN] = f"{type(source).__name__}.{name}()"


def _of_copy(hook: Callable[..., Any], source: nn.Module) -> Callable[..., Any]:
    if getattr(hook, "__self__", None) is not source:
        return hook
    copy = object.__new__(type(source))
    copy.__dict__ = source.__dict__ | nn.Module().__dict__
    return MethodType(hook.__func__, copy)  # type: ignore[attr-defined]


def check_own_loading(
    model: nn.Module, given: Mapping[str, Any], remote: Collection[str], strict: bool
) -> None:
    """Raises :class:`RunError` where a module has a method of its own for loading, and the names or
    shapes of what is ``given`` are not the model's; unless ``strict``, names may be missing.
    ``remote`` is held by other ranks.
    """
    for path, module in model.named_modules():
        if _OWN not in module.__dict__:
            continue
        prefix = f"{path}." if path else ""
        own = {prefix + name: value.shape for name, value in module.state_dict().items()}
        found = {
            name: getattr(value, "shape", None)
            for name, value in given.items()
            if name.startswith(prefix) and name not in remote
        }
        missing = own.items() - found.items() if strict else set()
        if different := sorted(dict((found.items() - own.items()) | missing)):
            raise RunError(
                f"load_state_dict: {different[0]!r} has another name or shape in the state dict "
                f"than in the compiled model, and {module.__dict__[_OWN]}, which might make one of "
                "the other, does not run in a compiled model: load the state dict into a model, "
                "and give that model's state_dict()"
            )


def places(model: nn.Module) -> set[str]:
    """The names of the tensors of all modules, with those that this rank leaves out."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *module._buffers)
    }


@contextmanager
def converting(model: nn.Module, convert: Convert) -> Iterator[None]:
    """While it is entered, each module loads ``convert(name, value)`` for a value that its hooks
    have left for the tensor ``name``. None leaves the value out.
    """

    def convert_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in (*module._parameters, *module._buffers):
            if (key := prefix + name) in state:
                value = convert(key, state.pop(key))
                if value is not None:
                    state[key] = value

    handles = [module.register_load_state_dict_pre_hook(convert_own) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
