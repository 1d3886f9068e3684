"""A rank that is rehearsed alone takes the memory, and computes for the time, of the same rank in a
real run.
"""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from rehearsed import PLANS, RANKS, made, planned, real_compute, real_peak, rehearsed
from torch import nn

import autopar
from autopar import Plan, RunError, cli
from autopar.ir.batch_layouts import with_batch
from autopar.runtime.communication.stand_ins import stand_in

SLOW = "1f1b, recomputed", "zero=3", "interleaved"


def _marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize("name", [_marked(name) for name in PLANS])
def test_the_memory_is_that_of_a_real_rank(ranks: Pools, name: str) -> None:
    plan = planned(name)
    real = ranks(RANKS).run(real_peak, plan)
    for rank in range(RANKS):
        found = plan.rehearse(*made(), rank, steps=1, progress=False).peak_memory
        print(f"{name}: rank {rank}: rehearsed {found:,.0f} bytes, real {real[rank]:,}")
        assert found == pytest.approx(real[rank], rel=0.01)


@pytest.mark.alone
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("1f1b", marks=pytest.mark.slow),
        pytest.param("data", marks=pytest.mark.exhaustive),
    ],
)
def test_a_real_rank_computes_as_long(ranks: Pools, name: str) -> None:
    """Four ranks at a time, as in the real run, which share the cores of this machine."""
    plan, ratios = planned(name, "large"), []
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(RANKS, mp_context=context) as workers:
        for _ in range(2):
            real = ranks(RANKS).run(real_compute, plan, "large")
            jobs = [workers.submit(rehearsed, plan, rank, "large") for rank in range(RANKS)]
            ratios += [job.result().compute / took for job, took in zip(jobs, real, strict=True)]
    print(f"{name}: rehearsed to real {statistics.median(ratios):.3f}, all {sorted(ratios)}")
    assert statistics.median(ratios) == pytest.approx(1, abs=0.1)


class Blocks(nn.Module):
    """Linear layers and an embedding, to a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(x @ self.words.weight.T, labels)


def blocks(
    device: str, batch: int = 8, width: int = 64, layers: int = 8
) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device(device):
        ids = torch.zeros(batch, dtype=torch.long)
        return Blocks(layers, width), {"ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def small() -> Plan:
    return autopar.plan(*blocks("cpu"), 2, progress=False, parallel=dict(data=2), zero=0)


@pytest.mark.parametrize(
    "parallel",
    [dict(data=1024), pytest.param(dict(data=256, pipeline=4), marks=pytest.mark.exhaustive)],
    ids=["data", "pipeline"],
)
def test_ranks_of_a_thousand_from_the_meta_device(parallel: dict[str, Any]) -> None:
    model, sample = blocks("meta", 4096)
    how = dict(parallel=parallel, micro_batch_size=4, zero=1, recompute="none", cluster="cpu")
    plan = autopar.plan(model, sample, 1024, progress=False, **how)
    for rank in (0, 777):
        found = plan.rehearse(model, sample, rank, device="cpu", steps=1)
        stage = plan.pipeline * rank // 1024  # ranks of a stage follow each other
        assert {row.where for row in found.rows} == {f"stage {stage}", f"rank {rank}"}
        assert all(n > 0 for n in found.numbers().values())
        assert found.row("peak memory").ratio == pytest.approx(1, abs=0.02)
        assert "parameters were random numbers" in str(found)
    assert not dist.is_initialized()
    assert all(p.is_meta for p in model.parameters())


def test_it_leaves_nothing_behind(small: Plan) -> None:
    model, sample = blocks("cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    small.rehearse(model, sample, 1, steps=1)
    assert torch.equal(torch.rand(4), expected)
    assert not dist.is_initialized()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_same_memory_from_the_meta_device(small: Plan) -> None:
    here, there = (
        small.rehearse(*blocks(device), device="cpu", steps=1).peak_memory
        for device in ("cpu", "meta")
    )
    assert here == there == pytest.approx(small.peak_memory[0], rel=0.01)


def test_a_rank_holds_its_part_of_a_local_batch(small: Plan) -> None:
    found = [
        with_batch(small, batch).rehearse(*blocks("cpu"), 1, steps=1).row("bytes of inputs")
        for batch in ("global", "local")
    ]
    assert [row.measured for row in found] == [2 * 8 * 8, 2 * 8 * 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(rank=2), "rank=2: give a whole number from 0 to 1"),
        (dict(rank=-1), "rank=-1: give a whole number from 0 to 1"),
        (dict(steps=0), "steps=0: give a whole number from 1 to 10"),
        (dict(device="tpu"), 'device=\'tpu\': give "cpu" or "cuda"'),
        (dict(device="meta"), 'device=\'meta\': give "cpu" or "cuda"'),
    ],
)
def test_wrong_arguments(small: Plan, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        small.rehearse(*blocks("cpu"), **given)


def test_another_model_than_the_plans(small: Plan) -> None:
    with pytest.raises(RunError, match="the plan was made for a graph with fingerprint"):
        small.rehearse(*blocks("cpu", width=32))
    assert not dist.is_initialized()


def test_beside_a_process_group(small: Plan) -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(RunError, match="this process has a fake process group of 2 ranks"):
            small.rehearse(*blocks("cpu"))
    finally:
        dist.destroy_process_group()


def test_an_indexed_program_that_fails_says_so() -> None:
    """The sample's ids are no rows of the table."""
    model, sample = blocks("cpu")
    plan = autopar.plan(model, sample, 2, progress=False, parallel=dict(data=2))
    sample["ids"] += 1000
    with pytest.raises(RunError, match="rank 0 of 2 fails without the other ranks, IndexError"):
        plan.rehearse(model, sample)
    assert not dist.is_initialized()


BUILDER = """
import torch
from torch import nn

def build():
    x = torch.ones(8, 16)
    return nn.Linear(16, 16), x, lambda out, batch: out.square().mean()

def wrong():
    return 3
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "my_training.py", tmp_path / "plan.json"
    script.write_text(BUILDER)
    loss_fn = lambda out, batch: out.square().mean()  # noqa: E731
    how = dict(loss_fn=loss_fn, parallel=dict(data=4), progress=False)
    autopar.plan(nn.Linear(16, 16), torch.ones(8, 16), 4, **how).save(file)
    assert cli.main(["rehearse", str(file), f"{script}:build", "--rank", "3", "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rank 3 of 4 of a plan for cpu, rehearsed alone on a CPU with")
    assert "not rehearsed: the time of communication" in printed
    for name, message in (
        (f"{script}:wrong", "returned a int"),
        (f"{script}:absent", "names no function"),
        (f"{tmp_path}/absent.py:build", "cannot be imported"),
        ("build", "cannot be imported"),
    ):
        assert cli.main(["rehearse", str(file), name]) == 1
        assert message in capsys.readouterr().err


def test_messages_keep_their_tensors_and_fill_what_they_receive() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        numbers, flags = torch.full((4,), float("nan")), torch.full((4,), 7)
        messages = [
            dist.P2POp(dist.irecv, numbers, 1),
            dist.P2POp(dist.irecv, flags, 1),
            dist.P2POp(dist.isend, torch.ones(3), 1),
        ]
        stand_in(messages)
        works = dist.batch_isend_irecv(messages)
        assert len(works) == 3
        assert all(work.wait() for work in works)
        assert numbers.isfinite().all()
        assert numbers.abs().sum() > 0
        assert flags.tolist() == [0] * 4
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inductor's own parts
def test_a_compiled_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No process of the compiler outlives the test.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, sample = blocks("cpu", layers=1)
    how = dict(parallel=dict(data=2), backend="inductor", progress=False)
    found = autopar.plan(model, sample, 2, **how).rehearse(model, sample, 1, progress=False)
    assert found.backend == "inductor"
    assert found.compute > 0
    assert found.peak_memory is None
    assert "memory was not measured" in str(found)
