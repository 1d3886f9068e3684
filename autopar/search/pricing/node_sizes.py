"""Bytes and dtypes of a node's tensors, and the number of chunks that a layout makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.ir.nodes import result_tensors


def tensor_bytes(node: fx.Node) -> int:
    """The bytes of a node's whole tensor, or of all its results together."""
    return sum(t.numel() * t.dtype.itemsize for t in result_tensors(node))


def chunk_count(layout: Layout, sizes: Sequence[int]) -> int:
    """The number of different chunks into which a layout cuts a tensor on a mesh of ``sizes``."""
    return _chunk_count(layout, tuple(sizes))


@lru_cache(maxsize=2**16)
def _chunk_count(layout: Layout, sizes: tuple[int, ...]) -> int:
    return math.prod(n for t, n in zip(layout, sizes, strict=True) if t.is_shard)


def result_dtype(node: fx.Node) -> str:
    """The dtype of a call's first result, as the cost model names it."""
    return str(result_tensors(node)[0].dtype)


def stored_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a parameter or buffer between steps; the node's value has the dtype that the
    graph computes in.
    """
    dtype: torch.dtype = node.meta.get("stored", node.meta["val"].dtype)
    return dtype
