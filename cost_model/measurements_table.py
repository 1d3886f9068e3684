"""Rates of measured kernels from a table, as figures of a device.

The table is a CSV file with the columns ``kernel``, ``shape`` and one that says the rate: ``share
of N TFLOP/s``, where N is the peak of the device, or ``TFLOP/s``. A shape is "name=number, ...";
names that are not listed here are ignored. The kernels are

- ``matmul``: ``b`` products (1 if absent) of ``m`` x ``k`` and ``k`` x ``n``;
- ``group_matmul``: ``ng`` products of ``M`` x ``K`` and ``K`` x ``N``;
- ``sdp_fwd`` and ``sdp_bwd``: causal attention of ``batch`` sequences of ``seq_len`` with
  ``head_num`` heads of ``qk_head_dim`` and ``v_head_dim``. Its rate counts all scores, also those
  that the mask leaves out, and for the backward 2.5 times the FLOPs of the forward.
"""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.cost_model.device import Curve, Device
from autopar.cost_model.products import Product
from autopar.errors import PlanError

_SHARE = re.compile(r"share of (\d+(?:\.\d+)?) TFLOP/s")
_RATE = "TFLOP/s"
_SIZES = {  # the names of count, rows, columns, inner
    "matmul": ("b", "m", "n", "k"),
    "group_matmul": ("ng", "M", "N", "K"),
}
_ATTENTION = {
    "sdp_fwd": "_scaled_dot_product_flash_attention",
    "sdp_bwd": "_scaled_dot_product_flash_attention_backward",
}
_BACKWARD = 2.5  # FLOPs of attention's backward, relative to its forward
_CAUSAL = 0.5  # the part of the scores that a causal mask keeps


def with_measured_kernels(
    device: Device, path: str | os.PathLike[str], dtype: str = "bfloat16"
) -> Device:
    """``device`` with the rates of the kernels in a table.

    Args:
        device: its peaks, its memory, and the figures of kernels that the table does not have.
        path: the table.
        dtype: the dtype of the measured kernels.

    Raises:
        PlanError: the file cannot be read, has other columns or kernels, or a shape lacks a number.
    """
    products: list[Product] = []
    attention: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line, kernel, sizes, flops_per_second in _rows(Path(path)):
        share = flops_per_second / device.peak[dtype]
        try:
            if kernel in _SIZES:
                count, rows, columns, inner = (
                    sizes.get(name, 1 if name == "b" else 0) for name in _SIZES[kernel]
                )
                products.append(Product(count, rows, columns, inner, share))
            else:
                flops = _attention_flops(sizes) * (_BACKWARD if kernel == "sdp_bwd" else 1.0)
                attention[_ATTENTION[kernel]][flops * _CAUSAL].append(share * _CAUSAL)
        except KeyError as error:
            raise PlanError(f"{path}, line {line}: the shape of {kernel} lacks {error}") from error
        except PlanError as error:
            raise PlanError(f"{path}, line {line}: {error}") from error
    curves = {operator: _curve(points) for operator, points in attention.items()}
    forward = curves.get(_ATTENTION["sdp_fwd"])
    measured = {**({"attention": forward} if forward else {}), **curves}
    others = {n: c for n, c in device.efficiency.items() if n.partition(".")[0] not in measured}
    efficiency = {**others, **measured}  # also in place of the curves of single dtypes
    return replace(device, efficiency=efficiency, products=(*device.products, *products))


def _curve(points: Mapping[float, list[float]]) -> Curve:
    """The mean share at each amount of work, lowered where less work would take more time."""
    work = np.array(sorted(points))
    shares = np.array([np.exp(np.mean(np.log(points[w]))) for w in work])
    seconds = np.maximum.accumulate(work / shares)
    return tuple((float(w), float(f"{w / s:.4g}")) for w, s in zip(work, seconds, strict=True))


def _rows(path: Path) -> list[tuple[int, str, Mapping[str, int], float]]:
    """The line number, the kernel, the sizes and the FLOP/s of each row."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header, lines = reader.fieldnames or [], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"cannot read the table {path}: {error}") from error
    found = [name for name in header if name == _RATE or _SHARE.fullmatch(name)]
    if not {"kernel", "shape"} <= set(header) or len(found) != 1:
        raise PlanError(
            f"{path} has the columns {', '.join(header) or 'none'}: give kernel, shape, and one of "
            f"'share of N TFLOP/s' and '{_RATE}'"
        )
    (column,) = found
    share = _SHARE.fullmatch(column)
    unit = 1e12 * (float(share[1]) if share else 1.0)
    rows: list[tuple[int, str, Mapping[str, int], float]] = []
    for line, row in enumerate(lines, 2):
        known = (*_SIZES, *_ATTENTION)
        if row["kernel"] not in known:
            raise PlanError(
                f"{path}, line {line}: kernel {row['kernel']!r} is unknown; the kernels are "
                f"{', '.join(known)}"
            )
        sizes = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)\b", row["shape"] or "")}
        try:
            rows.append((line, row["kernel"], sizes, unit * float(row[column])))
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"{path}, line {line}: {column} is {row[column]!r}: give a number"
            ) from error
    return rows


def _attention_flops(sizes: Mapping[str, int]) -> float:
    """FLOPs of a forward over all scores."""
    scores = float(sizes["batch"] * sizes["head_num"] * sizes["seq_len"] ** 2)
    return 2.0 * scores * (sizes["qk_head_dim"] + sizes["v_head_dim"])
