"""The state of the process that a trace may read besides the model: torch's settings, the
environment, and generators of random numbers.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from autopar.capture.state_parts import UnknownStateError

_DEVICES = ("cpu", "cuda")


def torch_settings() -> tuple[Any, ...]:
    """The settings of torch that a forward may read and that may change what operators do."""
    backends = torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.mkldnn.enabled),
        (backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()),
        (backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()),
    )


def active_modes() -> list[Any]:
    """The modes of torch that this thread is in: of its functions, and of its dispatcher."""
    return [*function_modes(), *dispatch_modes()]


def process_state() -> tuple[Any, ...]:
    """All of that state, in values that can be compared.

    Raises:
        UnknownStateError: a mode of torch is active, or all modules have a hook.
    """
    if modes := [m for m in active_modes() if not isinstance(m, DeviceContext)]:
        names = ", ".join(type(m).__name__ for m in modes)
        raise UnknownStateError(f"torch is in a mode of its own: {names}")
    if nn.modules.module._has_any_global_hook():
        raise UnknownStateError("a hook of all modules runs")
    functional = {k: v for k, v in vars(nn.functional).items() if callable(v)}
    return (
        *torch_settings(),
        torch.get_num_threads(),
        torch.get_default_device(),
        dict(os.environ),
        functional,  # where somebody may put an own function
    )


def random_states() -> list[Any]:
    """Where the generators of random numbers are from which Python code of a forward may draw."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return [random.getstate(), name, keys.tobytes(), *rest]
