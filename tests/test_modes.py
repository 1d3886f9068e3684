"""The built-in modes of tensor and sequence parallelism: each computes what one device computes,
and lays tensors out as the mode says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
import zoo
from equivalence import TOLERANCE, Outcome, check
from pool import Pools

import autopar
from autopar.errors import PlanError
from autopar.ir.layout import parse_layout

FOUR = {
    "1d": dict(tensor=dict(size=4, mode="1d")),
    "2d": dict(tensor=dict(size=4, mode="2d")),
    "sequence, rings": dict(tensor=dict(size=4, mode="sequence", ring=4)),
    "sequence, heads": dict(tensor=dict(size=4, mode="sequence", ring=1)),
    "sequence, both": dict(tensor=dict(size=4, mode="sequence", ring=2)),
}
EIGHT = {
    "1d": dict(tensor=dict(size=8, mode="1d")),
    "2.5d": dict(tensor=dict(size=8, mode="2.5d", depth=2)),
    "3d": dict(tensor=dict(size=8, mode="3d")),
    "sequence, free": dict(tensor=dict(size=8, mode="sequence")),
    **{f"{name}, data": dict(data=2, **FOUR[name]) for name in ("1d", "2d", "sequence, both")},
    **{
        f"{name}, pipeline": dict(pipeline=2, **FOUR[name])
        for name in ("1d", "2d", "sequence, both")
    },
}
QUICK = ("2d", "sequence, both")  # the modes in which GPT-2 runs in tests that are not slow
MODELS = ("wide", "gpt2", "llama", "vit16", "bert")


def _marked(slow: Collection[str]) -> list[Any]:
    """Models as parameters of slow tests; those not in ``slow``, of exhaustive tests."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.exhaustive)
        for name in MODELS
    ]


def _possible(name: str, cases: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The labels of the cases in which a model can run."""
    for label, parallel in cases.items():
        tensor = parallel["tensor"]
        if name == "wide" and (
            tensor["mode"] == "sequence" and tensor.get("ring") != tensor["size"]
        ):
            continue  # the model has no attention
        yield label


def _run(
    ranks: Pools,
    world_size: int,
    name: str,
    cases: Mapping[str, dict[str, Any]],
    timeout: float = 400,
) -> dict[str, Outcome]:
    options = {
        label: dict(cluster="cpu", parallel=cases[label]) for label in _possible(name, cases)
    }
    everywhere: list[dict[str, Outcome]] = ranks(world_size).run(
        check, name, torch.float64, options, timeout=timeout
    )
    errors = {label: max(found[label].worst for found in everywhere) for label in options}
    assert all(e < TOLERANCE[torch.float64] for e, _ in errors.values()), errors
    for label in options:
        _check_plan(everywhere[0][label].plan, cases[label])
    return everywhere[0]


def _check_plan(plan: autopar.Plan, parallel: Mapping[str, Any]) -> None:
    """The plan has the layouts and kernels of its mode."""
    mode, kernels = (
        parallel["tensor"]["mode"],
        [set(filter(None, n.kernels)) for n in plan.nodes.values()],
    )
    assert list(plan.modes) == [mode]
    assert plan.pipeline == parallel.get("pipeline", 1)
    assert plan.mesh.get("data", 1) == parallel.get("data", 1)
    weights = [
        p
        for name, p in plan.parameters.items()
        if name.endswith("weight") and len(p.stored) == len(plan.mesh_sizes)
    ]
    cut = {
        tuple(t.is_shard for t in p.stored[len(plan.mesh_sizes) - len(plan.modes[mode]) :])
        for p in weights
    }
    if mode in ("2d", "3d"):
        assert cut == {(True,) * len(plan.modes[mode])}
    if mode == "2.5d":
        assert cut == {(False, True, True)}
    assert any({"summa"} <= k for k in kernels) == (mode in ("2d", "2.5d"))
    if parallel["tensor"].get("ring", 1) > 1 and any("attention" in name for name in plan.nodes):
        assert any("ring" in k for k in kernels)
    assert mode in {row[6] for row in plan.rows["blocks"]}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "label",
    [
        pytest.param("1d, pipeline", marks=pytest.mark.slow),
        "2d, pipeline",
        pytest.param("sequence, both, pipeline", marks=pytest.mark.slow),
    ],
)
def test_a_mode_holds_in_microbatches_of_one_sample(label: str) -> None:
    options: dict[str, Any] = dict(cluster="cpu", micro_batch_size=1, progress=False)
    plan = autopar.plan(*zoo.vit16(), 8, parallel=EIGHT[label], **options)
    assert plan.microbatches == 8
    _check_plan(plan, EIGHT[label])


@pytest.mark.parametrize("name", ["gpt2"])
def test_four_ranks_are_one_device(ranks: Pools, name: str) -> None:
    _run(ranks, 4, name, {label: FOUR[label] for label in QUICK})


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _marked(["gpt2", "vit16"]))
def test_all_modes_of_four_ranks_are_one_device(ranks: Pools, name: str) -> None:
    _run(
        ranks,
        4,
        name,
        {
            label: parallel
            for label, parallel in FOUR.items()
            if name != "gpt2" or label not in QUICK
        },
    )


@pytest.mark.timeout(1200)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _marked(["wide"]))
def test_all_modes_of_eight_ranks_are_one_device(ranks: Pools, name: str) -> None:
    _run(ranks, 8, name, EIGHT, timeout=900)


@pytest.mark.parametrize(
    ("world_size", "tensor", "share"),
    [
        (4, dict(size=4, mode="2d"), 4),
        (8, dict(size=8, mode="2.5d", depth=2), 4),
        (8, dict(size=8, mode="3d"), 8),
        (9, dict(size=9, mode="2d"), 9),
    ],
    ids=["2d", "2.5d", "3d", "nine"],
)
def test_parameters_and_activations_at_rest(
    world_size: int, tensor: dict[str, Any], share: int
) -> None:
    """Every parameter is cut into ``share`` parts, and every activation between layers over all
    ranks.
    """
    side = 36 if world_size == 9 else 32
    plan = autopar.plan(
        *zoo.wide(batch=36, width=side, hidden=2 * side),
        world_size,
        parallel=dict(tensor=tensor),
        progress=False,
    )
    sizes = plan.mesh_sizes
    for name, parameter in plan.parameters.items():
        assert _share(parameter.stored, sizes) == share, name
    for name in ("linear", "gelu", "layer_norm", "linear_1"):
        if tensor["mode"] != "3d":  # mode 3d gathers the operands of products
            assert _share(plan.nodes[name].ins[0], sizes) == world_size, name
        layout = plan.nodes[name].out
        if "P" in map(repr, layout):  # a reduce-scatter follows
            layout = next(parse_layout(text) for text in plan.conversions[name])
        assert _share(layout, sizes) == world_size, name


def _share(layout: Any, sizes: tuple[int, ...]) -> int:
    found = 1
    for t, n in zip(layout, sizes, strict=True):
        found *= n if t.is_shard else 1
    return found


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit16"])
def test_mode_2d_has_no_whole_activation(name: str) -> None:
    """From the embedding to the loss every tensor of samples and features is cut along both
    axes.
    """
    model, sample = getattr(zoo, name)()
    plan = autopar.plan(
        model, sample, 4, parallel=dict(tensor=dict(size=4, mode="2d")), progress=False
    )
    cut = {
        n: p.out
        for n, p in plan.nodes.items()
        if "summa" in p.kernels or n.startswith(("gelu", "layer_norm", "scaled_dot", "dropout"))
    }
    assert {n.split("_")[0] for n in cut} >= {"linear", "layer", "scaled"}
    for node, layout in cut.items():
        assert all(t.is_shard for t in layout), (node, layout)


def test_a_report_names_the_modes() -> None:
    model, sample = zoo.gpt2()
    fixed = dict(zero=0, recompute="none", micro_batch_size=8, progress=False)
    text = {
        m: autopar.plan(
            model, sample, 4, parallel=dict(tensor=dict(size=4, mode=m)), **fixed
        ).report()
        for m in ("2d", "sequence", "1d")
    }
    for mode, report in text.items():
        (line,) = (line for line in report.splitlines() if "mlp.c_fc" in line and "linear" in line)
        assert line.endswith(mode)
        assert max(map(len, report.splitlines())) <= 120
    assert any(
        line.endswith(("ring", "all-to-all"))
        for line in text["sequence"].splitlines()
        if " attention " in line
    )


@pytest.mark.exhaustive
def test_modes_side_by_side() -> None:
    model, sample = zoo.gpt2()
    found = autopar.compare_modes(model, sample, 4, cluster="cpu", progress=False)
    names = [str(e.parallel.get("tensor", {}).get("mode", "data")) for e in found.entries]
    assert sorted(names) == ["1d", "2d", "data", "sequence"]
    text = str(found)
    assert max(map(len, text.splitlines())) <= 120
    assert "fit in" in text
    assert "do not" not in text
    assert "2d(4): row 2 x column 2" in text
    for entry in found.entries:
        assert entry.plan is not None
        alone = autopar.plan(
            model, sample, 4, cluster="cpu", parallel=entry.parallel, progress=False
        )
        assert entry.plan.step_time == pytest.approx(alone.step_time)
    with pytest.raises(PlanError, match="compare_modes decides parallel itself"):
        autopar.compare_modes(model, sample, 4, cluster="cpu", parallel=dict(data=4))


@pytest.mark.slow
def test_modes_that_do_not_fit() -> None:
    found = autopar.compare_modes(
        *zoo.wide(width=32, hidden=64), 4, cluster="cpu", progress=False, memory_budget=1000
    )
    assert not any(e.fits for e in found.entries)
    assert all(e.plan is not None and max(e.plan.peak_memory) > 1000 for e in found.entries)
    assert str(found).count("data(4)") == 3  # in its row, in its mesh, and where it does not fit
    assert "fit in" not in str(found)
