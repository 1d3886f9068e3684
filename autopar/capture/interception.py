"""Code outside of a model that acts on each call in its forward: function modes of torch, and hooks
of all modules. A compiled program makes other calls, on which it would not act.
"""

from __future__ import annotations

from torch.nn.modules import module

from autopar.capture.hooks import comes_from
from autopar.capture.process_state import function_modes
from autopar.errors import AutoparError, RunError

_HOOKS = {
    "register_module_forward_pre_hook": module._global_forward_pre_hooks,
    "register_module_forward_hook": module._global_forward_hooks,
    "register_module_full_backward_pre_hook": module._global_backward_pre_hooks,
    "register_module_full_backward_hook": module._global_backward_hooks,
}


def users_function_modes() -> list[type]:
    """The classes of the function modes that this thread is in, but for torch's own."""
    return [type(m) for m in function_modes() if not comes_from(("torch.", "autopar."), m)]


def check_function_modes(traced_in: list[type]) -> None:
    """Raises :class:`RunError` where this thread is in other function modes than the trace was,
    which has what these made of the calls in the forward.
    """
    active = users_function_modes()
    if active == traced_in:
        return
    now, then = (", ".join(m.__name__ for m in modes) or "none" for modes in (active, traced_in))
    raise RunError(
        f"the TorchFunctionModes that are active: {now}; when the model was compiled: {then}. They "
        "act on calls of torch's functions, for which the compiled program has operators: call the "
        "program in the modes in which it was compiled. A TorchDispatchMode sees the operators"
    )


def check_no_hooks_of_all_modules(error: type[AutoparError]) -> None:
    """Raises ``error`` where all modules have a hook that is not torch's own."""
    for name, hooks in _HOOKS.items():
        if hooks and not all(comes_from("torch.", hook) for hook in hooks.values()):
            raise error(
                f"a hook of all modules is registered ({name}), which the compiled program would "
                "not call, as it is one module: remove it. The program has what a forward hook of "
                "one module computes with tensors, if the hook is registered before compile"
            )
