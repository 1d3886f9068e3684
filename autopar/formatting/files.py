"""Writes files as a whole: an interrupted write leaves the old file."""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, PlanError


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
    has the same ending as ``path``. The disk has the file before it takes the place of the old one,
    whose permissions it gets; a new file has those that the user's umask leaves. Of a link, the
    file that it leads to is written.

    Raises:
        PlanError: ``path`` is no path.
        OSError: the system does not allow the write.
    """
    target = real_path(path, "a file to write", PlanError)
    temporary = target.with_name(f"{target.name}.tmp{uuid.uuid4().hex}{target.suffix}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        write(str(temporary))
        flush(temporary)
        os.replace(temporary, target)
        flush(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def real_path(path: str | os.PathLike[str], of: str, error: type[AutoparError]) -> Path:
    """``path`` without links. Raises ``error`` for what is no path; ``of`` says what the path
    should be of.
    """
    try:
        name = os.fsdecode(path)
        if not name or "\0" in name:
            raise ValueError
    except (TypeError, ValueError):
        raise error(f"path={path!r:.100}: give the path of {of}") from None
    return Path(os.path.realpath(name))


def flush(path: Path) -> None:
    """Waits until the disk has a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
