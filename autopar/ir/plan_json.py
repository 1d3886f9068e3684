"""A plan as JSON data and back. Data from a file is checked field by field; an error names the
field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union

from autopar.errors import PlanError
from autopar.ir.layout import Layout, format_layout, parse_layout
from autopar.ir.schedules import unknown_schedule

if typing.TYPE_CHECKING:
    from autopar.ir.plan_data import PlanData

AnyPlan = TypeVar("AnyPlan", bound="PlanData")
# What files of this version that were written before a field was added have there.
_ADDED: dict[str, Any] = {
    "backend": "eager",
    "schedule_order": "",
    "offloaded": [],
    "zero_buckets": [],
    "prefetch": 0,
}
_ADDED_INSIDE: dict[str, dict[str, Any]] = {
    "parameters": {"offloaded": False},
    "stages": {"host": {}},
}
LARGEST = 2**53  # every reader of JSON holds whole numbers up to this one exactly


def read_plan(path: str | os.PathLike[str], version: int, kind: type[AnyPlan]) -> AnyPlan:
    """The plan in a file of JSON data from :func:`to_json_data`.

    Raises:
        PlanError: the file cannot be read, is no plan, has another version, or is damaged; the
            message names the field.
    """
    try:
        name = os.fspath(path)
    except TypeError as e:
        raise PlanError(f"path={path!r}: give the path of a file that Plan.save wrote") from e
    try:
        data = json.loads(Path(os.fsdecode(name)).read_text(encoding="utf-8"))
    except OSError as e:
        raise PlanError(f"cannot read the plan {name!r}: {e.strerror}; Plan.save writes one") from e
    except (ValueError, RecursionError) as e:
        raise PlanError(f"{name} is no plan: {type(e).__name__}: {e}. Plan.save writes one") from e
    if not isinstance(data, dict) or "version" not in data:
        raise PlanError(f"{name} is no plan: it has no version. Plan.save writes one")
    if (found := data.pop("version")) != version:
        raise PlanError(
            f"{name} has plan version {found!r:.20}, this autopar reads {version}: plan again"
        )
    schedule = data.get("schedule")
    if isinstance(schedule, str) and (unknown := unknown_schedule(schedule)) is not None:
        raise PlanError(f"{name}: {unknown}")
    try:
        return from_json_data(_with_added(data), kind)
    except (PlanError, RecursionError) as e:
        raise PlanError(f"{name} is a damaged plan: {e}. Plan again, or undo the edit") from e


def _with_added(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a file with what fields have there that were added since."""
    data = _ADDED | data
    for name, added in _ADDED_INSIDE.items():
        parts = data.get(name)
        if isinstance(parts, dict):
            data[name] = {key: _joined(added, each) for key, each in parts.items()}
        elif isinstance(parts, list):
            data[name] = [_joined(added, each) for each in parts]
    return data


def _joined(added: dict[str, Any], part: Any) -> Any:
    return added | part if isinstance(part, dict) else part


def to_json_data(plan: PlanData) -> dict[str, Any]:
    """``plan`` as JSON data, layouts as text."""
    data = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    data["nodes"] = {
        name: {
            "in": [format_layout(i) for i in n.ins],
            "out": format_layout(n.out),
            "factors": list(n.factors),
            "kernels": list(n.kernels),
        }
        for name, n in plan.nodes.items()
    }
    data["stages"] = [dataclasses.asdict(stage) for stage in plan.stages]
    data["parameters"] = {
        name: {
            "stored": format_layout(p.stored),
            "used": format_layout(p.used),
            "offloaded": p.offloaded,
        }
        for name, p in plan.parameters.items()
    }
    return data


def from_json_data(data: Any, kind: type[AnyPlan]) -> AnyPlan:
    """The plan that :func:`to_json_data` wrote.

    Raises:
        PlanError: a field has not the type that a plan has there; the message names the field.
    """
    plan: AnyPlan = _read_object(data, kind, "")
    return plan


def validated_plan(plan: Any, kind: type[AnyPlan]) -> AnyPlan:
    """``plan``, after a check of every part of it: a program may have put anything into its fields.

    Raises:
        PlanError: ``plan`` is no plan, or a part of it has not the type that a plan has there.
    """
    if not isinstance(plan, kind):
        raise PlanError(
            f"plan={plan!r:.100}: give an autopar.Plan; Plan.load reads one from a file"
        )
    try:
        same = from_json_data(to_json_data(plan), kind) == plan
    except (AttributeError, TypeError, ValueError, RecursionError) as e:
        raise PlanError(
            f"a part of the plan is not what a plan has there: {e}; plan again, or undo the edit"
        ) from e
    except PlanError as e:
        raise PlanError(f"{e}; plan again, or undo the edit") from e
    if not same:
        raise PlanError(
            "a part of the plan is not what a plan has there: saved and loaded it is another one; "
            "plan again, or undo the edit"
        )
    return plan


_KEYS = {"ins": "in"}  # the names in the file, where they differ from the fields' names


@cache
def _fields(kind: type) -> dict[str, tuple[str, Any]]:
    """For each name in the file, the field's name and type."""
    hints = typing.get_type_hints(kind)
    return {_KEYS.get(f.name, f.name): (f.name, hints[f.name]) for f in dataclasses.fields(kind)}


def _read_object(data: Any, kind: type, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where or "the plan", data, "an object")
    fields, prefix = _fields(kind), f"{where}." if where else ""
    if missing := [prefix + name for name in fields if name not in data]:
        raise PlanError(f"{', '.join(missing[:5])} missing")
    if unknown := [f"{prefix}{name!s:.50}" for name in data if name not in fields]:
        raise PlanError(f"{', '.join(unknown[:5])} unknown")
    return kind(
        **{field: _read(data[name], hint, prefix + name) for name, (field, hint) in fields.items()}
    )


def _read(value: Any, hint: Any, where: str) -> Any:
    """``value`` of JSON as a value of type ``hint``."""
    if hint == Layout:
        return _text(value, parse_layout, where)
    if dataclasses.is_dataclass(hint):
        return _read_object(value, hint, where)  # type: ignore[arg-type]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(value, inside[0], where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "an object")
        return {
            _read(key, str, f"a key of {where}"): _read(each, inside[1], f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if origin in (list, tuple):
        return _read_list(value, origin, inside, where)
    return _read_plain(value, hint, where)


def _read_list(value: Any, origin: type, inside: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong(where, value, "a list")
    each = inside[:1] * len(value) if origin is list or inside[1:] == (...,) else inside
    if len(each) != len(value):
        raise _wrong(where, value, f"a list of {len(each)}")
    return origin(
        _read(one, hint, f"{where}[{i}]")
        for i, (one, hint) in enumerate(zip(value, each, strict=True))
    )


def _read_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return _json(value, where)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and number and isinstance(value, int) and 0 <= value <= LARGEST:
        return value
    if hint is float and number and abs(value) < math.inf and 0 <= value <= float(LARGEST) ** 2:
        return value
    wanted = {
        str: "a text",
        bool: "true or false",
        int: "a whole number, not negative",
        float: "a number, not negative",
    }
    raise _wrong(where, value, wanted[hint])


def _json(value: Any, where: str) -> Any:
    """``value``, if it is JSON with finite numbers, as reports and options hold it."""
    if isinstance(value, (list, tuple)):
        return [_json(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _read_plain(key, str, f"a key of {where}"): _json(one, f"{where}[{key!r}]")
            for key, one in value.items()
        }
    if (
        value is None
        or isinstance(value, (str, bool))
        or (isinstance(value, (int, float)) and abs(value) <= float(LARGEST) ** 2)
    ):
        return value
    raise _wrong(where, value, "a text, a number, a list or an object")


def _text(value: Any, parse_layout: Any, where: str) -> Any:
    try:
        return parse_layout(value)
    except (ValueError, TypeError, AttributeError) as e:
        raise PlanError(
            f"{where} is {value!r:.100}, no layout{f': {e}' if isinstance(value, str) else ''}"
        ) from e


def option_as_json(value: Any) -> Any:
    """The value that a user gave for an option, as JSON. A value that JSON has no form for becomes
    its name, or its text.
    """
    if isinstance(value, Mapping):
        return {str(key): option_as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [option_as_json(one) for one in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value) if not isinstance(value, bool) else value
    if value is None or isinstance(value, (str, bool)):
        return value
    named = getattr(value, "__qualname__", None) or getattr(value, "name", None)
    return str(named or (os.fsdecode(value) if isinstance(value, os.PathLike) else value))


def _wrong(where: str, value: Any, wanted: str) -> PlanError:
    try:
        found = f"{value!r:.100}"
    except ValueError:  # Python refuses to print a whole number of very many digits
        found = f"a {type(value).__name__}"
    return PlanError(f"{where} is {found}: give {wanted}")
