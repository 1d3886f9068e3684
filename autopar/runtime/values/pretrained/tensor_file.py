"""A safetensors file that is written tensor by tensor, so that one of them is in memory at a
time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import RunError
from autopar.formatting.files import flush

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes


@dataclass(frozen=True)
class TensorEntry:
    """The name, shape and dtype of one tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Writes a file with ``entries``; :meth:`add` takes their values in this order.

    Raises :class:`RunError` for a dtype that the format does not have.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._path = path
        head = json.dumps(_header(entries)).encode()
        head += b" " * (-len(head) % _ALIGNMENT)
        self._file = path.open("wb")
        self._file.write(len(head).to_bytes(8, "little") + head)

    def add(self, value: torch.Tensor) -> None:
        """Writes the next tensor."""
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(data.numpy().data)

    def close(self) -> None:
        """Closes the file, which is then on the disk."""
        self._file.close()
        flush(self._path)


def _header(entries: Sequence[TensorEntry]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise RunError(f"{entry.name} is {entry.dtype}, which safetensors files do not have")
        end = start + entry.nbytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    return header
