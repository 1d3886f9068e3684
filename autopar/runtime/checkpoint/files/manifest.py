"""The manifest of a checkpoint: its number, and its files with their sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.errors import RunError
from autopar.formatting.files import flush

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "autopar checkpoint"
_READ_BYTES = 1 << 22  # at a time


class TornError(RunError):
    """A checkpoint that is not whole: files are missing or have other bytes than were written."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its name in the folder, its size in bytes and its checksum."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``number`` counts the checkpoints of one folder up from 1; ``files`` are all other files of
    the checkpoint.
    """

    number: int
    files: tuple[FileRecord, ...]


def record_of(path: Path) -> FileRecord:
    """The record of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
            size += len(part)
    return FileRecord(path.name, size, digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of ``folder`` and flushes it."""
    data = {"format": _FORMAT, "version": VERSION, **asdict(manifest)}
    path = folder / MANIFEST
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    flush(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``.

    Raises:
        TornError: there is no manifest, or it is not whole.
        RunError: it has another version, or another program wrote the folder.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise _no_manifest(folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, version = data["format"], data["version"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise TornError(f"{path} is not the manifest of a checkpoint ({e})") from None
    if kind != _FORMAT:
        raise RunError(f"{folder} is no checkpoint of autopar: {path} has the format {kind!r:.80}")
    if version != VERSION:
        raise RunError(
            f"{folder} is a checkpoint of version {version!r:.20}, and this autopar reads version "
            f"{VERSION}: use the autopar that wrote it, or a later one"
        )
    try:
        files = tuple(_file_record(entry) for entry in data["files"])
        return Manifest(int(data["number"]), files)
    except (ValueError, KeyError, TypeError) as e:
        raise TornError(f"{path} is not whole ({type(e).__name__}: {e})") from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises :class:`TornError` unless each file of the manifest exists and has its size."""
    for record in manifest.files:
        _check(folder, record, _size(folder / record.name), record.bytes, "bytes")


def check_contents(folder: Path, records: Iterable[FileRecord]) -> None:
    """Raises :class:`TornError` unless each file has its size and its checksum. It reads them."""
    for record in records:
        _check(folder, record, _size(folder / record.name), record.bytes, "bytes")
        found = record_of(folder / record.name)
        _check(folder, record, found.sha256, record.sha256, "as its SHA-256")


def _check(folder: Path, record: FileRecord, found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise TornError(
            f"{folder / record.name} is not as it was written: it has {found} {what}, and the "
            f"manifest says {expected}"
        )


def _size(path: Path) -> int | str:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return "no"


def _file_record(entry: Any) -> FileRecord:
    record = FileRecord(str(entry["name"]), int(entry["bytes"]), str(entry["sha256"]))
    if record.name != os.path.basename(record.name) or record.name in ("", ".", ".."):
        raise ValueError(f"{record.name!r:.80} is no name of a file in the folder")
    return record


def _no_manifest(folder: Path) -> RunError:
    if (folder / ".metadata").exists():
        return RunError(
            f"{folder} was written by torch.distributed.checkpoint itself, whose metadata is a "
            "pickle, which autopar does not read. Where you trust the file, load it with "
            "torch.distributed.checkpoint.load into compiled.state_dict(), and save it with "
            "compiled.save"
        )
    found = "has no manifest: it is not complete" if folder.is_dir() else "does not exist"
    return TornError(f"{folder} {found}")
