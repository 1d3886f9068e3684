"""What a compiled module has of checkpoints: the methods that save and load a run, and the state of
its random numbers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from autopar.runtime.checkpoint.program_state import Program, plan_hash
from autopar.runtime.checkpoint.restore import load
from autopar.runtime.checkpoint.saver import Saver

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.plan import Plan
    from autopar.runtime.communication.mesh import Mesh
    from autopar.runtime.module.compiled import Compiled
    from autopar.runtime.parameters.model_state import ModelState

_RANDOM = "random_state"


class Checkpoints(nn.Module):
    """The part of a compiled module that saves and loads."""

    _captured: CapturedModel
    _plan: Plan
    _mesh: Mesh
    _state: ModelState
    _draws: bool

    def __init__(self) -> None:
        super().__init__()
        self._saver = Saver()
        self._plan_hash: str | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        keep: int | None = None,
        wait: bool = False,
    ) -> None:
        """Saves the run as the checkpoint ``path``, a new folder on a disk that all ranks share.
        All ranks must call it, between two steps.

        It returns once the tensors are copied to host memory. A thread writes them while training
        goes on; the checkpoint is at ``path`` once it is complete, and never in part. A further
        save waits for this one.

        Args:
            path: the folder, such as ``checkpoints/step-1000``.
            optimizer: one of torch's, or a sequence of them.
            scheduler: what has ``state_dict()``, or a sequence of such.
            loader: what has ``state_dict()``, such as a stateful loader or sampler.
            extra: plain data, which :meth:`load` returns.
            keep: how many complete checkpoints stay in the folder around ``path``; None for all.
            wait: whether to return only when the checkpoint is complete.

        Raises:
            RunError: on every rank, if ``path`` exists and is not torn, or if a state is no plain
                data.
            CheckpointError: on every rank, if the save before this one failed, or this one, with
                ``wait``. What was saved before is whole.
        """
        self._state.check_has_values()
        given = dict(optimizer=optimizer, scheduler=scheduler, loader=loader, extra=extra)
        self._saver.save(self._program(), path, given, keep)
        if wait:
            self._saver.finish()

    def finish_save(self) -> None:
        """Waits until the save that is under way is complete. All ranks must call it, at the latest
        before the process group ends. Raises :class:`CheckpointError`, on every rank, if the save
        failed.
        """
        self._saver.finish()

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
    ) -> Any:
        """Goes on from a checkpoint of :meth:`save`, and returns its ``extra``. All ranks must call
        it.

        The plan and the number of ranks may be others than those of the run that saved. Under the
        same plan the run goes on to the bit. The random generators of torch, Python and NumPy get
        their saved states as well.

        Args:
            path: a checkpoint, or a folder of checkpoints: of those the newest that is whole.
            optimizer, scheduler, loader: as for :meth:`save`, made as they were made then. What is
                left out stays as it is.

        Raises:
            RunError: on every rank, if no checkpoint is whole, or it is that of another model or
                optimizer. Then nothing has changed.
        """
        self._saver.finish()
        given = dict(optimizer=optimizer, scheduler=scheduler, loader=loader)
        return load(self._program(), path, given, self._saver.group)

    def _program(self) -> Program:
        if self._plan_hash is None:
            self._plan_hash = plan_hash(self._plan)
        return Program(cast("Compiled", self), self._captured, self._plan_hash)

    @property
    def random_state(self) -> torch.Tensor:
        """The state on which the next random numbers depend: three integers, the seed and the
        numbers of calls that drew in training and in evaluation. The same on all ranks.

        After a restart, a run continues with the next numbers if all ranks set the saved state
        before the first step. ``torch.save`` of ``state_dict()`` and ``load_state_dict`` include
        it. A new seed of torch's generator starts a new state.
        """
        return self._mesh.random_streams.state

    @random_state.setter
    def random_state(self, value: torch.Tensor) -> None:
        self._mesh.random_streams.state = value

    # The random state goes into the metadata, beside torch's version numbers: a plain model would
    # refuse a new key.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._draws:
            destination._metadata[prefix[:-1]][_RANDOM] = self.random_state.tolist()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self._draws and _RANDOM in local_metadata:
            self.random_state = torch.tensor(local_metadata[_RANDOM], device="cpu")
