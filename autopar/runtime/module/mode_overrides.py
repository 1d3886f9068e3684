"""A model's own ``train()`` and ``eval()``: for example those that keep a BatchNorm in ``eval()``.

The parts of a compiled model have none of the model's code. So these functions are called once, on
a copy of the model, and the parts repeat their effect on modes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from autopar.capture.module_state import MODULE_ATTRIBUTES
from autopar.errors import RunError

# By path, whether a module trains after a call. None: the call leaves its mode as it was.
Modes = dict[str, "bool | None"]

_OVERRIDES = "_mode_overrides"
_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "train(True)": lambda module: module.train(True),
    "train(False)": lambda module: module.train(False),
    "eval()": lambda module: module.eval(),
}


def copy_mode_overrides(module: nn.Module, shell: nn.Module, path: str) -> None:
    """Gives ``shell``, which has the parts of ``module``, functions ``train()`` and ``eval()`` with
    the effect on modes that those of ``module`` have.
    """
    effects = vars(module).get(_OVERRIDES)
    if effects is None and _has_overrides(module):
        effects = _effects(module, path)
    if effects is None:
        return
    shell.__dict__[_OVERRIDES] = effects
    shell.__dict__["train"] = partial(_train, weakref.ref(shell), effects)
    shell.__dict__["eval"] = partial(_set_modes, weakref.ref(shell), effects, "eval()")


def _has_overrides(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.train is not nn.Module.train
        or kind.eval is not nn.Module.eval
        or bool({"train", "eval"} & vars(module).keys())
    )


def _effects(module: nn.Module, path: str) -> dict[str, Modes | str]:
    """The modes after each call; an error message for a call that changes more than modes."""
    modes = {part: part.training for part in module.modules()}
    try:
        return {
            name: _modes_after(module, call, f"{path or 'the model'}.{name}")
            for name, call in _CALLS.items()
        }
    finally:
        # A function that is an attribute of the module sets the modes of the module, not of a copy.
        for part, mode in modes.items():
            part.training = mode


def _modes_after(module: nn.Module, call: Callable[[nn.Module], Any], name: str) -> Modes | str:
    afterwards = []
    for start in (True, False):
        try:
            twin = _without_memory(module)
            for part in (*module.modules(), *twin.modules()):
                part.training = start
            before = _readable_state(twin)
            call(twin)
            after = _readable_state(twin)
        except Exception as e:
            return f"{name} could not be followed ({type(e).__name__}: {e})"
        if changed := [
            name
            for name in before.keys() | after.keys()
            if not _same(before.get(name), after.get(name))
        ]:
            return f"{name} also changes {', '.join(sorted(changed))}"
        afterwards.append({path: part.training for path, part in twin.named_modules()})
    from_training, from_evaluation = afterwards
    return {
        path: mode if mode == from_evaluation[path] else None
        for path, mode in from_training.items()
    }


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy whose tensors are on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        placed = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(placed, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else placed
        )
    return copy.deepcopy(module, memo)


def _readable_state(module: nn.Module) -> dict[str, Any]:
    """All that the forward may read of a module and its parts, except their modes."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        found |= {
            prefix + name: value
            for name, value in vars(part).items()
            if name not in MODULE_ATTRIBUTES
        }
        found |= {prefix + name: child for name, child in part._modules.items()}
        found |= {prefix + name: buffer for name, buffer in part._buffers.items()}
        for name, parameter in part._parameters.items():
            found[prefix + name] = parameter
            found[f"{prefix}{name}.requires_grad"] = (
                parameter is not None and parameter.requires_grad
            )
    return found


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    plain = (bool, int, float, str)
    return isinstance(before, plain) and type(before) is type(after) and before == after


def _train(
    shell: weakref.ref[nn.Module], effects: dict[str, Modes | str], mode: bool = True
) -> nn.Module:
    if not isinstance(mode, bool):
        raise ValueError("training mode is expected to be boolean")  # torch's own message
    return _set_modes(shell, effects, f"train({mode})")


def _set_modes(
    shell: weakref.ref[nn.Module], effects: dict[str, Modes | str], call: str
) -> nn.Module:
    module, modes = shell(), effects[call]
    assert module is not None
    if isinstance(modes, str):
        raise RunError(
            f"{modes}, which has no effect on the compiled program: it was made of the model's "
            "forward alone. Have train() and eval() change nothing but modes, or set the modes of "
            "the compiled model's parts one by one"
        )
    for path, part in module.named_modules():
        if (mode := modes[path]) is not None:
            part.training = mode
    return module
