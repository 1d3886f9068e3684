"""What ``benchmarks/planning.py`` times, on models that are planned in a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import planning
import pytest
import torch
import torch.distributed as dist
from planning_measures import compile_on_one_rank, further_plans, plan_once, refuse, sweep
from planning_rows import DEPTHS, MODELS, NARROW, ROWS, SIZES, build, row_of

from autopar.errors import PlanError

Sample = dict[str, Any]
FIXED = dict(
    parallel=dict(data=2, tensor=dict(size=2, mode="sequence")),
    micro_batch_size=1,
    recompute="full",
    zero=1,
)


@pytest.fixture(scope="module")
def tiny() -> tuple[torch.nn.Module, Sample]:
    return build("Llama", SIZES | NARROW | dict(num_hidden_layers=2), 8, 64)


@pytest.mark.slow
def test_a_plan_has_its_phases(tiny: tuple[torch.nn.Module, Sample]) -> None:
    measured = plan_once(*tiny, 4, "cpu", FIXED)
    assert measured.found == "2 x 2, 4 microbatches"
    assert measured.phases["capture"] > 0
    assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert measured.phases["other"] > -1e-3
    assert measured.peak > 2**27


@pytest.mark.slow
@pytest.mark.parametrize("measure", [further_plans, sweep])
def test_the_slowest_of_further_plans(tiny: tuple[torch.nn.Module, Sample], measure: Any) -> None:
    measured = measure(*tiny, 4, "cpu", FIXED, [dict(zero=3), dict(micro_batch_size=2)])
    median = float(measured.found.partition("their median ")[2].removesuffix(" s"))
    assert measured.found.startswith("the slowest of 2")
    assert 0 < median <= measured.seconds + 0.005
    assert sum(measured.phases.values()) == pytest.approx(measured.seconds)
    assert measured.phases["other"] > -1e-3


def test_a_further_plan_that_fails_is_no_fast_plan(tiny: tuple[torch.nn.Module, Sample]) -> None:
    with pytest.raises(PlanError, match="micro_batch_size"):
        sweep(*tiny, 4, "cpu", FIXED, [dict(micro_batch_size=3)])


@pytest.mark.slow
def test_a_refusal_is_an_error_for_memory(tiny: tuple[torch.nn.Module, Sample]) -> None:
    assert refuse(*tiny, 4, "cpu", FIXED | dict(memory_budget=1e5)).found.startswith("refused")
    with pytest.raises(ValueError, match="give a smaller budget"):
        refuse(*tiny, 4, "cpu", FIXED)


def test_compile_on_one_rank_of_many(tiny: tuple[torch.nn.Module, Sample]) -> None:
    with pytest.warns(UserWarning, match="meta device"):
        measured = compile_on_one_rank(*tiny, 4, "cpu", FIXED)
    assert set(measured.phases) == {
        *("trace", "verify", "check", "mesh", "lower", "types", "module")
    }
    total = float(measured.found.partition("compile ")[2].removesuffix(" s"))
    assert 0 < measured.seconds <= sum(measured.phases.values()) <= total + 0.005
    assert not dist.is_initialized()


def test_names_of_rows() -> None:
    assert row_of("2@4x8").options == dict(mesh=(4, 8))
    assert row_of("2@4x8").world_size == 32
    assert {row.model for row in ROWS.values()} >= set(MODELS)
    assert set(DEPTHS) <= set(ROWS)
    for name in ("llama", "x@2x2", "2@", "2@4x"):
        with pytest.raises(ValueError, match="LAYERS@MESH"):
            row_of(name)


def test_tables_have_targets_and_the_ratio_of_depths() -> None:
    rows = [
        dict(row=name, seconds=seconds, phases={}, peak=2**29, found="8 x 8", workload=1.0)
        for name, seconds in (("32@32x8", 2.0), (DEPTHS[0], 2.0), (DEPTHS[1], 5.0))
    ]
    failed = dict(row="compile-256", error="stopped after 1 s", workload=1.0)
    plans, compiles, ratio = planning.tables([*rows, failed]).split("\n\n")
    first = plans.splitlines()[2].split()
    assert first[:7] == ["32@32x8", "2.00", "3", "0.50", "0.7", "1.0", "8"]
    assert "stopped after 1 s" in compiles
    assert "2.50 times" in ratio


@pytest.mark.exhaustive
def test_a_row_is_a_process_with_the_workload_beside_it() -> None:
    script = Path(planning.__file__)
    done = subprocess.run(
        [sys.executable, script, "--rows", "1@2x1"], capture_output=True, text=True, check=False
    )
    header, _, line = done.stdout.strip().splitlines()[-3:]
    assert header.split()[0] == "row", done.stderr
    workload = line[header.index("workload s") :].split()[0]
    assert float(workload) > 0
    assert line.startswith("1@2x1")
