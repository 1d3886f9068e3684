"""The rows of ``gpu.py``, as a table and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate


@dataclass(frozen=True)
class Row:
    """One comparison: ``value`` beside ``reference``, in ``unit`` ("s" or "bytes"), and their ratio
    with its interval, if it was measured in turns. ``error``: why there are no numbers.
    """

    part: str
    model: str
    case: str
    unit: str = ""
    reference: float | None = None
    value: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    error: str = ""


def table(rows: Iterable[Row]) -> str:
    headers = ("part", "model", "case", "reference", "ours / measured", "ratio", "95 %")
    cells = []
    for row in rows:
        interval = "" if row.low is None else f"{row.low:.3f} - {row.high:.3f}"
        numbers = _number(row.reference, row.unit), _number(row.value, row.unit)
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        cells.append((row.part, row.model, row.case, *numbers, ratio, row.error[:80] or interval))
    return tabulate(cells, headers=headers, disable_numparse=True)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value / 2**20:,.1f} MiB" if unit == "bytes" else f"{1e3 * value:.2f} ms"


def write(path: Path, rows: Sequence[Row], device: torch.device, small: bool) -> None:
    """Writes the rows and what they were measured with as JSON."""
    is_gpu = device.type == "cuda"
    found = dict(
        device=torch.cuda.get_device_name(device) if is_gpu else "cpu",
        torch=torch.__version__,
        cuda=torch.version.cuda if is_gpu else None,
        small=small,
        rows=[asdict(row) for row in rows],
    )
    path.write_text(json.dumps(found, indent=1) + "\n")
