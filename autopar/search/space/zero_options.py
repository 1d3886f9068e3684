"""What the option ``zero`` fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from autopar.errors import PlanError


@dataclass(frozen=True)
class ZeroOptions:
    """What the user fixed of the storage of parameters and of the optimizer's state.

    Attributes:
        stage: 0 to 3; None where that is free.
        offloads_optimizer: whether the optimizer's state must be in the memory of the host between
            steps.
    """

    stage: int | None = None
    offloads_optimizer: bool = False


def zero_options(value: Any) -> ZeroOptions:
    """What ``zero`` fixes: nothing (None), a stage, or what a dict says.

    Raises:
        PlanError: the value is none of these.
    """
    if not isinstance(value, Mapping):
        return ZeroOptions(_stage(value, value))
    if not value or not set(value) <= {"stage", "offload"}:
        keys = ", ".join(map(str, value)) or "nothing"
        raise PlanError(f"zero={value!r} gives {keys}: give stage, offload or both")
    if value.get("offload") not in (None, "optimizer"):
        raise PlanError(
            f'zero={value!r}: offload is {value["offload"]!r}, give "optimizer" to keep the '
            "optimizer's state in the memory of the host, or leave it out"
        )
    return ZeroOptions(_stage(value.get("stage"), value), value.get("offload") == "optimizer")


def _stage(stage: Any, value: Any) -> int | None:
    is_number = isinstance(stage, Integral) and not isinstance(stage, bool)
    if stage is None:
        return None
    if not is_number or not 0 <= stage <= 3:
        raise PlanError(
            f'zero={value!r}: give 0, 1, 2 or 3, or dict(stage=..., offload="optimizer") to keep '
            "the optimizer's state in the memory of the host"
        )
    return int(stage)
