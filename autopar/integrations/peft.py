"""PEFT's adapters of a compiled ``PeftModel``: their weights to a folder of PEFT, and back.

The frozen base has no gradients and no optimizer state, as in any compiled model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.formatting.files import write_whole
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.module.compiled import Compiled

_FILE = "adapter_model.safetensors"


def save_adapter(
    compiled: Compiled, model: PeftModel, folder: str | Path, adapter: str = "default"
) -> None:
    """Writes the trained adapter as ``model.save_pretrained`` would: ``PeftModel.from_pretrained``
    reads ``folder``. All ranks must call it, with a folder on a disk that all ranks share.

    Args:
        model: the ``PeftModel`` that was compiled, for its configuration.

    Raises:
        RunError: on every rank, if the folder cannot be written.
    """
    own = _trained(compiled)
    whole = {name: _whole(p).cpu().contiguous() for name, p in own.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {} if any(compiled.mesh.coordinate) else whole)
    merged = {name: tensor for part in everywhere for name, tensor in part.items()}
    write = partial(_write, model, merged, Path(folder), adapter)
    run_on_all_ranks(f"saving {folder}", write if dist.get_rank() == 0 else lambda: None)


def load_adapter(
    compiled: Compiled, model: PeftModel, folder: str | Path, adapter: str = "default"
) -> None:
    """Gives ``compiled`` the weights of an adapter that :func:`save_adapter` or PEFT wrote. All
    ranks must call it.

    Raises:
        RunError: on every rank, for a folder without a weight that is trained, or without a file
            that can be read.
    """
    values = run_on_all_ranks("load_adapter", partial(_read, compiled, model, folder, adapter))
    compiled.load_state_dict(values, strict=False)


def _read(
    compiled: Compiled, model: PeftModel, folder: str | Path, adapter: str
) -> dict[str, torch.Tensor]:
    own = dict(_trained(compiled))
    saved_names = _for_peft(model, own, adapter)
    try:
        saved = load_file(Path(folder) / _FILE)
    except (OSError, SafetensorError) as e:
        raise RunError(f"{folder} has no adapter that can be read: {e}") from e
    by_id = {id(p): name for name, p in own.items()}
    if missing := [name for name in saved_names if name not in saved]:
        raise RunError(
            f"{folder} has no {missing[0]}, and {len(missing)} of {len(saved_names)} weights are "
            "missing: give the folder of an adapter with this configuration"
        )
    return {by_id[id(p)]: saved[name] for name, p in saved_names.items()}


def _write(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path, adapter: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    named = _for_peft(model, tensors, adapter)
    write_whole(folder / _FILE, lambda path: save_file(named, path, {"format": "pt"}))
    config = model.peft_config[adapter]
    trains, config.inference_mode = config.inference_mode, True
    config.save_pretrained(folder)
    config.inference_mode = trains


def _for_peft(
    model: PeftModel, tensors: dict[str, torch.Tensor], adapter: str
) -> dict[str, torch.Tensor]:
    """The tensors of the adapter, under the names that they have in its file."""
    return get_peft_model_state_dict(
        model, state_dict=tensors, adapter_name=adapter, save_embedding_layers=False
    )


def _trained(compiled: Compiled) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in compiled.named_parameters() if p.requires_grad}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
