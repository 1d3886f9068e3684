"""What may go wrong while a run is saved or loaded: every rank hears of it, and the checkpoint
before is whole.
"""

from __future__ import annotations

import json
import os
import resource
import stat
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpointed import Run, compiled_under
from pool import Pools
from torch import nn

import autopar
from autopar.errors import RunError
from autopar.runtime.checkpoint.files import plain_state, storage
from autopar.runtime.checkpoint.files.folder import begin, check_free, checkpoint_path, complete
from autopar.runtime.checkpoint.files.manifest import MANIFEST, read_manifest


def _names(folder: Path) -> list[str]:
    dist.barrier()  # ranks look at the same moment
    names = sorted(p.name for p in folder.iterdir())
    dist.barrier()
    return names


def _background(run: Run, folder: Path) -> None:
    """Steps go on while files are written, and a second save waits for the first."""
    may_write, write = threading.Event(), storage.save_file

    def late(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    with mock.patch.object(storage, "save_file", late):
        run.model.save(folder / "step-1", **run.parts())
        before = run.local_tensors()[0]
        run.steps(1)
        assert "step-1" not in _names(folder)
        may_write.set()
        run.model.save(folder / "step-2", **run.parts())
    assert "step-1" in _names(folder)
    run.model.finish_save()
    run.model.load(folder / "step-1", **run.parts())
    assert torch.equal(run.local_tensors()[0], before)
    for step in (3, 4):
        run.model.save(folder / f"step-{step}", **run.parts(), keep=2, wait=True)
    assert _names(folder) == ["step-3", "step-4"]
    assert autopar.newest_checkpoint(folder) == folder / "step-4"
    assert read_manifest(folder / "step-4").number == 4


def _refusals(run: Run, folder: Path) -> None:
    own = folder / ("step-8" if dist.get_rank() == 0 else "step-9")
    for path, more, message in (
        (folder / "step-4", {}, "exists"),
        (own, {}, "not the same on all ranks"),
        (folder / "step-5", dict(extra={"a": threading.Event}), "no plain data.*Event"),
        (folder / "step-5", dict(keep=0), "keep=0"),
    ):
        with pytest.raises(RunError, match=message):
            run.model.save(path, **run.parts(), **more)
    other = torch.optim.AdamW([*run.model.parameters(), nn.Parameter(torch.zeros(3))])
    with pytest.raises(RunError, match=r"shape \(3,\)"):
        run.model.save(folder / "step-5", optimizer=other)
    part = torch.optim.AdamW(list(run.model.parameters())[:1])
    with pytest.raises(RunError, match="the checkpoint has optimizer state of layers"):
        run.model.load(folder, optimizer=part)
    assert _names(folder) == ["step-3", "step-4"]


def _full_disk(run: Run, folder: Path) -> None:
    """Rank 1 cannot write more than some bytes to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    run.model.save(folder / "step-5", **run.parts())
    run.steps(1)
    with pytest.raises(
        autopar.CheckpointError, match=r"step-5 was not saved: on rank 1.*File too large"
    ):
        run.model.save(folder / "step-6", **run.parts())
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(folder) == ["step-3", "step-4"]
    run.model.load(folder, **run.parts())
    run.model.save(folder / "step-5", **run.parts(), wait=True)


def _torn(run: Run, folder: Path) -> None:
    (folder / "step-6.partial").mkdir(exist_ok=True)  # as a run leaves it that is killed
    damaged = folder / "step-5" / "rank-00001.safetensors"
    if dist.get_rank() == 0:
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
    dist.barrier()
    before = run.local_tensors()
    with pytest.raises(RunError, match=r"rank-00001\.safetensors is not as it was written"):
        run.model.load(folder / "step-5", **run.parts())
    assert all(map(torch.equal, before, run.local_tensors()))
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=r"step-4 is loaded.*step-6\.partial.*rank-00001"):
            run.model.load(folder, **run.parts())
    else:
        run.model.load(folder, **run.parts())
    run.model.save(folder / "step-5", **run.parts(), keep=2, wait=True)  # replaces the torn one
    assert autopar.newest_checkpoint(folder) == folder / "step-5"
    assert _names(folder) == ["step-4", "step-5", "step-6.partial"]
    run.model.load(folder / "step-5", **run.parts())
    with pytest.raises(RunError, match=r"nowhere does not exist"):
        run.model.load(folder / "nowhere")
    run.model.save(folder / "bare", wait=True)
    with pytest.raises(RunError, match="was saved without optimizer="):
        run.model.load(folder / "bare", optimizer=run.optimizer)


def _rights(folder: Path) -> None:
    """Files have the rights that the user's umask leaves."""
    for path in (folder / "step-3", *(folder / "step-3").iterdir()):
        allowed = 0o750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == allowed, path


def _faults(at: str) -> None:
    mask = os.umask(0o027)
    run, folder = Run(compiled_under("zero")), Path(at)
    run.steps(1)
    _background(run, folder)
    _rights(folder)
    _refusals(run, folder)
    _full_disk(run, folder)
    _torn(run, folder)
    os.umask(mask)


def test_faults_leave_the_checkpoint_before(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(_faults, str(tmp_path))


def test_a_link_is_no_further_checkpoint(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    for step in range(4):
        path = tmp_path / f"step-{step}"
        begin(path)
        complete(path, [], keep=2)
        latest.unlink(missing_ok=True)
        latest.symlink_to(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]
    assert autopar.newest_checkpoint(tmp_path) == path
    with pytest.raises(RunError, match="exists"):
        check_free(checkpoint_path(latest))


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    assert autopar.newest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(RunError, match="is not complete"):
        read_manifest(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(RunError, match="is a pickle"):
        read_manifest(tmp_path)
    path = tmp_path / MANIFEST
    for text, message in (
        ("{", "not the manifest"),
        ({"format": "other", "version": 1}, "no checkpoint of autopar"),
        ({"format": "autopar checkpoint", "version": 2}, "reads version 1"),
        ({"format": "autopar checkpoint", "version": 1}, "not whole"),
    ):
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(RunError, match=message):
            read_manifest(tmp_path)


def test_plain_data_comes_back(tmp_path: Path) -> None:
    value = {"a": (1, 2.5, float("nan"), None), "b": [b"x", "y", torch.arange(3)], 3: {True}}
    (tmp_path / "a.pt").write_bytes(plain_state.to_bytes(value=value))
    assert plain_state.same(plain_state.read_plain(tmp_path / "a.pt"), {"value": value})
    assert not plain_state.same(value, value | {3: {False}})
