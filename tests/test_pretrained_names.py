"""Names, dtypes and missing tensors: ``load_pretrained`` does what ``from_pretrained`` does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
import zoo
from equivalence import full
from pool import Pools
from pretrained_models import TENSOR, cast_to, edit_file, on_meta, same, unloaded_program
from safetensors.torch import load_file, save_file
from torch import nn

from autopar.errors import RunError
from autopar.runtime.values.pretrained.load import LoadedKeys

PIPELINE: dict[str, Any] = dict(parallel=dict(pipeline=2), micro_batch_size=4)


def _loads_as_transformers(
    kind: str, auto: Any, folder: str, sample: dict[str, Any], options: dict[str, Any]
) -> None:
    """Compares values and reports with those of ``from_pretrained``; seeds are equal."""
    dtype = torch.bfloat16 if kind == "float32" else torch.float32
    config = hf.AutoConfig.from_pretrained(folder)
    truth, info = _truth(auto, folder, config, dtype)
    compiled = unloaded_program(on_meta(auto, config, dtype), sample, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keys = compiled.load_pretrained(folder, seed=3, progress=False)
    assert keys == LoadedKeys(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
    told = " ".join(str(w.message) for w in caught)
    for name in (*keys.missing_keys, *keys.unexpected_keys):
        assert (name in told) == (dist.get_rank() == 0)
    # The head has the embedding's tensor, and init_weights draws it for both.
    same(compiled, truth, drawn="transformer.wte.weight" if kind == "missing tied" else "")


def _truth(auto: Any, folder: str, config: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return auto.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)


# What to save, what to do with the file, and what to load it into.


def _drop(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def _bert_of_old(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)


def _add_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()


def _add_old_buffers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)


def _add_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.7.mlp.c_fc.weight"] = torch.zeros(2)


CAUSAL, CLASSES = hf.AutoModelForCausalLM, hf.AutoModelForImageClassification
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Any]]] = {
    "tied head in the file": (lambda: zoo.gpt2()[0], CAUSAL, _add_head),
    "base model": (lambda: zoo.gpt2()[0].transformer, CAUSAL, lambda tensors: None),  # type: ignore[union-attr]
    "unexpected": (lambda: zoo.gpt2()[0], CAUSAL, _add_more),
    "missing": (
        lambda: zoo.gpt2()[0],
        CAUSAL,
        _drop(
            "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.ln_1.bias", "transformer.wpe.weight"
        ),
    ),
    "missing tied": (lambda: zoo.gpt2()[0], CAUSAL, _drop("transformer.wte.weight")),
    "old buffers": (lambda: zoo.llama()[0], CAUSAL, _add_old_buffers),
    "missing head": (lambda: zoo.llama()[0], CAUSAL, _drop("lm_head.weight")),
    "missing class": (
        lambda: zoo.vit()[0],
        CLASSES,
        _drop("vit.embeddings.cls_token", "classifier.weight"),
    ),
    "legacy": (lambda: zoo.bert()[0], hf.AutoModelForMaskedLM, _bert_of_old),
    "bfloat16": (lambda: zoo.llama()[0], CAUSAL, cast_to(torch.bfloat16)),
    "float32": (lambda: zoo.llama()[0], CAUSAL, lambda tensors: None),
}
SAMPLES = {"missing class": zoo.vit, "legacy": zoo.bert}


def _mean_square(output: Any, batch: Any) -> torch.Tensor:
    return output.last_hidden_state.square().mean()


def test_a_base_model_takes_its_part_of_a_larger_one(ranks: Pools, tmp_path: Path) -> None:
    model, sample = zoo.llama()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    options = TENSOR | dict(loss_fn=_mean_square)
    given = "base", hf.AutoModel, str(tmp_path), {"input_ids": sample["input_ids"]}, options
    ranks(2).run(_loads_as_transformers, *given)


class Norms(nn.Module):
    """No model of ``transformers``: it has its own names, and buffers in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).unsqueeze(1) * self.scale
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


def _loads_norms(folder: str) -> None:
    with torch.device("meta"):
        model = Norms()
    compiled = unloaded_program(model, (torch.zeros(8, 8),), parallel=dict(data=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keys = compiled.load_pretrained(folder, seed=3, progress=False)
    missing = ["attention.out_proj.bias", "norm.num_batches_tracked", "norm.running_mean"]
    assert keys == LoadedKeys(missing, ["more"])
    assert len(caught) == (2 if dist.get_rank() == 0 else 0)
    found = compiled.state_dict()
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        assert name == "more" or torch.equal(full(found[name]), value), name
    # MultiheadAttention itself sets this bias to 0, and its part would draw it.
    assert not full(found["attention.out_proj.bias"]).any()
    assert not full(found["norm.running_mean"]).any()
    x = torch.randn(8, 8)
    with pytest.raises(RunError, match=r"1 tensors have no values: scale\..*get_buffer"):
        compiled(x)
    with pytest.raises(RunError, match="not the same on all ranks"):
        compiled.load_pretrained(folder, seed=dist.get_rank(), progress=False)


def test_any_model_has_the_names_of_the_files(ranks: Pools, tmp_path: Path) -> None:
    state = Norms().state_dict()
    for name in ("attention.out_proj.bias", "norm.num_batches_tracked", "norm.running_mean"):
        del state[name]
    state["norm.running_var"] *= 3
    save_file(state | {"more": torch.zeros(2)}, tmp_path / "model.safetensors")
    ranks(2).run(_loads_norms, str(tmp_path))


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize("kind", CASES)
def test_names_are_those_of_from_pretrained(ranks: Pools, tmp_path: Path, kind: str) -> None:
    make, auto, edit = CASES[kind]
    make().save_pretrained(tmp_path)  # type: ignore[operator]
    edit_file(tmp_path, edit)
    sample = SAMPLES.get(kind, zoo.gpt2)()[1]
    options = PIPELINE if kind in ("missing", "base model") else TENSOR
    ranks(2).run(_loads_as_transformers, kind, auto, str(tmp_path), sample, options)
