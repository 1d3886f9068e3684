"""The private names of torch that ``runtime.values`` uses. A new version of torch is checked
here.
"""

from __future__ import annotations

from typing import Any

import torch

disabled_torch_function: Any = torch._C._disabled_torch_function_impl


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of the same memory have in common, while one of them lives."""
    return tensor.untyped_storage()._cdata


def empty_subclass(cls: type, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A tensor without memory of ``cls``, a subclass with ``__torch_dispatch__``, on the CPU."""
    device = torch.device("cpu")
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
