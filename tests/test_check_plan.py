"""A plan that was edited or damaged is refused, or it computes the right numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import edited_plans
import edits
import pytest
import torch.distributed as dist
from pool import Pools

import autopar
from autopar import Plan, PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.layout import I, R, S
from autopar.ir.plan_data import NodePlan, ParameterPlan
from autopar.search.plan_check.check_plan import check_plan

EDITS = 12  # of each kind; benchmarks/plan_edits.py has thousands


@pytest.fixture(scope="module", params=["data", "tensor", "zero", "pipeline"])
def planned(request: pytest.FixtureRequest) -> tuple[str, Plan]:
    return request.param, edited_plans.plan(request.param)


def test_edited_files_are_refused_or_right(
    ranks: Pools, planned: tuple[str, Plan], tmp_path: Path
) -> None:
    """Local ranks run each plan that passes the checks."""
    kind, plan = planned
    plan.save(tmp_path / "plan.json")
    text, traced = (
        (tmp_path / "plan.json").read_text(),
        TracedModel(*edited_plans.make(edited_plans.KINDS[kind][0]), None),
    )
    assert edited_plans.refused(text, traced) == plan
    found = [
        edited_plans.refused(edits.edited(text, f"{kind} {seed}"), traced) for seed in range(EDITS)
    ]
    left = {edited_plans.program(f): f for f in found if isinstance(f, Plan)}
    assert len(found) - EDITS / 2 < sum(isinstance(f, PlanError) for f in found)
    for outcomes in ranks(2).run(edited_plans.run, kind, [plan, *left.values()]):
        assert set(outcomes) == {"right"}


def without(plan: Plan, name: str) -> dict[str, Any]:
    return dict(parameters={n: p for n, p in plan.parameters.items() if n != name})


def kept(plan: Plan, name: str, stored: Any, used: Any) -> dict[str, Any]:
    node = next(n for n in plan.nodes if n.endswith(name.replace(".", "_")))
    nodes = {**plan.nodes, node: dataclasses.replace(plan.nodes[node], out=(used,))}
    return dict(
        parameters={**plan.parameters, name: ParameterPlan((stored,), (used,))}, nodes=nodes
    )


def node(plan: Plan, like: str, **fields: Any) -> dict[str, Any]:
    name = next(n for n in plan.nodes if n.startswith(like))
    return dict(nodes={**plan.nodes, name: dataclasses.replace(plan.nodes[name], **fields)})


WRONG: list[tuple[Any, str]] = [
    (lambda p: without(p, "head.weight"), "says nothing of 1 parameters: head.weight"),
    (
        lambda p: kept(p, "head.weight", R, R),
        "parameter 'head.weight', stored as R and used as R, cannot lie so along axis 'data'",
    ),
    (lambda p: kept(p, "head.weight", S(1), S(0)), "stored as S1 and used as S0, cannot lie so"),
    (
        lambda p: kept(p, "norm.running_mean", S(0), S(0)),
        "buffer 'norm.running_mean', stored as S0 and used as S0, cannot lie so",
    ),
    (
        lambda p: kept(p, "norm.running_mean", I, S(0)),
        "batch_norm.* in module 'norm' at .*edited_plans.py:",
    ),
    (
        lambda p: dict(parameters={**p.parameters, "more": ParameterPlan((I,), (I,))}),
        "1 parameters that the graph has not: more",
    ),
    (
        lambda p: dict(nodes={**p.nodes, "more": NodePlan((), (I,), (None,), (None,))}),
        "1 nodes that the graph has not: more",
    ),
    (
        lambda p: node(p, "conv2d", factors=("nothing",)),
        r"conv2d.* in module 'first' at .*edited_plans.py:\d+ .*split along nothing",
    ),
    (lambda p: node(p, "conv2d", kernels=("summa",)), r"conv2d.* in module 'first' .*kernel summa"),
    (lambda p: node(p, "conv2d", out=(I,)), "conv2d.* cannot run as .* -> I"),
    (lambda p: node(p, "x", out=(S(0),)), "x, an input, is given whole"),
    (lambda p: dict(recomputed=("more",)), "recomputes 'more', which the graph has not"),
    (
        lambda p: dict(recomputed=("relu -> S7",)),
        "recomputes the conversion 'relu -> S7', which it does not make",
    ),
    (lambda p: dict(conversions={}), "and the plan has no conversion"),
    (
        lambda p: dict(
            conversions={**p.conversions, "x": {"S0": ((0, "I", "S0"), (0, "S0", "S1"))}}
        ),
        "'S0' ends as S1",
    ),
    (
        lambda p: dict(conversions={**p.conversions, "x": {"S0": ((0, "R", "S0"),)}}),
        "step R to S0 along axis 0 of I",
    ),
    (lambda p: dict(data_degree=1), "has data_degree 1, its layouts split the batch in 2"),
]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[message[:50] for _, message in WRONG])
def test_what_a_plan_may_not_say(number: int, data_parallel: tuple[Plan, TracedModel]) -> None:
    (plan, traced), (change, message) = data_parallel, WRONG[number]
    with pytest.raises(PlanError, match=message):
        check_plan(dataclasses.replace(plan, **change(plan)), traced.analyse(1)[0])


@pytest.fixture(scope="module")
def data_parallel() -> tuple[Plan, TracedModel]:
    return edited_plans.plan("data"), TracedModel(*edited_plans.make("convolutions"), None)


MISFITS: list[tuple[dict[str, Any], str]] = [
    (dict(mesh_sizes=(3,)), r"a mesh of sizes \(3,\) .* is none of 2 ranks"),
    (dict(mesh_sizes="ab"), "a part of the plan is not what a plan has there"),
    (dict(nodes=3), "a part of the plan is not what a plan has there"),
    (dict(microbatches=0), "a size below 1"),
    (dict(mesh_names=("",)), "each axis needs a name of its own"),
    (dict(stages=()), "0 stages are no multiple"),
    (dict(schedule="fast"), "schedule 'fast' is none of"),
    (
        dict(precision=["bf16"]),
        "a part of the plan is not what a plan has there|precision .* is none of",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), MISFITS, ids=[message[:40] for _, message in MISFITS]
)
def test_parts_that_do_not_fit(
    change: dict[str, Any], message: str, data_parallel: tuple[Plan, TracedModel]
) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(data_parallel[0], **change)


def _objects() -> None:
    made, (model, sample) = edited_plans.plan("data"), edited_plans.make("convolutions")
    for plan, message in [
        ("plan.json", "plan='plan.json': give an autopar.Plan; Plan.load reads one from a file"),
        ({"nodes": {}}, "give an autopar.Plan"),
        (dataclasses.replace(made, gap=float("nan")), "gap is nan: give a number, not negative"),
        (dataclasses.replace(made, microbatches=True), "microbatches is True: give a whole number"),
        (
            dataclasses.replace(made, modes={"2d": ("row",)}),
            "modes name the axes row, the mesh has data",
        ),
        (
            dataclasses.replace(made, microbatches=3),
            "3 microbatches on 2 replicas, 8 samples do not divide by 6",
        ),
        (dataclasses.replace(made, microbatches=2**40), "8 samples do not divide"),
        (
            dataclasses.replace(made, seconds={"compute": "long"}),
            r"seconds\['compute'\] is 'long': give a number",
        ),
        (
            dataclasses.replace(
                made, nodes={**made.nodes, "x": dataclasses.replace(made.nodes["x"], out=("I",))}
            ),
            r"nodes\['x'\].out is .* no layout",
        ),
        (
            dataclasses.replace(made, **kept(made, "head.weight", R, R)),
            "'head.weight', stored as R and used as R",
        ),
    ]:
        with pytest.raises(PlanError, match=message):
            autopar.compile(model, sample, dist.get_world_size(), plan=plan, progress=False)  # type: ignore[arg-type]


def test_plans_that_a_program_changed(ranks: Pools) -> None:
    """Every rank raises an error, and the next call works."""
    ranks(2).run(_objects)
