"""torch.distributed.checkpoint's storage as a folder of data: each rank writes one safetensors
file, and rank 0 an index in JSON.

torch's own storage in files keeps its metadata as a pickle, which may run code when it is read.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.errors import RunError
from autopar.formatting.files import flush
from autopar.runtime.checkpoint.files.folder import begin, complete, partial_folder
from autopar.runtime.checkpoint.files.index import INDEX, Index, write_index
from autopar.runtime.checkpoint.files.manifest import FileRecord, TornError, record_of


class FolderWriter(StorageWriter):
    """Writes the checkpoint ``path``.

    Args:
        path: the checkpoint.
        rank: this rank.
        states: the contents of this rank's files of plain data by kind.
        index: the plan and the aliases; rank 0 adds the rest.
        keep: how many complete checkpoints stay in the folder around ``path``; None for all.
    """

    def __init__(
        self, path: Path, rank: int, states: dict[str, bytes], index: Index, keep: int | None
    ) -> None:
        self._path, self._rank, self._keep = path, rank, keep
        self._states, self._index = states, index
        self._all_states: list[dict[str, bytes]] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of an earlier save: each has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Sends this rank's plain data to rank 0."""
        return dataclasses.replace(plan, storage_data=self._states)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: takes the plain data of all ranks and makes the folder."""
        self._all_states = [plan.storage_data for plan in plans]
        begin(self._path)
        return [dataclasses.replace(plan, storage_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's chunks to its file."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        chunks: dict[str, torch.Tensor] = {}
        for item in plan.items:
            chunk = planner.resolve_data(item)
            assert isinstance(chunk, torch.Tensor)
            assert item.index.fqn not in chunks, "a rank has one chunk of a tensor"
            chunks[item.index.fqn] = chunk.contiguous()
        path = partial_folder(self._path) / f"rank-{self._rank:05}.safetensors"
        try:
            save_file(chunks, path)
            path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors' 0600, after the umask
            flush(path)
        except Exception as e:  # safetensors' own error, which other ranks may not know
            raise RunError(f"{path} cannot be written: {e}") from None
        record = record_of(path)
        return [WriteResult(item.index, 0, record) for item in plan.items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: writes index and plain data, and makes the checkpoint complete."""
        files: dict[str, FileRecord] = {}
        for result in (r for of_rank in results for r in of_rank):
            files[result.storage_data.name] = result.storage_data
            self._index.places[result.index] = result.storage_data.name
        self._index.tensors = metadata.state_dict_metadata  # type: ignore[assignment]
        kinds = self._all_states[0]
        self._index.states = {kind: self._write_states(kind, files) for kind in kinds}
        path = partial_folder(self._path) / INDEX
        write_index(path, self._index)
        _record(path, files)
        complete(self._path, list(files.values()), self._keep)

    def _write_states(self, kind: str, files: dict[str, FileRecord]) -> list[str]:
        """Writes the plain data of all ranks, equal data once; the name of each rank's file."""
        names: dict[bytes, str] = {}
        for rank, states in enumerate(self._all_states):
            if (data := states[kind]) not in names:
                names[data] = f"{kind}-{rank:05}.pt"
                path = partial_folder(self._path) / names[data]
                path.write_bytes(data)
                _record(path, files)
        return [names[states[kind]] for states in self._all_states]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """torch asks this of a storage that it chooses by itself."""
        return False


def _record(path: Path, files: dict[str, FileRecord]) -> None:
    flush(path)
    files[path.name] = record_of(path)


class FolderReader(StorageReader):
    """Reads tensors of the checkpoint in ``folder``, whose contents were verified."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of an earlier load: each has a reader of its own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, in torch's form."""
        return self._index.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the parts of chunks that this rank needs, and no others."""
        items: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            file, _ = self._index.place_of(item.storage_index)
            items[file].append(item)
        for name, of_file in items.items():
            try:
                self._read(name, of_file, planner)
            except Exception as e:  # safetensors' own error, which other ranks may not know
                raise TornError(f"{self._folder / name} cannot be read: {e}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        # safetensors would put slices on the default device.
        with torch.device("cpu"), safe_open(self._folder / name, framework="pt") as file:
            for item in items:
                _, chunk = self._index.place_of(item.storage_index)
                part = _part(file, chunk, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """torch asks this of a storage that it chooses by itself."""
        return False


def _part(file: Any, chunk: str, item: ReadItem) -> torch.Tensor:
    starts, lengths = item.storage_offsets, item.lengths
    if not starts:
        return file.get_tensor(chunk)
    return file.get_slice(chunk)[
        tuple(slice(start, start + n) for start, n in zip(starts, lengths, strict=True))
    ]
