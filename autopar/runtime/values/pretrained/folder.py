"""Which tensors the safetensors files of a folder hold. Values are read when they are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from autopar.errors import RunError
from autopar.runtime.values.pretrained.stored_tensor import Ranges, StoredTensor, stored_tensor
from autopar.runtime.values.pretrained.tensor_file import DTYPES, TensorEntry

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_OPEN_BYTES = 32 << 20
_CONVERT = (
    "convert it once where it can be trusted: "
    "Model.from_pretrained(folder).save_pretrained(new_folder), Model being the class of "
    "transformers, writes safetensors"
)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the folder by their names in its files, of which only the heads are read.

    Raises :class:`RunError` for a folder without safetensors files, with other weights than whole
    ones, and with files that are not whole.
    """
    _check_config(folder)
    names, expected = _file_names(folder)
    found: dict[str, StoredTensor] = {}
    reader = _Reader()
    for name in names:
        found |= reader.tensors(folder / name)
    if lost := sorted(expected - found.keys()):
        raise RunError(
            f"{folder} is not whole: {INDEX} lists {len(lost)} tensors that no file has, such as "
            f"{lost[0]}"
        )
    return found


def _file_names(folder: Path) -> tuple[list[str], set[str]]:
    """The names of the files, and of the tensors that their index lists, if there is one."""
    if not folder.is_dir():
        raise RunError(
            f"{folder} is no folder on this rank: download the model first, for example with "
            "huggingface_hub.snapshot_download(name), to a disk that all ranks see"
        )
    if (folder / WEIGHTS).exists():
        return [WEIGHTS], set()
    if (folder / INDEX).exists():
        places = _weight_map(folder / INDEX)
        return sorted(set(places.values())), set(places)
    if pickles := sorted(
        p.name for ending in ("bin", "pt", "pth") for p in folder.glob(f"*.{ending}")
    ):
        raise RunError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run code; {_CONVERT}"
        )
    if (folder / "adapter_config.json").exists():
        raise RunError(
            f"{folder} holds an adapter of PEFT and no model: merge it first, "
            "model.merge_and_unload().save_pretrained(new_folder)"
        )
    others = ", ".join(sorted(p.name for p in folder.glob("*.safetensors"))[:5]) or "none"
    raise RunError(
        f"{folder} has neither {WEIGHTS} nor {INDEX} (other safetensors files: {others}); "
        f"load_pretrained reads no other names or formats"
    )


def _weight_map(path: Path) -> dict[str, str]:
    data = _json(path)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places:
        raise RunError(f"{path} has no weight_map: it is no index of safetensors files")
    for file in places.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise RunError(f"{path} names the file {file!r:.100}, which is none of its folder")
    return places


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise RunError(f"{path} cannot be read: {e}") from None


def _check_config(folder: Path) -> None:
    """Raises :class:`RunError` for weights that ``config.json`` calls quantised."""
    if not (path := folder / "config.json").exists():
        return
    config = _json(path)
    method = config.get("quantization_config") if isinstance(config, dict) else None
    if method is not None:
        kind = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        raise RunError(
            f"the weights of {folder} are quantised ({kind!r:.50}), and load_pretrained reads "
            "whole ones: dequantise the model with transformers (model.dequantize(), "
            "model.save_pretrained(new_folder)), or take a folder of the original weights"
        )


class _Reader:
    """Reads parts of tensors. One file is open at a time: the last that was read. It is closed and
    opened again after some tensors: until then the pages that were read, and some beside them,
    count as memory of this process.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._bytes = 0  # of the tensors that were read since the file was opened

    def tensors(self, path: Path) -> dict[str, StoredTensor]:
        """The tensors of a file by their names."""
        file = self._open(path)
        return {name: self._tensor(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118

    def _tensor(self, path: Path, name: str, stored: Any) -> StoredTensor:
        if stored.get_dtype() not in _TORCH_DTYPES:
            raise RunError(
                f"{path} has {name} as {stored.get_dtype()}, a format of quantised weights, which "
                "load_pretrained does not read: dequantise them first"
            )
        entry = TensorEntry(name, tuple(stored.get_shape()), _TORCH_DTYPES[stored.get_dtype()])

        def part(ranges: Ranges) -> torch.Tensor:
            return self._part(path, name, ranges, entry.nbytes)

        return stored_tensor(entry.shape, entry.dtype, part)

    def _part(self, path: Path, name: str, ranges: Ranges, size: int) -> torch.Tensor:
        """The values in ``ranges``: a view of the file's pages, which the system reads once they
        are copied from it.
        """
        file = self._open(path)
        with torch.device("cpu"):  # safetensors would put a slice on the default device
            read = file.get_slice(name)[ranges] if ranges else file.get_tensor(name)
        self._bytes += size
        return read

    def _open(self, path: Path) -> Any:
        if path != self._path or self._bytes >= _OPEN_BYTES:
            self._path, self._file, self._bytes = None, None, 0
            try:
                self._file = safe_open(path, framework="pt")
            except Exception as e:  # safetensors' own error, which other ranks may not know
                raise RunError(f"{path} cannot be read: {e}") from None
            self._path = path
        return self._file
