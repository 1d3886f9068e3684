"""The dtype in which kernels add up."""

from __future__ import annotations

import torch

from autopar.ir.precision import HALF_DTYPES


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels add up values of ``dtype``: float32 for half precisions."""
    return torch.float32 if dtype in HALF_DTYPES else dtype
