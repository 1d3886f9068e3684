"""Tensors that a model from the meta device has no values for: a program does not run before
something has written to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError


def marked_as_missing(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory that shows itself where it is read all the same: not a number, or the least of the
    integers.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.full(
        tuple(shape),
        0 if dtype == torch.bool else torch.iinfo(dtype).min,
        dtype=dtype,
        device=device,
    )


class MissingValues:
    """Knows which of ``tensors`` (a DTensor or a plain one by name) have been written to since it
    was made.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: Iterable[str]) -> None:
        self._tensors = {name: (t, _versions(t)) for name, t in tensors.items()}
        self._buffers = set(buffers)

    def check(self) -> None:
        """Raises :class:`RunError` that names the tensors that nothing was written to."""
        self._tensors = {name: pair for name, pair in self._tensors.items() if not _filled(*pair)}
        if not self._tensors:
            return
        names = sorted(self._tensors)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        message = (
            f"{len(names)} tensors have no values: {shown}. They were on the meta device when the "
            "model was compiled, and nothing was "
            "written to them since: load_state_dict, torch.distributed.checkpoint.load into "
            "compiled.state_dict(), or copy_ under "
            "torch.no_grad()"
        )
        if not self._buffers.isdisjoint(names):
            message += (
                ". Buffers that a model computes when it is built are often in no checkpoint: "
                "build it on the CPU and copy them, "
                "for name, b in built.named_buffers(): compiled.get_buffer(name).copy_(b)"
            )
        raise RunError(message)


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    """A DTensor counts the writes to it, and its local part those of a checkpoint's loader."""
    return tensor._version, _inside(tensor)._version


def _filled(tensor: torch.Tensor, before: tuple[int, int]) -> bool:
    if _versions(tensor) != before or not tensor.numel():
        return True
    first = _inside(tensor).detach().flatten()[:1]  # a write to .data is not counted
    return not len(first) or not torch.equal(
        first.nan_to_num(1.25), marked_as_missing((1,), first.dtype, first.device).nan_to_num(1.25)
    )
