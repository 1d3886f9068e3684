"""A checkpoint of ``compiled.save`` where a trainer keeps its own."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.module.compiled import Compiled


def save_replacing(compiled: Compiled, path: Path, **given: Any) -> None:
    """``compiled.save`` at once, also where a checkpoint is at ``path``, which goes away when the
    new one is complete. All ranks must call it.
    """
    new = path.with_name(f"{path.name}-new")
    run_on_all_ranks(f"saving {path}", partial(_on_first_rank, _remove, new))
    compiled.save(new, **given, wait=True)
    run_on_all_ranks(f"saving {path}", partial(_on_first_rank, _rename, new, path))


def _on_first_rank(work: Any, *paths: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        work(*paths)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _rename(new: Path, path: Path) -> None:
    old = path.with_name(f"{path.name}-old")
    _remove(old)
    if path.exists():
        path.rename(old)
    new.rename(path)
    _remove(old)
