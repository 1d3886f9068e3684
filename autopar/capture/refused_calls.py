"""Calls of autograd that a graph cannot contain. A forward that makes one while it is traced is
refused with CaptureError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.errors import CaptureError

WRITE_A_FUNCTION = (
    "write a torch.autograd.Function with the backward that you want, and call its apply"
)
_IN_FORWARD = "in the forward: the captured program"
_BACKWARD = "backward() in the forward: gradients come from the loss that the forward returns"
# the owner of each function, its name, and the message
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        torch.Tensor,
        "register_hook",
        f"register_hook {_IN_FORWARD} would not call the hook; {WRITE_A_FUNCTION}",
    ),
    (
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        f"register_post_accumulate_grad_hook {_IN_FORWARD} would not call the hook; register it "
        "on the parameters of the compiled model",
    ),
    (
        torch.Tensor,
        "retain_grad",
        "retain_grad in the forward: tensors of the captured program are not those of the trace, "
        "and would have no .grad; return what you want the gradient of, or write a "
        "torch.autograd.Function that looks at it",
    ),
    (
        torch.autograd.graph,
        "register_multi_grad_hook",
        f"register_multi_grad_hook {_IN_FORWARD} would not call the hook; {WRITE_A_FUNCTION}",
    ),
    (
        torch.autograd.function,
        "custom_function_call",
        "a torch.autograd.Function under a transform of torch.func (vmap, grad): its backward "
        "would be lost; call it outside of the transform",
    ),
    (torch.Tensor, "backward", _BACKWARD),
    (
        torch.autograd,
        "grad",
        f"torch.autograd.grad {_IN_FORWARD} has no gradients before its backward; write the "
        "gradient as a formula, or the whole in a torch.autograd.Function",
    ),
    (torch.autograd, "backward", _BACKWARD),
)
# hooks whose unpacked tensor equals the packed one
_EXACT_HOOKS = (torch.autograd.graph.save_on_cpu,)


@contextmanager
def refusing_calls() -> Iterator[None]:
    """Within, these calls raise CaptureError where they are traced."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(saved_tensors_hooks, "__enter__", _enter_hooks))
        for owner, name, problem in _REFUSED:
            refused = _refuse(getattr(owner, name), problem)
            stack.enter_context(mock.patch.object(owner, name, refused))
        yield


def _refuse(original: Callable[..., Any], problem: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return original(*args, **kwargs)
        raise CaptureError(problem)

    return refused


_ENTER_HOOKS = saved_tensors_hooks.__enter__


def _enter_hooks(hooks: Any) -> Any:
    """``saved_tensors_hooks.__enter__``, which refuses the user's hooks. torch's own pass."""
    is_own = type(hooks).__module__.startswith("torch.")
    is_refused = not is_own or type(hooks) is saved_tensors_hooks
    if get_proxy_mode() is not None and not isinstance(hooks, _EXACT_HOOKS) and is_refused:
        raise CaptureError(
            "saved_tensors_hooks in the forward: the captured program would not call them; leave "
            f"what is kept to the plan (recompute=), or {WRITE_A_FUNCTION}"
        )
    return _ENTER_HOOKS(hooks)
