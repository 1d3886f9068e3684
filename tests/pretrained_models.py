"""Models of ``transformers`` that are saved to a folder, and loaded from it on the meta device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import zoo
from equivalence import full
from safetensors.torch import load_file, save_file
from torch import nn
from trained import build

import autopar

TENSOR: dict[str, Any] = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
AUTO = {
    "gpt2": transformers.AutoModelForCausalLM,
    "llama": transformers.AutoModelForCausalLM,
    "tied_llama": transformers.AutoModelForCausalLM,
    "mixtral": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "vit": transformers.AutoModelForImageClassification,
}


def made(family: str) -> zoo.Made:
    if family != "tied_llama":
        return getattr(zoo, family)()
    model, sample = zoo.llama()
    config: Any = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    return type(model)(config), sample


def on_meta(auto: Any, config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config), dtype=dtype).train()


@contextmanager
def unloaded() -> Iterator[None]:
    """Within, nothing warns of tensors without values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model is on the meta device")
        yield


def same(compiled: autopar.Compiled, expected: nn.Module, drawn: str = "") -> None:
    """Parameters and buffers to the bit, and all of them on some rank; ``drawn`` is the name of one
    that has other random values.
    """
    found = dict((*compiled.named_parameters(), *compiled.named_buffers()))
    assert found
    known = dict((*expected.named_parameters(), *expected.named_buffers()))
    for name, value in found.items():
        assert value.dtype == known[name].dtype, name
        if name == drawn:
            assert full(value).std().item() == pytest.approx(known[name].std().item(), rel=0.1)
        else:
            assert torch.equal(full(value), known[name]), name
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, set(found))
    assert set().union(*everywhere) == set(known)


def unloaded_program(model: nn.Module, sample: dict[str, Any], **options: Any) -> autopar.Compiled:
    with unloaded():
        return build(model, sample, cluster="cpu", verify=False, **options)


def edit_file(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Writes the folder's one file anew."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def cast_to(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: t.to(dtype) for name, t in tensors.items()})

    return cast
