"""The index of a checkpoint, in JSON: which chunk of which tensor lies in which file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar.runtime.checkpoint.files.manifest import TornError

INDEX = "index.json"


@dataclass
class Index:
    """What is in a checkpoint.

    Attributes:
        plan: a hash of the plan of the run.
        aliases: further names of tied tensors, each with the name of the tensor.
        states: for each kind of plain data, the name of the file of each rank.
        tensors: torch's description of each tensor by its name, with its chunks.
        places: for each chunk, the file. A file has a chunk under the name of its tensor.
    """

    plan: str
    aliases: dict[str, str]
    states: dict[str, list[str]]
    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, str] = field(default_factory=dict)

    def metadata(self) -> Metadata:
        """The tensors as torch.distributed.checkpoint wants to know them."""
        return Metadata(dict(self.tensors), storage_data=self.places)

    def place_of(self, chunk: MetadataIndex) -> tuple[str, str]:
        """The file of a chunk, and its name there."""
        name = self.aliases.get(chunk.fqn, chunk.fqn)
        return self.places[MetadataIndex(name, chunk.offset)], name


def write_index(path: Path, index: Index) -> None:
    """Writes ``index`` to a file."""
    tensors = {name: _tensor_data(name, kept, index) for name, kept in index.tensors.items()}
    data = {
        "plan": index.plan,
        "aliases": {name: first for name, first in index.aliases.items() if first in tensors},
        "states": index.states,
        "tensors": tensors,
    }
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_index(path: Path) -> Index:
    """The index in a file. Raises :class:`TornError` where it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        index = Index(data["plan"], data["aliases"], data["states"])
        for name, entry in data["tensors"].items():
            _add_tensor(index, name, entry)
        for name, first in index.aliases.items():
            index.tensors[name] = index.tensors[first]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise TornError(f"{path} is no index of a checkpoint ({type(e).__name__}: {e})") from None
    return index


def _tensor_data(name: str, tensor: TensorStorageMetadata, index: Index) -> Mapping[str, Any]:
    return {
        "dtype": str(tensor.properties.dtype).removeprefix("torch."),
        "shape": list(tensor.size),
        "chunks": [
            {
                "offsets": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": index.places[MetadataIndex(name, chunk.offsets)],
            }
            for chunk in tensor.chunks
        ],
    }


def _add_tensor(index: Index, name: str, entry: Mapping[str, Any]) -> None:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has the dtype {dtype!r:.80}")
    chunks = []
    for chunk in entry["chunks"]:
        offsets = torch.Size(chunk["offsets"])
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["shape"])))
        index.places[MetadataIndex(name, offsets)] = str(chunk["file"])
    index.tensors[name] = TensorStorageMetadata(
        TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks
    )
