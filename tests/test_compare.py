"""Predicted beside measured, as a table and as a file. A run corrects the cluster of its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from equivalence import traced_once

import autopar
from autopar import Cluster, Comparison, Plan, cli
from autopar.cost_model import CollectiveFigures, simulate_schedule
from autopar.cost_model.device import MAX_EFFICIENCY
from autopar.errors import PlanError
from autopar.runtime.measure.compare import compare
from autopar.runtime.measure.step_recorder import RankTimes

# -- files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield


def planned(cluster: Cluster, **options: Any) -> Plan:
    model, sample = zoo.gpt2(batch=16)
    return autopar.plan(
        model, sample, 4, cluster=cluster, recompute="none", progress=False, **options
    )


def as_measured(plan: Plan, steps: int = 10) -> list[RankTimes]:
    """The measurements of ranks on which the predictions of ``plan`` come true."""
    found = []
    line = simulate_schedule(
        plan.schedule, plan.pipeline, plan.chunks, plan.microbatches,
        *([stage.seconds[kind] for stage in plan.stages] for kind in ("forward", "backward")),
        send=[stage.seconds["send"] for stage in plan.stages],
    )  # fmt: skip
    for rank in range(plan.pipeline):
        own = {i: stage.seconds for i, stage in enumerate(plan.stages) if i % plan.pipeline == rank}
        stages = {
            i: {
                "forward": plan.microbatches * took["forward"],
                "backward": plan.microbatches * took["backward"],
                "forward conversions": 0.0,
                "backward conversions": plan.microbatches * took.get("conversions", 0.0),
            }
            for i, took in own.items()
        }
        once = {
            kind: sum(took[kind] for took in own.values())
            for kind in ("gradient synchronisation", "optimizer")
        }
        seconds = {"step": plan.step_time, "schedule": line.ends[rank][-1], **once}
        found += [RankTimes(steps, rank, seconds, stages, None)] * (
            plan.world_size // plan.pipeline
        )
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Cluster.load("cpu"), parallel=dict(data=2, tensor=dict(size=2, mode="1d")))


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


# -- calibration -----------------------------------------------------------------------------------


def changed(cluster: Cluster, kernels: float, links: float, overhead: float) -> Cluster:
    """A machine whose kernels and links take ``compute`` and ``links`` times as long."""
    device = replace(
        cluster.device,
        peak={dtype: rate / kernels for dtype, rate in cluster.device.peak.items()},
        memory_bandwidth=cluster.device.memory_bandwidth / kernels,
    )
    software = replace(
        cluster.software, launch=cluster.software.launch * kernels, overhead=overhead
    )
    slower = [
        replace(level, latency=level.latency * links, bandwidth=level.bandwidth / links)
        for level in cluster.links
    ]
    levels = [replace(level, startup=level.startup * links) for level in slower]
    return replace(cluster, device=device, software=software, links=tuple(levels))


@pytest.mark.parametrize("name", ["cpu", pytest.param("a100-sxm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("factors", [(0.8, 0.6, 0.0), (2.5, 2.8, 0.01)])
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=2, tensor=dict(size=2, mode="1d")),
        dict(data=2, pipeline=dict(size=2, split_before=["transformer.ln_f"])),
    ],
    ids=["mesh", "pipeline"],  # cut by hand, because the best cut depends on the speed of links
)
def test_a_calibrated_cluster_predicts_what_was_measured(
    name: str, factors: tuple[float, float, float], parallel: dict[str, Any]
) -> None:
    assumed = Cluster.load(name)
    # The run is of the same plan: with zero=0, faster links change it.
    options: dict[str, Any] = dict(parallel=parallel, zero=1, micro_batch_size=4)
    before, truth = planned(assumed, **options), planned(changed(assumed, *factors), **options)
    found = compare(before, as_measured(truth))
    assert found.measured["total"] == pytest.approx(truth.step_time)
    assert found.predicted["total"] != pytest.approx(truth.step_time, rel=0.05)
    calibrated = assumed.calibrated(found)
    after = planned(calibrated, **options)
    assert after.step_time == pytest.approx(truth.step_time, rel=1e-3)
    for kind, seconds in truth.seconds.items():
        assert after.seconds[kind] == pytest.approx(
            seconds, rel=1e-3, abs=1e-3 * truth.step_time
        ), kind
    assert calibrated.name == f"{name}-calibrated"
    assert f"{name} calibrated by a run of 10 steps on 4 devices" in calibrated.sources[""]


def test_numbers_that_no_model_made(plan: Plan) -> None:
    """Compute and communication are slower by different factors. The corrected cluster predicts the
    measured step, compute and communication.
    """
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
    after = planned(
        Cluster.load("cpu").calibrated(found), parallel=dict(data=2, tensor=dict(size=2, mode="1d"))
    )
    assert after.step_time == pytest.approx(0.2, rel=0.02)
    communication = after.seconds["conversions"] + after.seconds["gradient synchronisation"]
    assert communication == pytest.approx(0.04, rel=0.02)


def test_links_that_turn_out_faster_than_assumed() -> None:
    cluster = Cluster.load("cpu")
    (level,) = cluster.links
    measured = {"all_reduce": {"2": ((10.0, 1e-4), (1e6, 1e-2))}}
    own = {"all_gather": CollectiveFigures(startup=1e-5, latency=4e-6, efficiency=0.4)}
    cluster = replace(
        cluster,
        links=(
            replace(level, efficiency=0.8, by_ranks={"2": 2e9}, collectives=own, measured=measured),
        ),
    )
    seen = SimpleNamespace(
        cluster="cpu",
        steps=9,
        world_size=2,
        links={"compute": 0.0, "conversions": 1.0},
        predicted={"compute": 1.0, "conversions": 1.0, "optimizer": 0.1, "total": 2.1},
        measured={
            "compute": 1.0,
            "conversions": 0.25,
            "optimizer": 0.1,
            "other": 0.0,
            "total": 1.35,
        },
    )
    (found,) = cluster.calibrated(seen).links
    factor = 4.0
    assert found.latency == pytest.approx(level.latency / factor)
    assert found.efficiency == 1.0
    assert found.efficiency * found.bandwidth == pytest.approx(0.8 * level.bandwidth * factor)
    gather = found.collectives["all_gather"]
    assert [gather.startup, gather.latency, gather.efficiency] == pytest.approx(
        [1e-5 / factor, 4e-6 / factor, 0.5]
    )
    assert found.by_ranks["2"] == pytest.approx(0.8 * 2e9 * factor)
    assert found.measured["all_reduce"]["2"][1] == (1e6, pytest.approx(1e-2 / factor))


def test_the_command_writes_a_cluster_file(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, out = tmp_path / "comparison.json", tmp_path / "mine.json"
    slow = planned(
        changed(Cluster.load("cpu"), 1.5, 1.5, 0.001),
        parallel=dict(data=2, tensor=dict(size=2, mode="1d")),
    )
    compare(plan, as_measured(slow)).save(comparison)
    assert cli.main(["profile", "--calibrate", str(comparison), "-o", str(out)]) == 0
    written = Cluster.load(out)
    assert written.name == "mine"
    assert planned(
        written, parallel=dict(data=2, tensor=dict(size=2, mode="1d"))
    ).step_time == pytest.approx(slow.step_time, rel=1e-3)
    again = planned(written, parallel=dict(data=2, tensor=dict(size=2, mode="1d")))
    compare(again, as_measured(again)).save(comparison)
    capsys.readouterr()
    assert (
        cli.main(["profile", "--calibrate", str(comparison), "-o", str(tmp_path / "new.json")]) == 1
    )
    assert (
        "cluster 'mine', which is no preset: give its file with --cluster"
        in capsys.readouterr().err
    )
    assert (
        cli.main(
            [
                "profile",
                "--calibrate",
                str(comparison),
                "--cluster",
                "cpu",
                "-o",
                str(tmp_path / "new.json"),
            ]
        )
        == 1
    )
    assert "cluster 'mine', not for 'cpu'" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()
    assert (
        cli.main(
            [
                "profile",
                "--calibrate",
                str(comparison),
                "--cluster",
                str(out),
                "-o",
                str(tmp_path / "new.json"),
            ]
        )
        == 0
    )
    again = Cluster.load(tmp_path / "new.json")
    assert again.software.launch == pytest.approx(written.software.launch)
    assert "before: cpu calibrated by a run" in Cluster.load(tmp_path / "new.json").sources[""]
    with pytest.raises(SystemExit):
        cli.main(["profile", "--cluster", "cpu"])


def test_what_a_cache_makes_fast_stays_within_what_a_file_may_say(
    plan: Plan, tmp_path: Path
) -> None:
    cpu = Cluster.load("cpu")
    small = cpu.device.efficiency | {"relu.float32": ((1e4, MAX_EFFICIENCY), (1e6, 0.5))}
    quick = [
        replace(t, stages={0: {k: v / 2 for k, v in t.stages[0].items()}})
        for t in as_measured(plan)
    ]
    replace(cpu, device=replace(cpu.device, efficiency=small)).calibrated(
        compare(plan, quick)
    ).save(tmp_path / "new.json")
    found = Cluster.load(tmp_path / "new.json").device.efficiency["relu.float32"]
    assert found == ((1e4, MAX_EFFICIENCY), (1e6, pytest.approx(1.0, rel=0.01)))


def test_what_cannot_be_calibrated(plan: Plan) -> None:
    times = as_measured(plan)
    nothing = [replace(t, stages={0: dict.fromkeys(t.stages[0], 0.0)}) for t in times]
    with pytest.raises(PlanError, match=r"was measured to for 0 s: neither may be 0"):
        Cluster.load("cpu").calibrated(compare(plan, nothing))
    instant = [replace(t, stages={0: {k: v / 1e3 for k, v in t.stages[0].items()}}) for t in times]
    with pytest.raises(
        PlanError,
        match=r"kernels took 0.001 of the time that was predicted for .*1/20.*measure this one "
        r"with autopar profile",
    ):
        Cluster.load("cpu").calibrated(compare(plan, instant))
