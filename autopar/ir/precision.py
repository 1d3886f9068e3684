"""The names of precisions, and their dtypes: the dtype that a program computes in, and the dtype in
which ranks sum gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
REDUCE_DTYPES = {name: COMPUTE_DTYPES[name] for name in ("fp32", "bf16", "fp16")}
HALF_DTYPES = (torch.bfloat16, torch.float16)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype of a precision or a reduce_dtype; None (leave dtypes as they are) for None."""
    return None if name is None else COMPUTE_DTYPES[name]


def reduction_dtype(precision: str | None, reduce_dtype: str | None) -> str | None:
    """The name of the dtype in which ranks sum gradients: ``reduce_dtype`` if it is given, else
    fp32 for gradients in half precision, else None for the dtype of the gradients.
    """
    return "fp32" if reduce_dtype is None and dtype_of(precision) in HALF_DTYPES else reduce_dtype


def needs_cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a program that computes in ``dtype`` casts ``tensor``."""
    return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype


@contextmanager
def fake_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within this context, floating-point parameters and buffers of ``model`` are fake tensors of
    ``dtype``. Afterwards the model is as before.

    A model may read its own dtype, for example to make a mask. With fake tensors it reads the dtype
    that the program computes in; a cast of the finished graph could not change such a mask.
    """
    before: list[tuple[nn.Module, str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and needs_cast(tensor, dtype):
                    before.append((module, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = _like(tensor, dtype, fake)
                    # RNNs keep lists of their weights, which setattr updates, too.
                    setattr(module, name, made[id(tensor)])
        yield
    finally:
        for module, name, tensor in before:
            setattr(module, name, tensor)


def _like(tensor: torch.Tensor, dtype: torch.dtype | None, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        cast = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    return (
        nn.Parameter(cast, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else cast
    )
