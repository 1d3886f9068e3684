"""One load: of the model, and of all that was saved beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from autopar.errors import RunError
from autopar.runtime.checkpoint import optimizer_state
from autopar.runtime.checkpoint.files.find import verified_checkpoint
from autopar.runtime.checkpoint.files.folder import checkpoint_path
from autopar.runtime.checkpoint.files.index import INDEX, Index, read_index
from autopar.runtime.checkpoint.files.storage import FolderReader
from autopar.runtime.checkpoint.generators import set_generator_states
from autopar.runtime.checkpoint.program_state import (
    MODEL,
    OPTIMIZER,
    Program,
    listed,
)
from autopar.runtime.checkpoint.saved_plain_data import SavedPlainData
from autopar.runtime.checkpoint.saver import reason_of
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks, run_on_all_ranks
from autopar.runtime.communication.watch.watchdog import blocking_section


def load(program: Program, path: Any, given: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Gives the program and what is ``given`` (``optimizer``, ``scheduler``, ``loader``) the state
    of a checkpoint. Returns ``extra`` as it was saved.
    """
    with blocking_section("loading a checkpoint"):
        return _load(program, path, given, group)


def _load(program: Program, path: Any, given: dict[str, Any], group: dist.ProcessGroup) -> Any:
    target = run_on_all_ranks("load", partial(checkpoint_path, path))
    check_same_on_all_ranks(str(target), "the path of the checkpoint")
    folder = verified_checkpoint(target, group)
    work = _Load(program, folder, given)
    tensors = run_on_all_ranks(f"reading {folder}", work.prepare)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FolderReader(folder, work.index)
    try:
        with torch.device("cpu"):  # torch reads tensors that it makes on the default device
            dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as e:
        raise RunError(f"{folder} was not loaded: {reason_of(e)}") from None
    return run_on_all_ranks(f"loading {folder}", partial(work.restore, tensors))


class _Load:
    """Reads and checks plain data first, so that a checkpoint that does not fit changes nothing."""

    index: Index
    plain: SavedPlainData

    def __init__(self, program: Program, folder: Path, given: dict[str, Any]) -> None:
        self._program, self._folder = program, folder
        self._optimizers = listed(given["optimizer"])
        self._schedulers, self._loader = listed(given["scheduler"]), given["loader"]
        self._names = program.parameter_names

    def prepare(self) -> dict[str, torch.Tensor]:
        """The tensors to read to: the model's own, and new ones for the optimizers."""
        self.index = index = read_index(self._folder / INDEX)
        self.plain = SavedPlainData(self._folder, index.states)
        same_plan = index.plan == self._program.plan_hash
        self._extra = self.plain.of_rank("extra", same_plan)
        self._generators = self.plain.of_rank("generators", same_plan, or_rank_0=True)
        self._states = self._states_of_schedulers(same_plan)
        if self._loader is not None:
            self._loader_state = self.plain.of_rank("loader", same_plan)
            if self._loader_state is None:
                raise RunError(f"{self._folder} was saved without loader=")
        tensors = self._program.tensors | self._empty_moments()
        self._check(tensors)
        return tensors

    def restore(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Gives all but the model its state, once the tensors were read."""
        moments = {
            name.removeprefix(OPTIMIZER): tensor
            for name, tensor in tensors.items()
            if name.startswith(OPTIMIZER)
        }
        if self.plain.optimizer is not None:
            optimizer_state.restore(self._optimizers, self._names, self.plain.optimizer, moments)
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(state)
        if self._loader is not None:
            self._loader.load_state_dict(self._loader_state)
        module = self._program.module
        set_generator_states(self._generators, module.mesh.device)
        # After torch's generators: the program remembers their seed.
        module.random_state = self.plain.random_state
        return self._extra

    def _states_of_schedulers(self, same_plan: bool) -> list[Any]:
        if not self._schedulers:
            return []
        states = self.plain.of_rank("scheduler", same_plan)
        if len(states) != len(self._schedulers):
            raise RunError(
                f"{self._folder} was saved with {len(states)} schedulers, and "
                f"{len(self._schedulers)} were given"
            )
        return states

    def _empty_moments(self) -> dict[str, torch.Tensor]:
        if not self._optimizers:
            return {}
        if self.plain.optimizer is None:
            raise RunError(f"{self._folder} was saved without optimizer=")
        moments = optimizer_state.empty_tensors(
            self._optimizers,
            self._names,
            self.plain.optimizer,
            lambda name: self.index.tensors[OPTIMIZER + name].properties.dtype,
        )
        return {OPTIMIZER + name: tensor for name, tensor in moments.items()}

    def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises :class:`RunError` where the checkpoint is that of another model."""
        known, captured = self.index.tensors, self._program.captured
        own = {MODEL + name for name in (*captured.state, *captured.aliases)}
        more = sorted(n for n in known if n.startswith(MODEL) and n not in own)
        missing = sorted(n for n in tensors if n not in known)
        for names, what in ((more, "has"), (missing, "lacks")):
            if names:
                shown = ", ".join(name.removeprefix(MODEL) for name in names[:3])
                raise RunError(
                    f"{self._folder} is a checkpoint of another model or optimizer: it {what} "
                    f"{len(names)} tensors ({shown}{', …' if len(names) > 3 else ''})"
                )
        for name, tensor in tensors.items():
            shape, dtype = known[name].size, known[name].properties.dtype
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise RunError(
                    f"{self._folder} has {name} in {dtype} of shape {tuple(shape)}, and the "
                    f"program has it in {tensor.dtype} of shape {tuple(tensor.shape)}: compile "
                    "the model that was saved"
                )
