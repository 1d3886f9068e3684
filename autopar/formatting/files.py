"""Writes files as a whole: an interrupted write leaves the old file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import PlanError


def write_json(path: str | os.PathLike[str], data: Any, indent: int | None = None) -> None:
    """Writes ``data`` as JSON to ``path``. Where writing fails, ``path`` stays unchanged.

    Raises:
        PlanError: ``path`` is no path.
        OSError: the system does not allow the write.
    """
    text = json.dumps(data, indent=indent) + "\n"
    write_whole(path, lambda file: Path(file).write_text(text, encoding="utf-8"))


def write_whole(path: str | os.PathLike[str], write: Callable[[str], Any]) -> None:
    """Writes a file, or leaves the old one. ``write`` writes to the path that it is given, which
    has the same ending as ``path``.

    Raises:
        PlanError: ``path`` is no path.
        OSError: the system does not allow the write.
    """
    try:
        name = os.fsdecode(path)
        if not name or "\0" in name:
            raise ValueError
    except (TypeError, ValueError):
        raise PlanError(f"path={path!r:.100}: give the path of a file to write") from None
    target = Path(name)
    handle, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f"{target.name}.tmp", suffix=target.suffix
    )
    os.close(handle)
    try:
        write(temporary)
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would keep a shared file from others
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
