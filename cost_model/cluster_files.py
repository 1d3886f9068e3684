"""Finds and reads the file of a cluster: that of a preset, or one at a path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import PlanError

Made = TypeVar("Made")


def cluster_of_file(
    name_or_path: str | os.PathLike[str],
    software: str | None,
    presets: Path,
    make: Callable[[Any, str | None], Made],
) -> Made:
    """What ``make`` makes of the contents of a file and of the software's name.

    Args:
        name_or_path: a preset's name, with the software after a colon if that is not given, or a
            path.
        presets: the folder of the presets.

    Raises:
        PlanError: there is no such file, its contents are not JSON, or ``make`` raises it.
    """
    names = sorted(path.stem for path in presets.glob("*.json"))
    if isinstance(name_or_path, str) and software is None:
        preset, colon, named = name_or_path.partition(":")
        if colon and preset in names:
            name_or_path, software = preset, named
    path = _path(name_or_path, names, presets)
    data = _contents(path, names)
    try:
        return make(data, software)
    except PlanError as error:
        raise PlanError(f"cluster file {path}: {error}") from error


def _path(name_or_path: str | os.PathLike[str], names: list[str], presets: Path) -> Path:
    known = ", ".join(names)
    try:
        path = Path(os.fsdecode(name_or_path))
        exists = path.exists()
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"cluster={name_or_path!r:.100}: give one of {known}, or a cluster file's path"
        ) from error
    if path.suffix == ".json" or len(path.parts) != 1 or exists:
        return path
    if path.name not in names:
        raise PlanError(
            f"no cluster {path.name!r}: the presets are {known}; or give the path of a cluster's "
            ".json file"
        )
    return presets / f"{path.name}.json"


def _contents(path: Path, names: list[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"cannot read the cluster file {path}: {error.strerror}; the presets are "
            f"{', '.join(names)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the cluster file {path} is not JSON: {error}") from error
