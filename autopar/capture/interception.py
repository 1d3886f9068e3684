"""Code outside of a model that acts on each call in its forward: function modes of torch, and hooks
of all modules. A compiled program makes other calls, so that it would not act on the program.
"""

from __future__ import annotations

from torch.nn.modules import module

from autopar.capture.hooks import comes_from
from autopar.capture.process_state import function_modes
from autopar.errors import AutoparError

_HOOKS = {
    "register_module_forward_pre_hook": module._global_forward_pre_hooks,
    "register_module_forward_hook": module._global_forward_hooks,
    "register_module_full_backward_pre_hook": module._global_backward_pre_hooks,
    "register_module_full_backward_hook": module._global_backward_hooks,
}


def check_interception(error: type[AutoparError]) -> None:
    """Raises ``error`` where this thread is in a function mode, or all modules have a hook, that
    torch itself did not make.
    """
    for mode in function_modes():
        if not comes_from(("torch.", "autopar."), mode):
            raise error(
                f"{type(mode).__name__} is active, a TorchFunctionMode: it acts on calls of "
                "torch's functions, and the compiled program has operators in their place. Leave "
                "the mode to compile and to call; a TorchDispatchMode sees the operators"
            )
    for name, hooks in _HOOKS.items():
        if hooks and not all(comes_from("torch.", hook) for hook in hooks.values()):
            raise error(
                f"a hook of all modules is registered ({name}), which the compiled program would "
                "not call, as it is one module: remove it. The program has what a forward hook of "
                "one module computes with tensors, if the hook is registered before compile"
            )
