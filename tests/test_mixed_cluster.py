"""Clusters of two and three kinds of devices: their files, and the stages that the kinds get."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import Cluster, ComputeCosts, Level, compute_costs, simulate_schedule
from autopar.errors import BudgetError, PlanError
from autopar.ir.plan_data import StagePlan

A100 = replace(
    Cluster.load("a100-sxm"),
    # so that messages take no time
    links=(Level("free", None, 0.0, 1e18),),
)
FREE = Level("between", None, 0.0, 1e18)
LINK = Level("between", None, 1e-5, 25e9, shared=True)
WIDTH, SAMPLES, MICROBATCH = 4096, 2048 * 16, 2048


def sped_up(factor: float, memory: int | None = None) -> Cluster:
    """The A100 with every figure of its speed multiplied."""
    device, software = A100.device, A100.software
    return replace(
        A100,
        name=f"{factor:g}x",
        device=replace(
            device,
            peak={dtype: factor * rate for dtype, rate in device.peak.items()},
            memory_bandwidth=factor * device.memory_bandwidth,
            memory=memory or device.memory,
        ),
        software=replace(
            software, launch=software.launch / factor, overhead=software.overhead / factor
        ),
    )


class Layers(nn.Module):
    """Linear layers in a row, the modules with even numbers, and an activation after each: a stage
    may begin with any module.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            layer
            for a, b in itertools.pairwise(widths)
            for layer in (
                nn.Linear(a, b, bias=False, dtype=torch.bfloat16, device="meta"),
                nn.ReLU(),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def plan(widths: Sequence[int], cluster: Cluster, world: int, **options: Any) -> autopar.Plan:
    x = torch.empty(SAMPLES, widths[0], dtype=torch.bfloat16, device="meta")
    common = dict(micro_batch_size=MICROBATCH, recompute="none", progress=False)
    return autopar.plan(Layers(widths), {"x": x}, world, cluster=cluster, **common | options)


def pipeline(schedule: str = "1f1b", cuts: Sequence[int] = (), size: int = 2) -> dict[str, Any]:
    names = [f"layers.{cut}" for cut in cuts]
    of_pipeline = dict(size=size, chunks=1, **(dict(split_before=names) if cuts else {}))
    return dict(parallel=dict(pipeline=of_pipeline), schedule=schedule)


def layer_counts(found: autopar.Plan) -> list[int]:
    """The number of linear layers of each stage."""
    firsts = [first_module(stage) for stage in found.stages]
    ends = [*firsts[1:], 2 * len(found.parameters)]
    return [len(range(a + a % 2, b, 2)) for a, b in zip(firsts, ends, strict=True)]


def first_module(stage: StagePlan) -> int:
    """The number of the module that a stage begins with."""
    return int(stage.name.split(" to ")[0].rpartition(".")[2])


# Files and errors


def test_a_file_holds_every_kind(tmp_path: Path) -> None:
    joined = Cluster.join({"h100-sxm": 8, "a100-sxm": 16}, link=LINK)
    assert (joined.name, joined.capacity) == ("8 h100-sxm + 16 a100-sxm", 24)
    joined.save(tmp_path / "joined.json")
    assert Cluster.load(tmp_path / "joined.json") == joined
    short = {
        "schema": 3,
        "name": "two kinds",
        "parts": [
            {"cluster": "h100-sxm", "devices": 8},
            {"cluster": "a100-sxm:megatron", "devices": 16},
        ],
        "link": {"name": "between", "latency": 1e-5, "bandwidth": 25e9, "shared": True},
    }
    short["parts"][1]["cluster"] = "a100-sxm"  # type: ignore[index]
    (tmp_path / "short.json").write_text(json.dumps(short))
    assert Cluster.load(tmp_path / "short.json") == replace(joined, name="two kinds")


A, H = Cluster.load("a100-sxm"), Cluster.load("h100-sxm")
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Cluster.join({"a100-sxm": 8}, LINK), "join two or three groups"),
    (lambda: Cluster.join({A: 8, H: 8, "v100-sxm2": 8, "p100": 8}, LINK), "two or three groups"),
    (lambda: Cluster.join({A: 8, "cpu": 8}, LINK), "must be of one type, but a100-sxm has cuda"),
    (lambda: Cluster.join({A: 12, H: 8}, LINK), "12 devices of 'a100-sxm' do not fill its level"),
    (lambda: Cluster.join({A: 0, H: 8}, LINK), "0 devices of 'a100-sxm': give how many"),
    (lambda: Cluster.join([A, H], LINK), "give the number of devices of each"),  # type: ignore[arg-type]
    (lambda: Cluster.join({A: 8, H: 8}, "nvlink"), "give an autopar.cost_model.Level"),  # type: ignore[arg-type]
    (lambda: Cluster.join({A: 8, H: 8}, replace(LINK, size=8)), "it joins all groups, give None"),
    (
        lambda: Cluster.join({Cluster.join({A: 8, H: 8}, LINK): 16, "p100": 8}, LINK),
        "is joined already",
    ),
    (lambda: Cluster.join({A: 8, H: 8}, LINK).check(12), "has 16 devices, and a plan for a joined"),
    (
        lambda: Cluster.join({A: 8, H: 8}, LINK).from_measurements("table.csv", "new"),
        "has several kinds of devices: give the measurements",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_group_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


FILES: list[tuple[dict[str, Any], str]] = [
    ({"parts": []}, "missing link"),
    ({"parts": {}, "link": {}}, "parts is dict: give a list"),
    ({"parts": [{"cluster": "a100-sxm"}], "link": {}}, r"missing parts\[0\].devices"),
    ({"parts": [], "link": {"name": "x"}}, "missing link.latency, link.bandwidth"),
    ({"parts": [], "link": {}, "device": {}}, "unknown device"),
    (
        {
            "parts": [{"cluster": "nothing", "devices": 8}],
            "link": {"name": "x", "latency": 0, "bandwidth": 1},
        },
        "no cluster 'nothing'",
    ),
]


@pytest.mark.parametrize(("data", "message"), FILES, ids=[message for _, message in FILES])
def test_a_wrong_file_is_named(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps({"schema": 3, **data}))
    with pytest.raises(PlanError, match=message):
        Cluster.load(tmp_path / "wrong.json")


# What plans get


def test_the_slowest_and_the_fastest_kind_of_each_kernel() -> None:
    joined = Cluster.join({A: 8, H: 8, "v100-sxm2": 8}, LINK)
    each = [ComputeCosts(kind) for kind in joined.kinds]
    for flops, nbytes in itertools.product((1e6, 1e12), (1e3, 1e9)):
        work = ("matmul", "torch.bfloat16", flops, nbytes)
        seconds = [float(kind.seconds(*work)) for kind in each]
        assert float(compute_costs(joined, "slowest").seconds(*work)) == max(seconds)
        assert float(compute_costs(joined, "fastest").seconds(*work)) == min(seconds)
        assert float(compute_costs(joined, 1).seconds(*work)) == seconds[1]


@pytest.mark.parametrize("fast_first", [False, True])
def test_layers_follow_the_speed_of_the_devices(fast_first: bool) -> None:
    kinds = {A100: 1, sped_up(2): 1}
    if fast_first:
        kinds = dict(reversed(kinds.items()))
    found = plan([WIDTH] * 13, Cluster.join(kinds, FREE), 2, **pipeline())
    of_kind = dict(zip(found.device_kinds, layer_counts(found), strict=True))
    assert of_kind == {"a100-sxm": 4, "2x": 8}  # a third and two thirds of 12
    # The rank numbering follows the groups, the pipeline the search.
    ranks = {"a100-sxm": int(fast_first), "2x": 1 - int(fast_first)}
    order = found.pipeline_order or (0, 1)
    assert [ranks[kind] for kind in found.device_kinds] == list(order)
    assert found.report().splitlines()[2].startswith("devices of pipeline rank 0: ")


def test_three_kinds_get_layers_by_their_speed() -> None:
    joined = Cluster.join({A100: 1, sped_up(2): 1, sped_up(3): 1}, FREE)
    found = plan([WIDTH] * 25, joined, 3, **pipeline(size=3))
    of_kind = dict(zip(found.device_kinds, layer_counts(found), strict=True))
    assert of_kind == {"a100-sxm": 4, "2x": 8, "3x": 12}


WIDTHS = [4096, 4096, 8192, 2048, 6144, 4096, 1024]  # six different layers


def test_no_cut_and_no_order_of_kinds_is_faster_than_the_plan() -> None:
    """Each stage of every cut is priced on a cluster of one kind, and the schedule simulated."""
    kinds = [A100, sped_up(1.7)]
    found = plan(WIDTHS, Cluster.join(dict.fromkeys(kinds, 1), FREE), 2, **pipeline())
    seconds = {}
    for cut in range(1, 2 * len(WIDTHS) - 3):  # the last stage has a parameter
        alone = [plan(WIDTHS, kind, 2, **pipeline(cuts=[cut])) for kind in kinds]
        for order in itertools.permutations(range(2)):
            stages = [alone[kind].stages[stage] for stage, kind in enumerate(order)]
            forward, backward = (
                [stage.seconds[name] for stage in stages] for name in ("forward", "backward")
            )
            line = simulate_schedule("1f1b", 2, 1, found.microbatches, forward, backward,
                                     send=[0.0, 0.0])  # fmt: skip
            end = [s.seconds["gradient synchronisation"] + s.seconds["optimizer"] for s in stages]
            ends = [finish[-1] + e for finish, e in zip(line.ends, end, strict=True)]
            seconds[cut, order] = max(ends)
    best = min(seconds.values())
    assert max(seconds.values()) > 1.2 * best
    assert found.step_time == pytest.approx(best, rel=1e-3)
    cut = first_module(found.stages[1])
    order = tuple([kind.name for kind in kinds].index(name) for name in found.device_kinds)
    assert seconds[cut, order] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("large_is_first", [False, True])
def test_the_large_stage_goes_where_the_memory_is(large_is_first: bool) -> None:
    """One layer has most parameters: 2 GiB with gradients and optimizer state, of 8192 x 32768."""
    widths = [2048, 2048, 8192, 32768, 2048] if not large_is_first else [8192, 32768, 1024, 1024]
    small = sped_up(3, memory=A100.software.reserve + 3 * 2**30)
    joined = Cluster.join({small: 1, A100: 1}, FREE)
    found = plan(widths, joined, 2, **pipeline() | dict(recompute="auto"))
    limits = {small.name: small.usable_memory, A100.name: A100.usable_memory}
    for kind, nbytes in zip(found.device_kinds, found.peak_memory, strict=True):
        assert nbytes <= limits[kind]
    holding = max(range(2), key=lambda rank: found.memory[rank]["parameters"])
    assert found.device_kinds[holding] == A100.name
    assert found.peak_memory[holding] > small.usable_memory  # the other kind could not hold it
    tiny = sped_up(3, memory=A100.software.reserve + 2**28)
    with pytest.raises(BudgetError):
        plan(widths, Cluster.join({tiny: 1, sped_up(2, memory=tiny.device.memory): 1}, FREE), 2,
             **pipeline())  # fmt: skip


def test_without_a_pipeline_the_slowest_kind_and_the_smallest_memory_count() -> None:
    fast = sped_up(2, memory=A100.device.memory // 2)
    joined = Cluster.join({A100: 1, fast: 1}, LINK)
    alone = Cluster.load("a100-sxm")
    found = plan([WIDTH] * 5, joined, 2, parallel=dict(data=2))
    slow = plan([WIDTH] * 5, replace(alone, links=(replace(alone.links[0], size=1), LINK)), 2,
                parallel=dict(data=2))  # fmt: skip
    assert found.seconds["compute"] == pytest.approx(slow.seconds["compute"])
    assert joined.usable_memory == fast.usable_memory
    assert any("at the pace of the slowest kind" in note for note in found.notes)


def test_a_stage_of_several_kinds_is_refused() -> None:
    joined = Cluster.join({A100: 2, sped_up(2): 6}, FREE)
    with pytest.raises(PlanError, match="stages of 4 devices, which do not divide the 2 of"):
        plan([WIDTH] * 5, joined, 8, parallel=dict(data=4, pipeline=2))
    inside = dict(parallel=dict(data=2, pipeline=4), placement=("data", "pipeline"))
    with pytest.raises(PlanError, match="the pipeline crosses the slowest links"):
        plan([WIDTH] * 5, joined, 8, **inside)
