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
