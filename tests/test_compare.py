"""Predicted beside measured, as a table and as a file. A run corrects the cluster of its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparisons import as_measured, planned
from equivalence import traced_once

from autopar import Cluster, Comparison, Plan
from autopar.errors import PlanError
from autopar.runtime.measure.compare import compare


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Cluster.load("cpu"), parallel=dict(data=2, tensor=dict(size=2, mode="1d")))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "parallel",
    [dict(data=2, tensor=dict(size=2, mode="1d")), dict(data=2, pipeline=2)],
    ids=["mesh", "pipeline"],
)
def test_a_prediction_that_came_true_has_ratios_of_one(parallel: dict[str, Any]) -> None:
    own = planned(Cluster.load("cpu"), parallel=parallel, micro_batch_size=4)
    found = compare(own, as_measured(own))
    ratios = {
        (row.where, row.what): row.ratio
        for row in found.rows
        if row.predicted and row.what != "peak memory"
    }
    assert {("step", "compute"), ("step", "total"), ("stage 0", "backward")} <= set(ratios)
    assert list(ratios.values()) == [pytest.approx(1.0)] * len(ratios)


def test_numbers_are_flat_and_those_of_the_rows(plan: Plan) -> None:
    found = compare(plan, as_measured(plan))
    numbers = found.numbers()
    assert numbers["step/total/measured"] == found.measured["total"]
    assert numbers["step/compute/predicted"] == found.predicted["compute"]
    rows = {(row.where, row.what): row for row in found.rows}
    assert len(rows) == len(found.rows)
    present = [x for row in found.rows for x in (row.predicted, row.measured) if x is not None]
    assert list(numbers.values()) == present
    memory = [row for row in found.rows if row.what == "peak memory"]
    assert memory
    assert memory[0].measured is None  # it was not measured, so it has no number
    assert f"{memory[0].where}/peak memory/measured" not in numbers
    assert all(isinstance(value, (int, float)) for value in numbers.values())


def test_saved_and_loaded_is_the_same(plan: Plan, tmp_path: Path) -> None:
    found = compare(plan, as_measured(plan))
    found.save(tmp_path / "comparison.json")
    loaded = Comparison.load(tmp_path / "comparison.json")
    assert loaded == found
    assert str(loaded) == str(found)
    assert max(map(len, str(found).splitlines())) <= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "hello", "is no comparison"),
        (lambda text: "[1]", "is no comparison"),
        (
            lambda text: text.replace('"version": 1', '"version": 7'),
            "comparison version 7, this autopar reads 1",
        ),
        (lambda text: text.replace('"steps"', '"stops"'), "damaged comparison"),
        (
            lambda text: re.sub(r'("what": "compute",\s+"predicted": )[\d.e-]+', r'\1"soon"', text),
            "damaged comparison.*'soon' is no number",
        ),
        (
            lambda text: text.replace('"what": "total"', '"what": "sum"'),
            "damaged comparison.*no predicted total",
        ),
        (lambda text: json.dumps({**json.loads(text), "rows": 3}), "damaged comparison"),
    ],
)
def test_a_damaged_file_is_told_what_is_wrong(
    plan: Plan, change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "comparison.json"
    compare(plan, as_measured(plan)).save(path)
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(PlanError, match=message) as error:
        Comparison.load(path)
    assert str(path) in str(error.value)


def test_numbers_that_no_model_made() -> None:
    """Compute and communication are slower by different factors. The corrected cluster predicts the
    measured step, compute and communication, where it leads to the same plan.
    """
    options: dict[str, Any] = dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")), zero=0)
    plan = planned(Cluster.load("cpu"), **options)
    times = as_measured(plan)[0]
    ((i, took),) = times.stages.items()
    took = {
        "forward": 1.9 * took["forward"],
        "backward": 1.1 * took["backward"] + 0.01,
        "forward conversions": 0.004,
        "backward conversions": 0.006,
    }
    measured = replace(
        times,
        stages={i: took},
        seconds={"step": 0.2, "schedule": 0.0, "optimizer": 0.02, "gradient synchronisation": 0.03},
    )
    found = compare(plan, [measured] * 4)
    after = planned(Cluster.load("cpu").calibrated(found), **options)
    assert (after.nodes, after.parameters) == (plan.nodes, plan.parameters)
    assert after.step_time == pytest.approx(0.2, rel=0.02)
    communication = after.seconds["conversions"] + after.seconds["gradient synchronisation"]
    assert communication == pytest.approx(0.04, rel=0.02)
