"""Whatever an option or a public function gets, the outcome is a plan or an error of autopar."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import AutoparError, Plan, PlanError
from autopar.search.space.options import Options


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Odd:
    """An object of no type that an option takes."""


JUNK: list[Any] = [
    None, [], {}, (), "", "x", "S0", "\0", b"ab", -1, 0, 1, 1.5, True, False,
    math.nan, math.inf, -math.inf, 10**400, 2**70, Odd(), Odd, len,
    [None], [[]], [1, "x"], {3: 4}, {"a": ["I"]}, {"body": None}, {"data": None},
    {"tensor": 10**30}, {"x": 1, 3: 4},
    {"pipeline": {"size": 1, "chunks": "x"}}, {"pipeline": {3: 4, "x": 1}},
    {"tensor": {"size": 2}}, {"tensor": {"size": 2, "mode": []}},
    {"tensor": {"size": 2, "mode": "1d", 3: 4}}, {"tensor": {"size": True, "mode": "2.5d"}},
    {"tensor": {"size": 10**30, "mode": "2.5d"}}, {"body.weight": "S0 " * 10**4},
    torch.float32, torch.zeros(2), torch.optim.AdamW, torch.optim.LBFGS, torch.device("cpu"),
    range(3), {1, 2}, Path("x"), iter([]),
]  # fmt: skip
PLAIN = torch.zeros(4, 4)


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or its error if that is an error of autopar."""
    try:
        return call()
    except AutoparError as e:
        return e


@pytest.mark.parametrize("name", list(Options.__dataclass_fields__))
def test_wrong_kinds_of_options(name: str) -> None:
    """Options that are accepted can be read, too."""
    for value in JUNK:
        found = outcome(lambda value=value: Options(**{"world_size": 2, name: value}))
        if isinstance(found, Options):
            outcome(
                lambda found=found: (
                    found.pipeline,
                    found.meshes(1),
                    found.data_parallel_sizes(1),
                    hash(found.optimizer),
                )
            )
        assert isinstance(found, (Options, PlanError))


def planned(**options: Any) -> Any:
    given: dict[str, Any] = {
        "model": Tiny(),
        "sample_input": PLAIN,
        "world_size": 2,
        "parallel": dict(data=2),
        **options,
    }
    return outcome(
        lambda: autopar.plan(
            given.pop("model"),
            given.pop("sample_input"),
            given.pop("world_size"),
            progress=False,
            **given,
        )
    )


@pytest.mark.parametrize(
    "name", ["model", "sample_input", "world_size", "cluster", "loss_fn", "constraints"]
)
def test_wrong_kinds_in_a_plan(name: str) -> None:
    for value in (3, "x", Odd(), len) if name == "loss_fn" else JUNK:
        assert isinstance(planned(**{name: value}), (Plan, AutoparError))


SAID: list[tuple[dict[str, Any], str]] = [
    (
        dict(constraints={3: "I"}),
        r"constraints=\{3: 'I'\}: a pattern of names and a layout, both as text",
    ),
    (dict(constraints={"a": ["I"]}), r"constraints=\{'a': \['I'\]\}: a pattern"),
    (dict(optimizer=[]), r"optimizer=\[\] is unknown: give one of sgd"),
    (dict(optimizer=torch.optim.LBFGS), r"optimizer=<class 'torch.optim.lbfgs.LBFGS'> is unknown"),
    (dict(sample_input=torch.zeros(0, 4)), "a batch of no samples"),
    (dict(world_size=2**30), "plans are made for up to 1,048,576 ranks"),
    (dict(model=3), "model=3: give an nn.Module"),
    (dict(zero=True), "zero=True: give 0, 1, 2 or 3"),
    (dict(memory_budget=10**400), "memory_budget=.*: bytes per device"),
    (
        dict(parallel=dict(tensor=dict(size=10**30, mode="sequence"))),
        "1e[+]30 ranks are more than the world_size of 2",
    ),
    (dict(cluster="a\0b"), "no cluster 'a.*b': the presets are a100-sxm"),
]


@pytest.mark.parametrize(("options", "message"), SAID, ids=[message[:40] for _, message in SAID])
def test_what_errors_say(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        raise planned(**options)


def test_an_optimizers_class_means_its_name() -> None:
    for name, optimizer in (
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", torch.optim.SGD),
    ):
        assert Options(2, optimizer=optimizer).optimizer == name  # type: ignore[arg-type]
    assert planned(optimizer=torch.optim.SGD) == planned(optimizer="sgd")


@pytest.mark.parametrize("limit", [7, 1e-9])
def test_a_time_limit_on_one_rank(limit: float) -> None:
    assert isinstance(planned(world_size=1, parallel=None, time_limit=limit), (Plan, PlanError))


def test_other_public_functions(tmp_path: Path) -> None:
    plan, model = planned(), Tiny()
    assert isinstance(plan, Plan)
    for value in JUNK:
        if isinstance(value, (str, bytes, Path)) and value not in ("", "\0"):
            continue
        with pytest.raises(PlanError):
            Plan.load(value)
        with pytest.raises(PlanError):
            plan.save(value)
        with pytest.raises(PlanError):
            plan.trace(value)
        if value != "":
            with pytest.raises(PlanError):
                autopar.Cluster.load(value)
        for register in (autopar.register_rule, autopar.register_mode):
            with pytest.raises(PlanError):
                register(None if value == "\0" else value)(Tiny)
        outcome(
            lambda value=value: autopar.sweep(model, PLAIN, value, world_size=2, progress=False)
        )
        outcome(
            lambda value=value: autopar.sweep(
                model,
                PLAIN,
                [dict(world_size=2, precision=value)],
                parallel=dict(data=2),
                progress=False,
            )
        )
        if value is not None:
            for name in ("world_size", "data", "pipeline", "precision", "recompute"):
                given = {"world_size": 2, "data": 3, name: value}
                outcome(
                    lambda given=given: autopar.compare_modes(model, PLAIN, progress=False, **given)
                )
    with pytest.raises(OSError, match="No such file"):  # errors of the system stay as they are
        plan.save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match="decorates 3: write a function"):
        autopar.register_rule("mine.op")(3)  # type: ignore[arg-type]


def test_a_plan_says_how_it_was_asked_for(tmp_path: Path) -> None:
    cluster = autopar.Cluster.load("cpu")
    plan = planned(
        cluster=cluster,
        mesh=(2,),
        parallel=None,
        constraints={"body.weight": "I"},
        optimizer=torch.optim.SGD,
        memory_budget=math.inf,
    )
    assert isinstance(plan, Plan)
    assert plan.options == {
        "world_size": 2,
        "cluster": "cpu",
        "mesh": [2],
        "parallel": None,
        "constraints": {"body.weight": "I"},
        "optimizer": "SGD",
        "memory_budget": "inf",
    }
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.options == plan.options
    assert loaded.report() == plan.report()
    assert "asked for: world_size=2, cluster='cpu', " in plan.report()
    other = planned(
        cluster="cpu",
        mesh=[2],
        parallel=None,
        constraints={"body.weight": "I"},
        optimizer="sgd",
        memory_budget=math.inf,
    )
    assert other == plan  # the decisions are the same
    assert other.options != plan.options
    (swept,) = autopar.sweep(Tiny(), PLAIN, [dict(world_size=2)], mesh=(2,), progress=False)
    assert isinstance(swept, Plan)
    assert swept.options == {"world_size": 2, "cluster": "cpu", "mesh": [2]}
