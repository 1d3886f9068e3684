"""Any solver: the same problem, handed to several solvers, has one optimum."""

from __future__ import annotations

import pickle
from pathlib import Path

import highspy
import pytest
import zoo

import autopar
from autopar import Plan, PlanError

PARALLEL = dict(data=2, tensor=dict(size=2, mode="1d"))


def planned(**options: object) -> Plan:
    model, sample = zoo.gpt2(batch=8, dropout=0.0)
    return autopar.plan(model, sample, 4, cluster="a100-sxm", progress=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(parallel=PARALLEL), id="1d", marks=pytest.mark.slow),
        pytest.param(dict(mesh=(4,), memory_budget=3e6), id="little memory"),
    ],
)
def test_two_solvers_find_one_optimum(options: dict) -> None:
    highs = planned(**options)
    for solver in ("pulp:CBC", "pulp:HiGHS"):
        other = planned(solver=solver, **options)
        assert other.step_time == pytest.approx(highs.step_time, rel=1e-4)
        assert other.configuration_gap == pytest.approx(highs.configuration_gap, abs=1e-4)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ("cbc", r"solver='cbc': give \"highs\", or \"pulp:NAME\" with one of .*PULP_CBC_CMD"),
        ("pulp:NONE", r"solver='pulp:NONE': give"),
        (3, r"solver=3: give"),
        ("pulp:CPLEX", r"PuLP knows CPLEX_CMD but does not find it.*it finds .*PULP_CBC_CMD"),
    ],
)
def test_solvers_that_there_are_not(solver: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(solver=solver)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("ending", ["mps", "lp"])
def test_the_problem_is_written_for_others(ending: str, tmp_path: Path) -> None:
    """Read back and solved, it has integers and the values that a solution needs."""
    plan = planned(parallel=PARALLEL)
    path = tmp_path / f"problem.{ending}"
    plan.write_problem(path)
    assert list(tmp_path.iterdir()) == [path]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.readModel(str(path))
    assert solver.getNumCol() > 10
    assert highspy.HighsVarType.kInteger in solver.getLp().integrality_
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    assert solver.getInfo().objective_function_value > 0


def test_a_plan_without_its_problem_says_so(tmp_path: Path) -> None:
    plan = planned(parallel=PARALLEL)
    with pytest.raises(PlanError, match=r"ends with \.mps or \.lp"):
        plan.write_problem(tmp_path / "problem.txt")
    plan.save(tmp_path / "plan.json")
    for other in (Plan.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        with pytest.raises(PlanError, match="was loaded or changed"):
            other.write_problem(tmp_path / "problem.mps")
