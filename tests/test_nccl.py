"""Programs of several ranks over NCCL, each rank on a GPU of its own or, with NCCL 2.30 and
``NCCL_MULTI_RANK_GPU_ENABLE=1``, on one that they share. All of it is skipped where there are fewer
GPUs than ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, Outcome, check
from pool import Pools
from random_plans import checked, planned
from test_equivalence import configurations
from test_gpu import CLUSTER, TWO_RANKS
from test_inductor import CONFIGURATIONS, RATE, both, train, worst
from test_lost_ranks import check_that_ranks_name_the_lost_one
from test_modes import FOUR
from test_sent_dtypes import MOVED, SUMMED, moves, sums

from autopar.runtime.communication.groups import _splits, groups

SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
GPUS = (4 if SHARED else torch.cuda.device_count()) if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, or one that NCCL's ranks may share"),
    pytest.mark.timeout(300),
]
FOUR_RANKS = pytest.param(4, marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs"))


def on_gpus(asked: dict[str, dict[str, Any]], **more: Any) -> dict[str, dict[str, Any]]:
    """The configurations, without those whose plan is for other devices."""
    return {
        label: dict(cluster=CLUSTER) | options | more
        for label, options in asked.items()
        if options.get("cluster", CLUSTER) == CLUSTER
    }


@pytest.mark.parametrize("world_size", [2, FOUR_RANKS])
@pytest.mark.parametrize("name", ["gpt2", "llama", "cnn", "mlp"])
def test_programs_equal_one_device(ranks: Pools, name: str, world_size: int) -> None:
    asked = configurations(name, world_size)
    if name == "gpt2":
        modes = {label: dict(parallel=parallel) for label, parallel in FOUR.items()}
        asked |= TWO_RANKS if world_size == 2 else modes
    pool = ranks(world_size, "nccl")
    found: list[dict[str, Outcome]] = pool.run(
        check, name, torch.float64, on_gpus(asked, backend="eager"), "cuda"
    )
    errors = {label: max(one[label].worst for one in found) for label in found[0]}
    assert all(e < 1e-9 for e, _ in errors.values()), errors


@pytest.mark.parametrize("label", [*CONFIGURATIONS, "sequence"])
def test_compiled_programs_equal_eager_ones(ranks: Pools, label: str, tmp_path: Path) -> None:
    asked = (CONFIGURATIONS | TWO_RANKS)[label]
    for error in ranks(2, "nccl").run(compiled_beside_eager, tmp_path, asked, timeout=280):
        assert error < (1e-9, ""), error


def compiled_beside_eager(folder: Path, asked: dict[str, Any]) -> tuple[float, str]:
    made = zoo.on("cuda", zoo.gpt2(dtype=torch.float64, dropout=RATE, layers=1))
    with Double():
        _, (eager, compiled) = both(made, dist.get_world_size(), folder, cluster=CLUSTER, **asked)
        expected = train(eager, made[1], 2)
        return worst(train(compiled, made[1], 2), expected)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("seed", [1, 20, 137, 193])
def test_random_programs(ranks: Pools, seed: int, backend: str) -> None:
    for outcome in ranks(2, "nccl").run(random_program, seed, backend, timeout=280):
        assert outcome.kind == "right", outcome


def random_program(seed: int, backend: str) -> Any:
    jobs: list[Any] = [planned([seed], 2, 0, 1, backend, "cuda")[0]]
    dist.broadcast_object_list(jobs)
    return jobs[0].outcome or checked(jobs[0], 2, "cuda")


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_tensors_of_every_dtype_arrive(ranks: Pools, dtype: torch.dtype) -> None:
    for found in ranks(2, "nccl").run(moves, dtype, "cuda"):
        assert all(found.values()), found


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_sums_are_right(ranks: Pools, dtype: torch.dtype) -> None:
    for found in ranks(2, "nccl").run(sums, dtype, "cuda"):
        assert all(found.values()), found


def divided() -> tuple[bool, bool, list[int]]:
    """Whether torch splits the world, and a group made so, with its ranks' sum of ranks."""
    world = dist.group.WORLD
    assert world is not None
    group = groups().own_of([[0, 2], [1, 3]])
    total = torch.tensor([dist.get_rank()], device="cuda")
    dist.all_reduce(total, group=group)
    return _splits(world), groups().own_of([[0, 2], [1, 3]]) is group, total.tolist()


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_groups_are_split_off_the_world(ranks: Pools) -> None:
    found = ranks(4, "nccl").run(divided)
    assert found == [(True, True, [2]), (True, True, [4])] * 2


@pytest.mark.skipif(GPUS < 3, reason="needs three GPUs")
@pytest.mark.parametrize("case", ["dies in forward", "dies in backward", "stops in forward"])
def test_every_rank_names_the_lost_one(case: str, tmp_path: Path) -> None:
    check_that_ranks_name_the_lost_one(case, tmp_path, "cuda")
