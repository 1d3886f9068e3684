"""Tensors that have no values, because the model was on the meta device: a program does not run
before something has written to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from autopar.errors import RunError
from autopar.runtime.communication.stand_ins import fill
from autopar.runtime.dtensors.torch_private import local_tensor, write_count

_STAND_IN_SCALE = 0.02  # of a usual initialisation, with which results stay finite


def marked_as_missing(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of marker values, which show where a step reads them: NaN, the smallest integer, or
    False.
    """
    marker: float = 0
    if dtype.is_floating_point or dtype.is_complex:
        marker = float("nan")
    elif dtype != torch.bool:
        marker = torch.iinfo(dtype).min
    return torch.full(tuple(shape), marker, dtype=dtype, device=device)


class MissingValues:
    """Knows which of ``tensors`` (DTensors and plain tensors by their names) were written to since
    it was made. ``buffers`` are the names of those that are no parameters.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: Iterable[str]) -> None:
        self._tensors = {name: (t, _write_counts(t)) for name, t in tensors.items()}
        self._buffers = set(buffers)

    def fill(self) -> None:
        """Writes stand-ins to all of them, on this rank's parts."""
        with torch.no_grad():
            for tensor, _ in self._tensors.values():
                local = fill(local_tensor(tensor.detach()))
                if local.is_floating_point() or local.is_complex():
                    local.mul_(_STAND_IN_SCALE)

    def check(self) -> None:
        """Raises :class:`RunError` with the names of the tensors that nothing was written to."""
        self._tensors = {
            name: pair for name, pair in self._tensors.items() if not _is_written(*pair)
        }
        if not self._tensors:
            return
        names = sorted(self._tensors)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        message = (
            f"{len(names)} tensors have no values: {shown}. They were on the meta device when the "
            "model was compiled, and nothing was written to them since: init_weights(seed), "
            "load_pretrained(folder), load, load_state_dict, torch.distributed.checkpoint.load "
            "into compiled.state_dict(), or copy_ under torch.no_grad()"
        )
        if not self._buffers.isdisjoint(names):
            message += (
                ". Buffers that a model computes when it is built are often in no checkpoint: "
                "build it on the CPU and copy them, "
                "for name, b in built.named_buffers(): compiled.get_buffer(name).copy_(b)"
            )
        raise RunError(message)


def _write_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """The write counts of a DTensor and of its local tensor, which the loader of a checkpoint
    writes to.
    """
    return write_count(tensor), write_count(local_tensor(tensor))


def _is_written(tensor: torch.Tensor, before: tuple[int, int]) -> bool:
    if _write_counts(tensor) != before or not tensor.numel():
        return True
    # A write to ``.data`` is not counted, so the first value is compared with the marker.
    first = local_tensor(tensor).detach().flatten()[:1]
    marker = marked_as_missing((1,), first.dtype, first.device)
    return not len(first) or not torch.equal(first.nan_to_num(1.25), marker.nan_to_num(1.25))
