"""A process that is forked from one that has planned can plan, too: HiGHS has no threads there."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import highspy
import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.frontend.forked_workers import forked, start_without_collecting
from autopar.search.ilp.programs.silent_highs import SilentHighs

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

SECONDS = 60.0  # what is stuck never ends


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def planned() -> float:
    """The step time of a plan, for which HiGHS solves problems."""
    torch.set_num_threads(1)
    parallel = dict(data=2, pipeline=2)
    sample = torch.zeros(16, 64)
    return autopar.plan(Deep(), sample, 4, parallel=parallel, progress=False).step_time


def solved(_: int = 0) -> float:
    """The optimum of a small program, found by HiGHS in this process."""
    generator, size = np.random.default_rng(0), 30
    columns = np.arange(size, dtype=np.int32)
    solver = SilentHighs()
    for cost in generator.random(size):
        solver.addVar(0.0, 1.0)
        solver.changeColCost(solver.numVariables - 1, float(cost))
    kinds = np.full(size, highspy.HighsVarType.kInteger)
    solver.changeColsIntegrality(size, columns, kinds)
    for _ in range(15):
        solver.addRow(3.0, highspy.kHighsInf, size, columns, generator.random(size))
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return solver.getObjectiveValue()


def test_a_forked_process_plans_after_this_one() -> None:
    context = multiprocessing.get_context("fork")
    expected, (here, there) = planned(), context.Pipe()
    process = context.Process(target=lambda: there.send(planned()), daemon=True)
    start_without_collecting(process)  # other tests' process groups, which need their threads
    there.close()
    found = here.recv() if here.poll(SECONDS) else "stuck"
    process.kill()
    process.join()
    assert found == expected


def test_workers_solve_after_a_solver_of_the_users_own() -> None:
    expected = solved()
    assert dict(forked(solved, 4, 2)) == dict.fromkeys(range(4), expected)


_ABANDONED_GROUP = """
import gc
import torch
import torch.distributed as dist
from autopar.frontend.forked_workers import forked

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
abandoned = [dist.group.WORLD]
abandoned.append(abandoned)
del abandoned
dist.destroy_process_group()
assert [found for _, found in forked(lambda number: gc.collect() >= 0, 2, 2)] == [True, True]
"""


def test_workers_do_not_destroy_the_process_groups_of_this_process() -> None:
    """A worker would wait for threads that it has not."""
    subprocess.run([sys.executable, "-c", _ABANDONED_GROUP], check=True, timeout=SECONDS)
