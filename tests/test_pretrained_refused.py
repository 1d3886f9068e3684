"""What ``load_pretrained`` cannot load it refuses on every rank, and says what to write instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
import zoo
from pool import Pools
from pretrained_models import TENSOR, cast_to, edit_file, on_meta, same, unloaded_program
from trained import build

from autopar.errors import RunError
from autopar.runtime.values.pretrained.folder import stored_tensors
from autopar.runtime.values.pretrained.names import match
from autopar.runtime.values.pretrained.stored_tensor import as_stored

# What is refused: the edit of a folder of GPT-2, and what the error says.


def _config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _file(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_file(folder, edit)


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
    "float8": (_file(cast_to(torch.float8_e4m3fn)), "float8_e4m3fn.*dequantise"),
    "integers": (_file(cast_to(torch.int8)), "int8, and the model has it in torch.float32"),
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
    compiled = unloaded_program(on_meta(hf.AutoModelForCausalLM, config), sample, **TENSOR)
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


def test_a_conversion_that_does_not_fit_says_what_to_write(tmp_path: Path) -> None:
    model, _ = zoo.mixtral()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    stored: dict[str, Any] = stored_tensors(tmp_path)
    name = next(name for name in stored if name.endswith("experts.1.w2.weight"))
    stored[name] = as_stored(torch.zeros(3, 5))  # the other experts have another shape
    with pytest.raises(RunError, match=r"cannot make .*experts.*save_original_format=False"):
        match(model, stored)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.gpt2()
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    monkeypatch.delattr(hf, "conversion_mapping", raising=False)
    with pytest.raises(RunError, match=r"names tensors, and this is transformers 5.*install"):
        match(model, {})
