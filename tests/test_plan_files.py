"""A second process with the same call has the plan of the first from a file. A file that is not the
plan of the call is refused with a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import changing_models
import pytest
import torch
import zoo
from changing_models import WIDTH, Changing
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.frontend import plan_files, planner
from autopar.rules import registry

OPTIONS: dict[str, Any] = dict(
    parallel=dict(tensor=dict(size=2, mode="1d")), zero=0, recompute="none", progress=False
)
COUNT = 3  # processes that plan at a time


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the plans, and no rules of other tests. No process keeps plans itself
    (tests/conftest.py).
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(plan_files.SWITCH, "1")
    own = {n: m for n, m in registry._MAKERS.items() if m.__module__.startswith("autopar.")}
    with mock.patch.dict(registry._MAKERS, own, clear=True):
        yield tmp_path / "autopar" / "plans"


def plan(**options: Any) -> autopar.Plan:
    model, sample = zoo.gpt2(layers=3)
    return autopar.plan(model, sample, 2, **{**OPTIONS, **options})


def plan_of(model: nn.Module, **options: Any) -> autopar.Plan:
    sample = torch.zeros(8, WIDTH)
    loss = changing_models.loss
    return autopar.plan(model, sample, 2, loss_fn=loss, **{**OPTIONS, **options})


def small_plan(**options: Any) -> autopar.Plan:
    return plan_of(Changing(), **options)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "best_plan", None)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_plan_is_read_from_its_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan()
    with monkeypatch.context() as patch:
        patch.setattr(planner, "best_plan", None)
        second = plan()
        with pytest.raises(TypeError):
            plan(memory_budget=1e9)
        with pytest.raises(TypeError):
            plan(cluster="a100-sxm")
        with pytest.raises(TypeError):
            plan(precision="bf16")
    assert first == second
    assert second.options == first.options
    assert second.report().split("planned in")[0] == first.report().split("planned in")[0]
    assert list(second.timings) == ["capture", "total"]
    first.write_problem(tmp_path / "first.lp")
    second.write_problem(tmp_path / "second.lp")
    assert (tmp_path / "first.lp").read_text() == (tmp_path / "second.lp").read_text()


def test_a_pipeline_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    piped: dict[str, Any] = dict(parallel=dict(pipeline=2), micro_batch_size=1)
    first = plan(**piped)
    monkeypatch.setattr(planner, "best_plan", None)
    assert plan(**piped) == first


_PROCESS = """
import zoo, autopar
model, sample = zoo.gpt2(layers=3)
plan = autopar.plan(model, sample, 2, parallel=dict(tensor=dict(size=2, mode="1d")), zero=0,
                    recompute="none", progress=False)
print(*plan.timings)
"""


@pytest.mark.slow
def test_processes_share_plans(folder: Path) -> None:
    """Several at a time write one whole file, and a further one reads it."""
    first = plan()
    only_file(folder).unlink()
    here = str(Path(__file__).parent)

    def start(seed: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": here, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", _PROCESS]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    for process in [start(seed) for seed in range(COUNT)]:
        assert process.communicate()[0].split()
        assert process.returncode == 0
    assert only_file(folder).suffix == ".json"
    assert start(COUNT).communicate()[0].split() == ["capture", "total"]
    assert plan() == first


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit


def in_part(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of the plan whose digest is right."""

    def of_all(data: dict[str, Any]) -> None:
        change(data["plan"])
        data["digest"] = plan_files._digest(data["plan"])

    return edited(of_all)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text(path.read_text()[:1000]), "it is no plan of this call"),
        (lambda path: path.write_text(""), "it is no plan of this call"),
        (lambda path: path.write_text("[]"), "it is no plan of this call"),
        (lambda path: path.write_bytes(b"\x80\x04K\x01."), "it cannot be read"),
        (edited(lambda data: data.update(key="0")), "something else"),
        (edited(lambda data: data.update(version=1)), "something else"),
        (edited(lambda data: data["plan"].update(gap=0.5)), "it is damaged"),
        (in_part(lambda plan: plan.update(gap="none")), "it is no plan of this call"),
        (in_part(lambda plan: plan["nodes"].popitem()), "it does not fit the model"),
    ],
)
def test_a_damaged_file_is_refused(
    damage: Callable[[Path], None], reason: str, folder: Path
) -> None:
    first = small_plan()
    path = only_file(folder)
    damage(path)
    with pytest.warns(UserWarning, match=reason) as warned:
        assert small_plan() == first
    assert path.name in str(warned[0].message)
    assert small_plan() == first  # from the file, which was written again


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    with pytest.warns(UserWarning, match="cannot be") as warned:
        assert small_plan().nodes
    assert any("cannot be written" in str(w.message) for w in warned)


def test_nothing_is_kept_unless_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0"):
        monkeypatch.delenv(plan_files.SWITCH) if value is None else monkeypatch.setenv(
            plan_files.SWITCH, value
        )
        small_plan()
    assert not folder.exists()
    monkeypatch.setenv(plan_files.SWITCH, "yes")
    with pytest.raises(PlanError, match="AUTOPAR_KEEP_PLANS='yes': set it to 0 or 1"):
        small_plan()


def test_a_changed_model_has_another_file(folder: Path) -> None:
    model = Changing()
    plan_of(model)
    changing_models.attribute(model)
    plan_of(model)
    plan_of(model)
    assert len(list(folder.iterdir())) == 2


class Doubled(torch.autograd.Function):
    """A user's operator, whose code no key has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_code_of_the_user_is_in_no_key(folder: Path) -> None:
    model = Changing()
    model.extra = Doubled.apply
    plan_of(model)
    name, known = "aten.relu", registry._MAKERS["aten.relu"]
    try:
        autopar.register_rule(name)(lambda call: None)
        plan_of(Changing())
    finally:
        registry._MAKERS[name] = known
    plan(profile_missing=True, cluster="cpu")
    assert not folder.exists()


def test_a_search_that_its_time_limit_ends_is_not_kept(folder: Path) -> None:
    small_plan(parallel=None, recompute="auto", zero=None, time_limit=1e-3)
    assert not folder.exists()


def test_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_files, "MOST_FILES", 2)
    for budget in (1e9, 2e9, 3e9):
        small_plan(memory_budget=budget)
    assert len(list(folder.iterdir())) == 2
