"""Values of a model from a folder that Hugging Face libraries wrote: each rank reads its part of
each tensor, straight from the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from autopar.errors import RunError
from autopar.formatting.files import real_path
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks, run_on_all_ranks
from autopar.runtime.communication.placements import layout_of_placements
from autopar.runtime.dtensors.sharding import local_ranges
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.values.initialise import initialise
from autopar.runtime.values.pretrained.folder import stored_tensors
from autopar.runtime.values.pretrained.names import match, without_ignored
from autopar.runtime.values.pretrained.stored_tensor import StoredTensor, as_stored

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.runtime.module.compiled import Compiled


class LoadedKeys(NamedTuple):
    """What did not match, as ``from_pretrained`` and ``load_state_dict`` report it.

    Attributes:
        missing_keys: the model's tensors that the folder does not hold, in the order of names.
        unexpected_keys: the folder's tensors that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class _Found:
    """What a folder holds of a model.

    Attributes:
        of: by the name of a tensor, the stored tensors that are its values: several where the files
            have tied tensors under each of their names.
        missing: the names of tensors without stored ones, buffers that no file holds among them.
        report: what of it the user is told.
    """

    of: dict[str, list[StoredTensor]]
    missing: set[str]
    report: LoadedKeys

    def fingerprint(self) -> str:
        """What must be the same on all ranks."""
        stored = [(n, [(t.shape, t.dtype) for t in ts]) for n, ts in sorted(self.of.items())]
        return f"{stored} {self.report}"


def load_pretrained(
    program: Compiled,
    captured: CapturedModel,
    model: nn.Module,
    folder: str | os.PathLike[str],
    seed: int,
    progress: bool,
) -> LoadedKeys:
    """Gives ``program``, which was made of ``model``, the values in ``folder``. All ranks must call
    it.

    Raises :class:`RunError`, on every rank.
    """
    path = run_on_all_ranks("load_pretrained", partial(real_path, folder, "a folder", RunError))
    check_same_on_all_ranks(str(path), "the folder of load_pretrained")
    found = run_on_all_ranks(f"reading {path}", partial(_find, path, model, captured))
    check_same_on_all_ranks(found.fingerprint(), f"what {path} holds")
    hidden = not progress or dist.get_rank() != 0
    with tqdm(
        desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden, leave=False
    ) as bar:
        run_on_all_ranks(f"reading {path}", partial(_read, program, found, bar))
    if found.missing:
        initialise(program, model, seed, captured.aliases, found.missing)
    return found.report


def _find(path: Path, model: nn.Module, captured: CapturedModel) -> _Found:
    stored = stored_tensors(path)
    sources, unexpected = match(model, stored)
    names = {name: captured.aliases.get(name, name) for name in _kept(model)}
    kept = set(names.values())
    of: dict[str, list[StoredTensor]] = {}
    for name, tensor in sources.items():
        of.setdefault(captured.aliases.get(name, name), []).append(as_stored(tensor))
    _check(path, of, kept, captured.state)
    if kept and not of:
        raise RunError(
            f"{path} holds no tensor of the model: it has {_some(stored)}, and the model has "
            f"{_some(kept)}. Compile the model whose weights these are"
        )
    others = {n for n, _ in model.named_buffers()} - set(model.state_dict(keep_vars=True))
    absent = {name for name, own in names.items() if own not in of}
    report = LoadedKeys(
        sorted(without_ignored(model, absent, "missing")),
        sorted(without_ignored(model, unexpected, "unexpected")),
    )
    return _Found(of, kept - of.keys() | {captured.aliases.get(n, n) for n in others}, report)


def _kept(model: nn.Module) -> list[str]:
    """The names of the tensors that a file may hold."""
    return [
        name for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)
    ]


def _check(
    path: Path,
    of: Mapping[str, list[StoredTensor]],
    kept: Iterable[str],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Raises :class:`RunError` where names, shapes or dtypes do not fit."""
    if strange := sorted(set(kept) - state.keys()):
        raise RunError(
            f"the given model has {_some(strange)}, which the compiled one does not have: pass the "
            "model that was compiled"
        )
    pairs = [(name, tensor, state[name]) for name, found in of.items() for tensor in found]
    wrong = [
        f"{name} {tuple(tensor.shape)} there and {tuple(own.shape)} in the model"
        for name, tensor, own in pairs
        if tensor.shape != own.shape
    ]
    if wrong:
        raise RunError(
            f"{path} holds {len(wrong)} tensors of other shapes than the model's: "
            f"{_some(wrong, '; ')}. Build the model from the folder's own configuration, "
            "AutoConfig.from_pretrained(folder), or write a folder without these tensors, which "
            "then are initialised"
        )
    for name, tensor, own in pairs:
        if _kind(tensor.dtype) != _kind(own.dtype):
            raise RunError(
                f"{path} holds {name} in {tensor.dtype}, and the model has it in {own.dtype}: "
                "quantised weights are not read; dequantise them first"
            )


def _kind(dtype: torch.dtype) -> str:
    """Dtypes of one kind are converted to each other."""
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else str(dtype)
    return "complex" if dtype.is_complex else "integer"


def _read(program: Compiled, found: _Found, bar: tqdm) -> None:
    """Reads this rank's part of each tensor that it has."""
    named = (*program.named_parameters(), *program.named_buffers())
    own = {name: tensor.detach() for name, tensor in named if name in found.of}
    bar.total = sum(local_tensor(tensor).nbytes for tensor in own.values())
    for name, stored in found.of.items():
        if (target := own.get(name)) is None:
            continue  # of another stage
        ranges = tuple(slice(0, size) for size in target.shape)
        if isinstance(target, DTensor):
            layout = layout_of_placements(target.placements)
            ranges = local_ranges(target.shape, layout, program.mesh)
        part = stored[0].part(ranges)
        for other in stored[1:]:
            if not torch.equal(part, other.part(ranges)):
                raise RunError(
                    f"the files hold two different values of {name}, whose tensors are tied in "
                    "the model: build the model with tie_word_embeddings=False in its config"
                )
        local_tensor(target).copy_(part)
        bar.update(local_tensor(target).nbytes)


def _some(names: Iterable[str], separator: str = ", ") -> str:
    known = sorted(names)
    more = f"{separator}and {len(known) - 5} more" if len(known) > 5 else ""
    return separator.join(known[:5]) + more
