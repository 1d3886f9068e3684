"""Which checkpoint is loaded: all ranks verify one together, and agree on the newest that is
whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.checkpoint.files.folder import complete_checkpoints, is_partial, subfolders
from autopar.runtime.checkpoint.files.manifest import (
    MANIFEST,
    TornError,
    check_contents,
    check_sizes,
    read_manifest,
)


def verified_checkpoint(path: Path, group: dist.ProcessGroup) -> Path:
    """The checkpoint ``path``, or the newest one in the folder ``path``, once each of its bytes was
    read and compared with the manifest. Each rank reads some of the files. All ranks of ``group``
    must call it. Rank 0 warns of checkpoints that are skipped because they are torn.

    Raises :class:`RunError`, on every rank, where there is none.
    """
    candidates, skipped = _on_rank_0(group, lambda: _candidates(path))
    for folder in candidates:
        problem = _first_problem(folder, group)
        if problem is None:
            if skipped and dist.get_rank(group) == 0:
                reasons = "; ".join(skipped)
                message = f"{folder} is loaded; others are not whole: {reasons}"
                warnings.warn(message, stacklevel=4)  # where compiled.load is called
            return folder
        skipped.append(problem)
    reasons = ": " + "; ".join(skipped) if skipped else ""
    raise RunError(f"{path} has no checkpoint that is whole{reasons}")


def _candidates(path: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints, the newest first, and why others are none."""
    if (path / MANIFEST).exists() or not subfolders(path):
        check_sizes(path, read_manifest(path))
        return [path], []
    complete = complete_checkpoints(path)
    known = [folder for _, folder in complete]
    reasons = [_reason(folder) for folder in subfolders(path) if folder not in known]
    begun = [p for p in path.iterdir() if p.is_dir() and is_partial(p)]
    reasons += [f"{p} was not completed" for p in sorted(begun)]
    return known, [reason for reason in reasons if reason]


def _reason(folder: Path) -> str:
    """Why a folder is no complete checkpoint. Raises what is more than a torn one."""
    if not (folder / MANIFEST).exists():
        return ""  # a folder of something else
    try:
        check_sizes(folder, read_manifest(folder))
    except TornError as e:
        return str(e)
    return ""


def _first_problem(folder: Path, group: dist.ProcessGroup) -> str | None:
    """Why a checkpoint is not whole, the same on all ranks; None where it is."""
    problem: str | None = None
    try:
        files = read_manifest(folder).files
        check_contents(folder, files[dist.get_rank(group) :: dist.get_world_size(group)])
    except Exception as e:  # sent to all ranks
        problem = str(e)
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return next((p for p in problems if p is not None), None)


def _on_rank_0(group: dist.ProcessGroup, work: Callable[[], Any]) -> Any:
    """What ``work`` returns on rank 0, on every rank; or its error, on every rank."""
    found: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            found[0] = work()
        except Exception as e:  # raised below, on every rank
            found[1] = str(e)
    dist.broadcast_object_list(found, group=group, group_src=0)
    if found[1] is not None:
        raise RunError(found[1])
    return found[0]
