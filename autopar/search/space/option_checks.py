"""Checks of single options: each raises PlanError with the option, what was given, what to give."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from autopar.errors import PlanError
from autopar.ir.plan_data import PIPELINE
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


def check_placement(
    placement: Any, known: Collection[str], in_order: bool, parallel: Mapping[str, Any] | None
) -> None:
    """Raise PlanError if the option ``placement`` is no order of axes and the pipeline.

    Args:
        known: the names that there are.
        in_order: whether the names but the pipeline's have the order of ``known``.
        parallel: the option of this name; its sizes of 1 may be left out.
    """
    example = 'placement=("data", "pipeline", "tensor")'
    names = list(placement) if isinstance(placement, Sequence) else []
    if isinstance(placement, str) or not names or not all(isinstance(n, str) for n in names):
        raise PlanError(
            f"placement={placement!r}: give the names {', '.join(known)} in the order of their "
            f"links, slowest first, for example {example}"
        )
    optional = {PIPELINE} if in_order else set()
    if parallel is not None:
        optional = {name for name in known if parallel.get(name, 1) == 1}
    missing = [name for name in known if name not in names and name not in optional]
    if missing or len(set(names)) < len(names) or not set(names) <= set(known):
        raise PlanError(
            f"placement={tuple(names)}: give each of {', '.join(known)} once, slowest links first"
        )
    axes = [name for name in names if name != PIPELINE]
    if in_order and axes != [name for name in known if name != PIPELINE]:
        raise PlanError(
            f"placement={tuple(names)}: mesh= gives the order of its axes, slowest links first, so "
            f"that only the place of {PIPELINE!r} is open"
        )
