"""The plain data of a checkpoint: of all ranks that saved it, for one rank that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.checkpoint.files.plain_state import read_plain, same
from autopar.runtime.checkpoint.optimizer_state import merged


class SavedPlainData:
    """The plain data in ``folder``; ``files`` has the names of each rank's files by kind.

    Attributes:
        random_state: that of the program, three integers.
        optimizer: the state of the optimizers, by the names of all parameters; None where none was
            saved.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        self._folder, self._files = folder, files["rank"]
        programs = [read_plain(folder / name) for name in dict.fromkeys(files["program"])]
        self.random_state: torch.Tensor = programs[0]["random_state"]
        optimizers = [state["optimizer"] for state in programs]
        self.optimizer = None if optimizers[0] is None else merged(optimizers)
        self._states = {name: read_plain(folder / name) for name in dict.fromkeys(self._files)}

    def of_rank(self, what: str, same_plan: bool, or_rank_0: bool = False) -> Any:
        """This rank's state of one kind, under the plan that saved it. Under another plan it is the
        state that all ranks had, or, with ``or_rank_0``, that of rank 0.

        Raises :class:`RunError` where the ranks of another plan had different states.
        """
        states = [state[what] for state in self._states.values()]
        ranks = len(self._files)
        if same_plan and ranks == dist.get_world_size():
            return self._states[self._files[dist.get_rank()]][what]
        if or_rank_0 or all(same(states[0], other) for other in states[1:]):
            return states[0]
        raise RunError(
            f"{self._folder} has different states of {what} for its {ranks} ranks, which say "
            f"nothing about the {dist.get_world_size()} ranks of another plan: load with the plan "
            "that saved it, or save a state that is the same on all ranks"
        )
