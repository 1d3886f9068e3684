"""Names, dtypes and missing tensors: ``load_pretrained`` does what ``from_pretrained`` does with
them, or says what to write instead.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
import zoo
from pool import Pools
from pretrained_models import on_meta, same, unloaded
from safetensors.torch import load_file, save_file
from torch import nn
from trained import build

import autopar
from autopar.errors import RunError
from autopar.runtime.values.pretrained.load import LoadedKeys

TENSOR: dict[str, Any] = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
PIPELINE: dict[str, Any] = dict(parallel=dict(pipeline=2), micro_batch_size=4)


def _compiled(model: nn.Module, sample: dict[str, Any], **options: Any) -> autopar.Compiled:
    with unloaded():
        return build(model, sample, cluster="cpu", verify=False, **options)


def _edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Writes the folder's one file anew."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def _loads_as_transformers(
    kind: str, auto: Any, folder: str, sample: dict[str, Any], options: dict[str, Any]
) -> None:
    """Compares values and reports with those of ``from_pretrained``; seeds are equal."""
    dtype = torch.bfloat16 if kind == "float32" else torch.float32
    config = hf.AutoConfig.from_pretrained(folder)
    truth, info = _truth(auto, folder, config, dtype)
    compiled = _compiled(on_meta(auto, config, dtype), sample, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keys = compiled.load_pretrained(folder, seed=3, progress=False)
    assert keys == LoadedKeys(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
    told = " ".join(str(w.message) for w in caught)
    for name in (*keys.missing_keys, *keys.unexpected_keys):
        assert (name in told) == (dist.get_rank() == 0)
    same(compiled, truth)


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


def _add_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.7.mlp.c_fc.weight"] = torch.zeros(2)


def _cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: t.to(dtype) for name, t in tensors.items()})

    return cast


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
    "missing head": (lambda: zoo.llama()[0], CAUSAL, _drop("lm_head.weight")),
    "missing class": (
        lambda: zoo.vit()[0],
        CLASSES,
        _drop("vit.embeddings.cls_token", "classifier.weight"),
    ),
    "legacy": (lambda: zoo.bert()[0], hf.AutoModelForMaskedLM, _bert_of_old),
    "bfloat16": (lambda: zoo.llama()[0], CAUSAL, _cast(torch.bfloat16)),
    "float32": (lambda: zoo.llama()[0], CAUSAL, lambda tensors: None),
}
SAMPLES = {"missing class": zoo.vit, "legacy": zoo.bert}


@pytest.mark.parametrize("kind", CASES)
def test_names_are_those_of_from_pretrained(ranks: Pools, tmp_path: Path, kind: str) -> None:
    make, auto, edit = CASES[kind]
    make().save_pretrained(tmp_path)  # type: ignore[operator]
    _edited(tmp_path, edit)
    sample = SAMPLES.get(kind, zoo.gpt2)()[1]
    options = PIPELINE if kind in ("missing", "base model") else TENSOR
    ranks(2).run(_loads_as_transformers, kind, auto, str(tmp_path), sample, options)


# What is refused: the edit of a folder of GPT-2, and what the error says.


def _config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _file(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: _edited(folder, edit)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _index(places: dict[str, str]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        text = json.dumps({"weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text)

    return edit


def _renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


def _adapter(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.wte.weight"] = torch.zeros(80, 32)


def _two_heads(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1


def _strangers(tensors: dict[str, torch.Tensor]) -> None:
    tensors.clear()
    tensors["encoder.weight"] = torch.zeros(2)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (
        _pickled,
        r"pytorch_model\.bin, a pickle, .*from_pretrained\(folder\)\.save_pretrained",
    ),
    "torn": (_torn, r"model\.safetensors cannot be read"),
    "quantised": (
        _config(quantization_config={"quant_method": "gptq"}),
        "quantised .'gptq'.*dequantise",
    ),
    "float8": (_file(_cast(torch.float8_e4m3fn)), "float8_e4m3fn.*dequantise"),
    "integers": (_file(_cast(torch.int8)), "int8, and the model has it in torch.float32"),
    "shape": (_file(_shape), r"wte\.weight \(80, 32\) there and \(64, 32\) in the model"),
    "two values": (_file(_two_heads), "two different values of .*tie_word_embeddings=False"),
    "another model": (_file(_strangers), r"holds no tensor of the model: it has encoder\.weight"),
    "other names": (_renamed, r"has neither model\.safetensors nor .*other\.safetensors"),
    "adapter": (_adapter, "an adapter of PEFT.*merge_and_unload"),
    "outside": (_index({"a": "../one.safetensors"}), "which is none of its folder"),
    "not listed": (_index({"a": "one.safetensors"}), "lists 1 tensors that no file has, such as a"),
    "no file": (_index({"a": "two.safetensors"}), r"two\.safetensors cannot be read"),
    "no index": (_index({}), "has no weight_map"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
}


def _refuses(folders: dict[str, str], sample: dict[str, Any]) -> None:
    config = hf.GPT2Config.from_pretrained(folders["integers"])
    compiled = _compiled(on_meta(CAUSAL, config), sample, **TENSOR)
    for kind, folder in folders.items():
        with pytest.raises(RunError, match=REFUSED[kind][1]):
            compiled.load_pretrained(folder, progress=False)
    with pytest.raises(RunError, match=r"no folder on this rank.*snapshot_download"):
        compiled.load_pretrained("openai-community/gpt2", progress=False)
    with pytest.raises(RunError, match="not the same on all ranks"):
        compiled.load_pretrained(folders[sorted(folders)[dist.get_rank()]], progress=False)
    with pytest.raises(RunError, match="tensors have no values"):
        compiled(**sample)


def test_what_cannot_be_loaded_is_refused(ranks: Pools, tmp_path: Path) -> None:
    model, sample = zoo.gpt2()
    for kind, (edit, _) in REFUSED.items():
        model.save_pretrained(tmp_path / kind)  # type: ignore[operator]
        edit(tmp_path / kind)
    ranks(2).run(_refuses, {kind: str(tmp_path / kind) for kind in REFUSED}, sample)


def _needs_the_model(folder: str) -> None:
    model, sample = zoo.gpt2()
    compiled = build(model, sample, verify=False, **TENSOR)
    with pytest.raises(RunError, match=r"pass the model, load_pretrained\(folder, model\)"):
        compiled.load_pretrained(folder)
    with pytest.raises(RunError, match="pass the model that was compiled"):
        compiled.load_pretrained(folder, zoo.llama()[0], progress=False)
    compiled.load_pretrained(folder, model, progress=False)
    same(compiled, hf.GPT2LMHeadModel.from_pretrained(folder))


def test_a_model_with_values_is_passed(ranks: Pools, tmp_path: Path) -> None:
    torch.manual_seed(1)
    hf.GPT2LMHeadModel(zoo.gpt2()[0].config).save_pretrained(tmp_path)  # type: ignore[arg-type]
    ranks(2).run(_needs_the_model, str(tmp_path))
