"""One save after the other, in the background of training."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from autopar.errors import CheckpointError, RunError
from autopar.runtime.checkpoint.background import start_in_background
from autopar.runtime.checkpoint.files.folder import check_free, checkpoint_path, discard
from autopar.runtime.checkpoint.files.index import Index
from autopar.runtime.checkpoint.files.plain_state import to_bytes
from autopar.runtime.checkpoint.files.storage import FolderWriter
from autopar.runtime.checkpoint.generators import generator_states
from autopar.runtime.checkpoint.optimizer_state import saved_state
from autopar.runtime.checkpoint.program_state import (
    MODEL,
    OPTIMIZER,
    Program,
    host_copies,
    listed,
)
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks, run_on_all_ranks
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.watch.watchdog import background_section, blocking_section

_LOG = logging.getLogger(__name__)


class Saver:
    """The saves of one program. A thread of its own plans and writes each, and talks with the other
    ranks over a process group of its own, so that steps do not wait for it.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[Path, Future[None]] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks. All ranks must ask for it first at the same place."""
        if self._group is None:
            self._group = groups().new(backend="gloo")
        return self._group

    def finish(self) -> None:
        """Waits for the save that is under way. Raises its error, on every rank. All ranks must
        call it.
        """
        if self._running is None:
            return
        (path, future), self._running = self._running, None
        run_on_all_ranks(f"saving {path}", future.result)

    def save(self, program: Program, path: Any, given: dict[str, Any], keep: int | None) -> None:
        """Begins to save the program and what is ``given`` (``optimizer``, ``scheduler``,
        ``loader``, ``extra``), once an earlier save has ended.
        """
        self.finish()
        with blocking_section("checkpoint"):
            self._begin(program, path, given, keep)

    def _begin(self, program: Program, path: Any, given: dict[str, Any], keep: int | None) -> None:
        target = run_on_all_ranks("preparing to save", partial(_target, path, keep))
        check_same_on_all_ranks(f"{target} {keep}", "the path of the checkpoint, or keep,")
        gather = partial(_state, program, given)
        tensors, states = run_on_all_ranks(f"preparing to save {target}", gather)
        copies, group = host_copies(tensors), self.group
        aliases = {MODEL + name: MODEL + first for name, first in program.captured.aliases.items()}
        index = Index(program.plan_hash, aliases, {})
        writer = FolderWriter(target, dist.get_rank(), states, index, keep)
        work = partial(_write, target, writer, copies, group)
        self._running = target, start_in_background(str(target), work)


def _target(path: Any, keep: Any) -> Path:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise RunError(f"keep={keep!r:.50}: give the number of checkpoints that stay, 1 or more")
    target = checkpoint_path(path)
    check_free(target)
    return target


def _state(
    program: Program, given: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """The tensors to save, and this rank's plain data by kind."""
    moments, plain = saved_state(listed(given["optimizer"]), program.parameter_names)
    tensors = program.tensors | {OPTIMIZER + name: moment for name, moment in moments.items()}
    loader, module = given["loader"], program.module
    states = {
        "program": to_bytes(
            optimizer=None if given["optimizer"] is None else plain,
            random_state=module.random_state,
        ),
        "rank": to_bytes(
            scheduler=[scheduler.state_dict() for scheduler in listed(given["scheduler"])],
            loader=None if loader is None else loader.state_dict(),
            extra=given["extra"],
            generators=generator_states(module.mesh.device),
        ),
    }
    return tensors, states


def _write(
    path: Path,
    writer: FolderWriter,
    tensors: dict[str, torch.Tensor],
    group: dist.ProcessGroup,
) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with background_section(f"writes the checkpoint {path}"):
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as e:
        message = f"{path} was not saved: {reason_of(e)}"
        if dist.get_rank(group) == 0:
            _LOG.error(message)  # at once: the next call, which raises it, may be far
            with suppress(OSError):
                discard(path)
        raise CheckpointError(message) from None


def reason_of(failure: CheckpointException) -> str:
    """The first rank of those that failed, and its error."""
    rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
    text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return f"on rank {rank}, {text}"
