"""How a checkpoint becomes complete, and how old ones go.

It is written beside its path, under a name that ends in ``.partial``, flushed to the disk, and then
renamed. So a folder under its own name is complete, whenever the run or the machine stops.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from autopar.errors import RunError
from autopar.formatting.files import flush, real_path
from autopar.runtime.checkpoint.files.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    TornError,
    check_contents,
    check_sizes,
    read_manifest,
    write_manifest,
)

_PARTIAL = ".partial"


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """``path`` without links. Raises :class:`RunError` for what is no path."""
    return real_path(path, "a folder", RunError)


def partial_folder(path: Path) -> Path:
    """Where a checkpoint lies until it is complete."""
    return path.with_name(path.name + _PARTIAL)


def is_partial(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint that is not complete."""
    return path.name.endswith(_PARTIAL)


def check_free(path: Path) -> None:
    """Raises :class:`RunError` where a checkpoint cannot be made at ``path``: it may replace only a
    torn one.
    """
    if is_partial(path):
        raise RunError(f"{path}: names that end in {_PARTIAL} are those of incomplete checkpoints")
    if path.exists() and not _is_torn(path):
        raise RunError(
            f"{path} exists, and a checkpoint does not replace another: give each its own path, "
            "such as checkpoints/step-1000, and keep=2 to keep the last two"
        )


def _is_torn(path: Path) -> bool:
    """Whether there is a checkpoint of which something is missing. Reads it."""
    if not (path / MANIFEST).exists():
        return False  # a folder of something else
    try:
        check_contents(path, read_manifest(path).files)
    except TornError:
        return True
    return False


def begin(path: Path) -> None:
    """Makes the folder to write to, empty."""
    discard(path)
    partial_folder(path).mkdir(parents=True)


def discard(path: Path) -> None:
    """Removes what was written of an incomplete checkpoint."""
    if (partial := partial_folder(path)).exists():
        shutil.rmtree(partial)


def complete(path: Path, files: list[FileRecord], keep: int | None) -> None:
    """Makes the written checkpoint complete. Then removes all complete ones of the same parent but
    the last ``keep``, if ``keep`` is given.
    """
    partial = partial_folder(path)
    others = complete_checkpoints(path.parent)
    manifest = Manifest(1 + max((number for number, _ in others), default=0), tuple(files))
    try:
        check_sizes(partial, manifest)
    except TornError as e:
        raise RunError(
            f"rank 0 does not see what all ranks wrote: {e}. Save to a folder that all ranks share"
        ) from None
    write_manifest(partial, manifest)
    flush(partial)
    check_free(path)
    if path.exists():
        shutil.rmtree(path)  # a torn one
    partial.rename(path)
    flush(path.parent)
    own = [other for _, other in others if other.parent == path.parent and other != path]
    for old in own[keep - 1 :] if keep else []:
        begun = partial_folder(old)
        discard(old)
        old.rename(begun)  # what is half removed looks like what it is
        shutil.rmtree(begun)


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The numbers and paths of the complete checkpoints in ``folder``, the newest first. Reads
    manifests and sizes, no contents.
    """
    found = []
    for path in subfolders(folder):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except RunError:
            continue
        found.append((manifest.number, path))
    return sorted(found, reverse=True)


def subfolders(folder: Path) -> list[Path]:
    """The folders in ``folder``, without links and each once, that are no incomplete checkpoints by
    their name; sorted.
    """
    if not folder.is_dir():
        return []
    found = {p.resolve() for p in folder.iterdir() if p.is_dir()}
    return sorted(p for p in found if not is_partial(p))


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint among those in ``folder``; None where there is none.

    It reads manifests and sizes; ``compiled.load(folder)`` verifies the contents as well, and goes
    on to an older one where they are damaged. Raises :class:`RunError` if ``folder`` is no path.
    """
    found = complete_checkpoints(checkpoint_path(folder))
    return found[0][1] if found else None
