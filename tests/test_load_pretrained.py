"""``load_pretrained`` gives every layout the values that ``from_pretrained`` gives one device, and
each rank reads no more than its part.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from equivalence import Double, differences, full, own, step, traced_once, vanishing, worst
from pool import Pools
from pretrained_models import AUTO, made, on_meta, same, unloaded
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from trained import build

from autopar.runtime.values.pretrained.folder import _Reader

PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "zero": dict(parallel=dict(data=2), zero=3),
        "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
        "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
    },
    4: {
        "zero": dict(parallel=dict(data=4), zero=3),
        "tensor": dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")), zero=3),
        "square": dict(parallel=dict(tensor=dict(size=4, mode="2d"))),
        "pipeline": dict(parallel=dict(pipeline=2, data=2), zero=3, micro_batch_size=4),
    },
}


def _loads(family: str, folder: str, sample: dict[str, Any]) -> None:
    auto, double = AUTO[family], torch.float64
    sample = {k: v.double() if v.is_floating_point() else v for k, v in sample.items()}
    more = {"experts_implementation": "batched_mm"} if family == "mixtral" else {}
    truth = auto.from_pretrained(folder, dtype=double, **more).train()
    meta = on_meta(auto, truth.config, double)
    with traced_once(), Double():
        expected = step(copy.deepcopy(truth), sample)
        for label, options in PLANS[dist.get_world_size()].items():
            with unloaded():
                compiled = build(meta, sample, cluster="cpu", **options)
            keys = compiled.load_pretrained(folder, progress=False)
            assert keys == ([], []), (label, keys)
            same(compiled, truth)
            found = step(compiled, sample)
            errors = differences(found, own(expected, found), vanishing(expected))
            assert worst(errors)[0] < 1e-9, (label, worst(errors))


def _folder(family: str, path: Path) -> tuple[str, dict[str, Any]]:
    """A folder of several files."""
    model, sample = made(family)
    model.save_pretrained(path / family, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list((path / family).glob("*.safetensors"))) > 1
    return str(path / family), sample


def _cases() -> Iterator[Any]:
    """Each family on two ranks, and one on one and on four; the others are exhaustive tests."""
    for family, world in itertools.product(AUTO, (1, 2, 4)):
        is_fast = family == "gpt2" and world < 4
        is_slow = family == "gpt2" or world == 2
        marks = [] if is_fast else [pytest.mark.slow if is_slow else pytest.mark.exhaustive]
        yield pytest.param(family, world, marks=marks)


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize(("family", "world"), [*_cases()])
def test_values_loss_and_gradients_are_those_of_from_pretrained(
    ranks: Pools, tmp_path: Path, family: str, world: int
) -> None:
    folder, sample = _folder(family, tmp_path)
    ranks(world).run(_loads, family, folder, sample)


class Tall(nn.Module):
    """16 layers of 8 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[:, :1024].tanh()
        return x.square().mean()


def _peak_bytes(reset: bool = False) -> int:
    """The most memory that this process had since the last reset, pages of files included."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _holds_its_part(folder: str, label: str) -> None:
    with torch.device("meta"):
        model = Tall()
    with unloaded():
        compiled = build(model, (torch.zeros(8, 1024),), cluster="cpu", **PLANS[2][label])
    part = sum(p.to_local().nbytes for p in compiled.parameters() if isinstance(p, DTensor))
    assert part == 64 << 20
    before = _peak_bytes(reset=True)  # with the part, which has memory since it was compiled
    compiled.load_pretrained(folder, progress=False)
    # One tensor, and the pages of a file that is open.
    assert _peak_bytes() - before < (8 << 20) + (32 << 20) + (4 << 20)
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        found = dict(compiled.named_parameters())[name]
        assert torch.equal(full(found), value)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux")
@pytest.mark.parametrize("label", ["zero", pytest.param("tensor", marks=pytest.mark.slow)])
def test_memory_is_the_part_and_one_tensor(ranks: Pools, tmp_path: Path, label: str) -> None:
    save_file(Tall().state_dict(), tmp_path / "model.safetensors")
    ranks(2).run(_holds_its_part, str(tmp_path), label)


def _reads_its_part(family: str, folder: str, sample: dict[str, Any]) -> None:
    read: dict[str, int] = {}
    part = _Reader._part

    def counted(self: _Reader, path: Path, name: str, ranges: Any, size: int) -> torch.Tensor:
        found = part(self, path, name, ranges, size)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    more = {"experts_implementation": "batched_mm"} if family == "mixtral" else {}
    meta = on_meta(AUTO[family], transformers.AutoConfig.from_pretrained(folder, **more))
    with traced_once(), mock.patch.object(_Reader, "_part", counted):
        for options in PLANS[dist.get_world_size()].values():
            with unloaded():
                compiled = build(meta, sample, cluster="cpu", **options)
            read.clear()
            compiled.load_pretrained(folder, progress=False)
            own = [p.to_local() if isinstance(p, DTensor) else p for p in compiled.parameters()]
            assert sum(read.values()) == sum(p.nbytes for p in own)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_each_rank_reads_its_part(ranks: Pools, tmp_path: Path, family: str) -> None:
    folder, sample = _folder(family, tmp_path)
    ranks(2).run(_reads_its_part, family, folder, sample)
