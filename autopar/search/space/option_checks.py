"""Checks of single options: each raises PlanError with the option, what was given, what to give."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from autopar.errors import PlanError
from autopar.ir.plan_json import LARGEST


def check_choice(name: str, value: Any, known: Collection[str], otherwise: str = "") -> None:
    """Raise PlanError if an option is none of the ``known`` values."""
    if not isinstance(value, str) or value not in known:
        raise PlanError(f"{name}={value!r}: give one of {', '.join(known)}{otherwise}")


def check_whole(name: str, value: Any, meaning: str) -> None:
    """Raise PlanError if an option is no whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: {meaning}, a whole number of at least 1")


def check_positive(name: str, value: Any, meaning: str) -> None:
    """Raise PlanError if an option is no number above 0, or too large for a plan file."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value > 0 or LARGEST**2 < value < math.inf:
        raise PlanError(f"{name}={value!r}: {meaning}, a number above 0")
