"""A run corrects the cluster of its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comparisons import as_measured, planned
from equivalence import traced_once

from autopar import Cluster, Plan, cli
from autopar.cost_model import CollectiveFigures
from autopar.cost_model.device import MAX_EFFICIENCY
from autopar.errors import PlanError
from autopar.runtime.measure.compare import compare


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield


MESH: dict[str, Any] = dict(
    parallel=dict(data=2, tensor=dict(size=2, mode="1d")), zero=0, micro_batch_size=8
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Cluster.load("cpu"), **MESH)


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


@pytest.mark.sampled(fast=1, slow=1)
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
    # The run is of the same plan: with zero=0, faster links change it. Of a compiled program no run
    # says what its conversions take.
    options: dict[str, Any] = dict(parallel=parallel, zero=1, micro_batch_size=4, backend="eager")
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
        hidden=(),
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
    slow = planned(changed(Cluster.load("cpu"), 1.5, 1.5, 0.001), **MESH)
    compare(plan, as_measured(slow)).save(comparison)
    assert cli.main(["profile", "--calibrate", str(comparison), "-o", str(out)]) == 0
    written = Cluster.load(out)
    assert written.name == "mine"
    again = planned(written, **MESH)
    assert again.step_time == pytest.approx(slow.step_time, rel=1e-3)
    compare(again, as_measured(again)).save(comparison)
    capsys.readouterr()
    calibrate = ["profile", "--calibrate", str(comparison), "-o", str(tmp_path / "new.json")]
    assert cli.main(calibrate) == 1
    assert (
        "cluster 'mine', which is no preset: give its file with --cluster"
        in capsys.readouterr().err
    )
    assert cli.main([*calibrate, "--cluster", "cpu"]) == 1
    assert "cluster 'mine', not for 'cpu'" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()
    assert cli.main([*calibrate, "--cluster", str(out)]) == 0
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
