"""What ``save_pretrained`` writes is what Hugging Face's ``from_pretrained`` reads, and what
``load_pretrained`` reads under another plan.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import zoo
from pool import Pools
from pretrained_models import AUTO, made, on_meta, same, unloaded
from trained import build

from autopar.errors import RunError

PLANS: dict[str, dict[str, Any]] = {
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
}


def _writes(label: str, folder: str) -> None:
    model, sample = zoo.gpt2()  # its head is tied to the embedding
    compiled = build(model, sample, verify=False, **PLANS[label])
    path = Path(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (4096, hard)
    )  # a full disk, of which config.json has some
    with pytest.raises(RunError, match="File too large"):
        compiled.save_pretrained(path / "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert not any(path.iterdir())
    for name, size in (("one", 1 << 30), ("many", 1 << 12)):
        compiled.save_pretrained(path / name, max_file_bytes=size)
        read = transformers.GPT2LMHeadModel.from_pretrained(path / name)
        files = len(list((path / name).glob("*.safetensors")))
        assert files > 5 if name == "many" else files == len(compiled.plan.stages)
        for (key, mine), (other, found) in zip(
            model.state_dict().items(), read.state_dict().items(), strict=True
        ):
            assert key == other
            assert torch.equal(mine, found), key
    with pytest.raises(RunError, match="exists"):
        compiled.save_pretrained(path / "one")


@pytest.mark.parametrize("label", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_transformers_reads_what_was_written(ranks: Pools, tmp_path: Path, label: str) -> None:
    ranks(2).run(_writes, label, str(tmp_path))


def _comes_back(family: str, folder: str) -> None:
    auto, (model, sample) = AUTO[family], made(family)
    model.config.dtype = "bfloat16"  # as of a model that was loaded in another dtype
    if hasattr(model, "generation_config"):
        model.generation_config.max_length = 77
    compiled = build(model, sample, verify=False, **PLANS["tensor"])
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(**sample)["loss"].backward()
    optimizer.step()
    compiled.save_pretrained(folder)
    found = auto.from_pretrained(folder, experts_implementation="batched_mm")
    assert type(found) is type(model)
    assert found.config.architectures == [type(model).__name__]
    assert not hasattr(model, "generation_config") or found.generation_config.max_length == 77
    same(compiled, found)
    with unloaded():
        other = build(
            on_meta(auto, found.config), sample, cluster="cpu", verify=False, **PLANS["pipeline"]
        )
    assert other.load_pretrained(folder, progress=False) == ([], [])
    same(other, found)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in AUTO if f != "llama")]
)
def test_what_was_written_comes_back(ranks: Pools, tmp_path: Path, family: str) -> None:
    ranks(2).run(_comes_back, family, str(tmp_path / "folder"))
