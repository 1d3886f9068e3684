"""A folder that Hugging Face libraries read: safetensors files with an index, and the model's
configuration.

The tensors pass one after the other: the ranks of a stage gather one, and the first of them writes
it. So no rank holds more than its part and one tensor, and the stages of a pipeline write at the
same time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.formatting.files import flush
from autopar.runtime.checkpoint.files.folder import (
    begin,
    check_free,
    checkpoint_path,
    discard,
    partial_folder,
)
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks, run_on_all_ranks
from autopar.runtime.values.pretrained.folder import INDEX, WEIGHTS
from autopar.runtime.values.pretrained.tensor_file import TensorEntry, TensorFile

if TYPE_CHECKING:
    from autopar.runtime.module.compiled import Compiled


@dataclass(frozen=True)
class _File:
    """One file, and the pipeline rank whose ranks write it."""

    stage: int
    entries: tuple[TensorEntry, ...]


def save_pretrained(
    program: Compiled, folder: Any, aliases: Mapping[str, str], max_file_bytes: int
) -> None:
    """Writes ``folder``, which is complete or not there. All ranks must call it.

    Raises :class:`RunError`, on every rank.
    """
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise RunError(f"max_file_bytes={max_file_bytes!r:.50}: give a number of bytes")
    path = run_on_all_ranks("save_pretrained", partial(_free_path, folder))
    check_same_on_all_ranks(f"{path} {max_file_bytes}", "the folder, or max_file_bytes,")
    first = dist.get_rank() == 0
    state = {name: t for name, t in program.state_dict().items() if name not in aliases}
    stage = program.mesh.pipeline_rank
    files = _files(stage, state, max_file_bytes)
    making = partial(_begin, program, path, files) if first else lambda: None
    try:
        run_on_all_ranks(f"making {path}", making)
        _write(partial_folder(path), files, stage, not any(program.mesh.coordinate), state)
        run_on_all_ranks(f"saving {path}", partial(_finish, path, files, first))
    except Exception:
        if first:
            discard(path)
        raise


def _free_path(folder: Any) -> Path:
    path = checkpoint_path(folder)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    check_free(path)
    return path


def _begin(program: Compiled, path: Path, files: list[_File]) -> None:
    """Makes the folder, with what describes the model: what cannot be written fails first."""
    begin(path)
    try:
        _write_configs(program, partial_folder(path), files)
    except Exception as e:  # of a Hugging Face library, which may raise anything
        raise RunError(f"the configuration cannot be written: {type(e).__name__}: {e}") from e


def _write_configs(program: Compiled, folder: Path, files: list[_File]) -> None:
    config: Any = getattr(program, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        if program._class_name is not None:
            config.architectures = [program._class_name]
        dtypes = [entry.dtype for file in files for entry in file.entries]
        for dtype in [d for d in dtypes if d.is_floating_point][:1]:
            # from_pretrained converts to this dtype. The config may have that of other weights.
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    if hasattr(program._generation_config, "save_pretrained"):
        program._generation_config.save_pretrained(folder)


def _files(stage: int, state: Mapping[str, torch.Tensor], most: int) -> list[_File]:
    """All files, the same on every rank. A tensor of several stages is in the first one's."""
    own = [TensorEntry(name, tuple(t.shape), t.dtype) for name, t in state.items()]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (stage, own))
    stages = dict(reversed(everywhere))  # ranks of a stage have the same tensors
    seen: set[str] = set()
    files = []
    for number in sorted(stages):
        new = [entry for entry in stages[number] if entry.name not in seen]
        seen |= {entry.name for entry in new}
        files += [_File(number, tuple(group)) for group in _groups(new, most)]
    return files


def _groups(entries: Iterable[TensorEntry], most: int) -> Iterator[list[TensorEntry]]:
    """Entries one after the other, of at most ``most`` bytes together where one is not larger."""
    group: list[TensorEntry] = []
    for entry in entries:
        if group and sum(e.nbytes for e in group) + entry.nbytes > most:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _name(number: int, files: list[_File]) -> str:
    if len(files) == 1:
        return WEIGHTS
    return f"model-{number + 1:05}-of-{len(files):05}.safetensors"


def _write(
    folder: Path, files: list[_File], stage: int, writes: bool, state: Mapping[str, torch.Tensor]
) -> None:
    """Writes the files of this rank's stage. A rank that fails goes on gathering, so that the
    others do not wait for it, and raises at the end.
    """
    attempt = _Attempt(writes)
    for number, file in enumerate(files):
        if file.stage != stage:
            continue
        path = folder / _name(number, files)
        written = attempt(partial(TensorFile, path, file.entries))
        for entry in file.entries:
            tensor = state[entry.name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            attempt(partial(TensorFile.add, written, whole))
        attempt(partial(TensorFile.close, written))
    run_on_all_ranks(f"writing {folder}", attempt.check)


class _Attempt:
    """Does nothing after a first failure; ``does`` says whether it does anything before."""

    def __init__(self, does: bool) -> None:
        self._does = does
        self._failure: Exception | None = None

    def __call__(self, work: Callable[[], Any]) -> Any:
        if not self._does:
            return None
        try:
            return work()
        except Exception as e:  # raised by check
            self._does, self._failure = False, e
            return None

    def check(self) -> None:
        """Raises the failure."""
        if self._failure is not None:
            failure = self._failure
            raise RunError(f"{type(failure).__name__}: {failure}") from failure


def _finish(path: Path, files: list[_File], first: bool) -> None:
    if not first:
        return
    folder = partial_folder(path)
    if len(files) > 1:
        places = {e.name: _name(n, files) for n, file in enumerate(files) for e in file.entries}
        total = sum(entry.nbytes for file in files for entry in file.entries)
        data = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(data, indent=2) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    for written in folder.iterdir():
        flush(written)
    flush(folder)
    folder.rename(path)
    flush(path.parent)
