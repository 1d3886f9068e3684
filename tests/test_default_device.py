"""``torch.set_default_device`` places the tensors of the user, and none of the package's: with the
default device "meta", whose tensors nobody can read, programs train, save and load.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equivalence
import pytest
import torch
import torch.distributed as dist
import zoo
from offloaded import PINNED
from pool import Pools

import autopar

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "zero 3": dict(parallel=dict(data=2), zero=3),
    "offloaded": dict(parallel=dict(data=2), zero=dict(stage=1, **PINNED)),
    "local": dict(parallel=dict(data=2), batch="local"),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d")), micro_batch_size=4),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=2, schedule="1f1b"),
    "rings": dict(parallel=dict(tensor=dict(size=2, mode="sequence", ring=2))),
}


@contextmanager
def on_meta() -> Iterator[None]:
    """Within, tensors without a device are on the meta device, as they would be on a GPU."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def train(made: zoo.Made, folder: Path, **options: Any) -> None:
    model, sample = made
    world = dist.get_world_size() if dist.is_initialized() else 1
    folder = folder / "checkpoint"
    with on_meta():
        program = autopar.compile(copy.deepcopy(model), sample, world, progress=False, **options)
        sampler = program.sampler(range(16), shuffle=True)
        assert len(list(sampler)) > 0
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        batch = sample
        if options.get("batch") == "local":
            batch = {name: x.chunk(world)[dist.get_rank()] for name, x in sample.items()}
        for _ in range(2):
            with program.no_sync():
                equivalence.loss_of(program(**batch)).backward()
            equivalence.loss_of(program(**batch)).backward()
            autopar.clip_grad_norm_(program.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        program.save(str(folder), optimizer=optimizer, wait=True)
        before = [equivalence.full(p).clone() for p in program.parameters()]
        for parameter in program.parameters():
            torch.nn.init.zeros_(parameter)
        program.load(str(folder), optimizer=optimizer)
        with torch.no_grad():
            loss = equivalence.loss_of(program.eval()(**batch))
    assert loss.device.type == "cpu"
    assert torch.isfinite(loss)
    for parameter, value in zip(program.parameters(), before, strict=True):
        assert torch.equal(equivalence.full(parameter), value)


@pytest.mark.parametrize("options", [{}, dict(micro_batch_size=2, recompute="full")], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_one_rank(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = zoo.gpt2(dropout=0.1) if name == "gpt2" else zoo.cnn()
    train(made, tmp_path, cluster="cpu", **options)


@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_two_ranks(ranks: Pools, label: str, tmp_path: Path) -> None:
    ranks(2).run(train, zoo.gpt2(), tmp_path, cluster="cpu", **CONFIGURATIONS[label])
