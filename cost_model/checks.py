"""Checks of a cluster's figures. Each names the figure and its value in the error."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from autopar.errors import PlanError


def check_positive(name: str, value: Any, zero: bool = False) -> None:
    """Raises PlanError unless ``value`` is a finite number above 0, or with ``zero`` at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and (value >= 0 if zero else value > 0)):
        raise PlanError(
            f"{name} is {value!r}: give a number {'of at least' if zero else 'above'} 0"
        )


def check_fraction(name: str, value: Any, of: str, zero: bool = True) -> None:
    """Raises PlanError unless ``value`` is a part of ``of``, from 0 (or above 0) to 1."""
    check_positive(name, value, zero)
    if value > 1:
        raise PlanError(f"{name} is {value!r}: give the part of {of}, at most 1")


def check_curve(name: str, curve: Any, most: float = math.inf) -> None:
    """Raises PlanError unless ``curve`` is a tuple of points (work, value) with growing work and
    values of at most ``most``.
    """
    pairs = (
        isinstance(curve, tuple)
        and curve
        and all(isinstance(point, tuple) and len(point) == 2 for point in curve)
    )
    if not pairs:
        raise PlanError(f"{name} is {curve!r}: give a list of points [work, value], at least one")
    for work, value in curve:
        check_positive(f"{name}: the work of a point", work)
        check_positive(f"{name} at {work:g}", value)
        if value > most:
            raise PlanError(f"{name} at {work:g} is {value!r}: at most {most:g}")
    if any(a[0] >= b[0] for a, b in pairwise(curve)):
        raise PlanError(f"{name}: the work of its points must grow")
