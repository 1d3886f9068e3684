"""A model's own ``train()`` and ``eval()``, which keep a BatchNorm in ``eval()``, say, or do
nothing.

Parts of a compiled model have none of the model's code: they do to modes what these functions did
once, on a copy.
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

Modes = dict[
    str, "bool | None"
]  # whether each part trains after a call, by its path; None where the call leaves it as it was

_KEPT = "_own_modes"
_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "train(True)": lambda module: module.train(True),
    "train(False)": lambda module: module.train(False),
    "eval()": lambda module: module.eval(),
}


def copy_mode_overrides(module: nn.Module, shell: nn.Module, path: str) -> None:
    """``train()`` and ``eval()`` of ``shell``, which has the parts of ``module``, do to modes what
    those of ``module`` do.
    """
    known = vars(module).get(_KEPT) or (_learn(module, path) if _overrides(module) else None)
    if known is None:
        return
    shell.__dict__[_KEPT] = known
    shell.__dict__["train"] = partial(_train, weakref.ref(shell), known)
    shell.__dict__["eval"] = partial(_obey, weakref.ref(shell), known, "eval()")


def _overrides(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.train is not nn.Module.train
        or kind.eval is not nn.Module.eval
        or bool({"train", "eval"} & vars(module).keys())
    )


def _learn(module: nn.Module, path: str) -> dict[str, Modes | str]:
    """The modes after each call; a message where a call does something else, too."""
    modes = {part: part.training for part in module.modules()}
    try:
        return {
            name: _after(module, call, f"{path or 'the model'}.{name}")
            for name, call in _CALLS.items()
        }
    finally:
        for (
            part,
            mode,
        ) in modes.items():  # a function that was set on the module itself knows no copy
            part.training = mode


def _after(module: nn.Module, call: Callable[[nn.Module], Any], name: str) -> Modes | str:
    found = []
    for start in (True, False):
        try:
            twin = _without_memory(module)
            for part in (*module.modules(), *twin.modules()):
                part.training = start
            before = _noted(twin)
            call(twin)
            after = _noted(twin)
        except Exception as e:
            return f"{name} could not be followed ({type(e).__name__}: {e})"
        if changed := [
            what
            for what in before.keys() | after.keys()
            if not _same(before.get(what), after.get(what))
        ]:
            return f"{name} also changes {', '.join(sorted(changed))}"
        found.append({path: part.training for path, part in twin.named_modules()})
    from_training, from_evaluation = found
    return {
        path: mode if mode == from_evaluation[path] else None
        for path, mode in from_training.items()
    }


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        placed = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(placed, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else placed
        )
    return copy.deepcopy(module, memo)


def _noted(module: nn.Module) -> dict[str, Any]:
    """What the forward may read of a module and its parts, but for their modes."""
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
    shell: weakref.ref[nn.Module], known: dict[str, Modes | str], mode: bool = True
) -> nn.Module:
    if not isinstance(mode, bool):
        raise ValueError("training mode is expected to be boolean")  # as torch says it
    return _obey(shell, known, f"train({mode})")


def _obey(shell: weakref.ref[nn.Module], known: dict[str, Modes | str], call: str) -> nn.Module:
    module, modes = shell(), known[call]
    assert module is not None
    if isinstance(modes, str):
        raise RunError(
            f"{modes}, which has no effect on the compiled program: it was made of the model's "
            "forward alone. Have train() and eval() "
            "change nothing but modes, or set the modes of the compiled model's parts one by one"
        )
    for path, part in module.named_modules():
        if (mode := modes[path]) is not None:
            part.training = mode
    return module
