"""Plain data in files: numbers, strings, bytes, tensors, and containers of them. ``torch.save``
writes it, and torch's reader for weights only, which runs no code of the file, reads it.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import RunError


def to_bytes(**values: Any) -> bytes:
    """The contents of a file with a dictionary of ``values``.

    Raises :class:`RunError` with the name of a value that is no plain data.
    """
    try:
        return _checked(values)
    except Exception:  # pickle raises any kind; the values one by one say which
        for name, value in values.items():
            _check_plain(name, value)
        raise


def _check_plain(name: str, value: Any) -> None:
    try:
        _checked(value)
    except Exception as e:
        kind = re.search(r"GLOBAL (\S+)", str(e))
        found = f"an object of {kind[1]}" if kind else f"{type(e).__name__}: {e!s:.200}"
        raise RunError(
            f"the state of {name} is no plain data, but a checkpoint holds only that, so that "
            f"reading one runs no code: found {found}. Give numbers, strings, bytes, tensors, and "
            "lists, tuples and dictionaries of them"
        ) from None


def _checked(value: Any) -> bytes:
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
        raise TypeError("a DTensor, of which each rank has a part; full_tensor() gives the whole")
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)
    return file.getvalue()


def read_plain(path: Path) -> Any:
    """What a file holds, with tensors on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def same(one: Any, other: Any) -> bool:
    """Whether two values of plain data are equal, tensors to the bit."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == other_spec and all(map(_same_leaf, leaves, others))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other or (one != one and other != other))  # not a number, twice
