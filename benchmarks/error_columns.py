"""Errors of predictions, as the tables of ``accuracy.py`` show them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable


def errors(predicted: Iterable[float], measured: Iterable[float]) -> tuple[str, str, str, str]:
    """Mean, median and worst error without its sign, and the mean with it, in %."""
    off = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    size = [abs(x) for x in off]
    return (
        f"{statistics.mean(size):.2f}",
        f"{statistics.median(size):.2f}",
        f"{max(size):.1f}",
        f"{statistics.mean(off):+.2f}",
    )
