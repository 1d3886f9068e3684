"""A further call with the same model starts from the graphs of the first. Whatever changes a trace
leads to a new trace: the second plan is that of a process without a first.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import changing_models
import inner_settings
import pytest
import settings_of_models
import torch
import zoo
from changing_models import CHANGES, WIDTH, Changing, Counting, Drawing
from layer_stacks import assert_same
from torch import nn

import autopar
from autopar.frontend import kept_models, planner, traced_model
from autopar.frontend.kept_models import KEPT_MODELS
from autopar.frontend.traced_model import TracedModel
from autopar.rules import registry

SAMPLE = torch.zeros(8, WIDTH)
OPTIONS: dict[str, Any] = dict(parallel=dict(data=2), micro_batch_size=2, zero=1, progress=False)


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Elsewhere nothing is kept, so that tests that change this package see their changes."""
    monkeypatch.setattr(kept_models, "MOST_MODELS", 4)
    yield
    KEPT_MODELS.clear()


def traced(model: nn.Module, sample: Any = SAMPLE, **options: Any) -> TracedModel:
    found = TracedModel(model, sample, options.get("loss_fn", changing_models.loss))
    _ = found.graphs
    return found


def plan(model: nn.Module, sample: Any = SAMPLE, **options: Any) -> autopar.Plan:
    return autopar.plan(model, sample, 2, **{"loss_fn": changing_models.loss, **OPTIONS, **options})


def assert_traced_anew(
    model: nn.Module, first: TracedModel, sample: Any = SAMPLE, **options: Any
) -> None:
    """The graph and the plan are those of a process without a first trace, and differ from it."""
    second, plan_of_second = traced(model, sample, **options), plan(model, sample, **options)
    assert second.whole.fingerprint != first.graphs.whole.fingerprint
    KEPT_MODELS.clear()
    assert_same(second.whole, traced(model, sample, **options).whole)
    assert plan_of_second == plan(model, sample, **options)


def test_the_same_model_is_traced_once() -> None:
    model = Changing()
    assert traced(model).graphs is traced(model).graphs is traced(model, SAMPLE.clone()).graphs
    assert traced(Changing()).graphs is not traced(model).graphs


@pytest.mark.filterwarnings("ignore:module last .* has a forward hook")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_model(change: Callable[[Changing], None]) -> None:
    model = Changing()
    first = traced(model)
    plan(model)
    change(model)
    assert_traced_anew(model, first)


@pytest.mark.parametrize("change", [changing_models.same_memory, changing_models.plain_tensor])
def test_changes_of_memory(change: Callable[[Changing], None]) -> None:
    """No graph shows them, but a forward might."""
    model = Changing()
    first = traced(model)
    change(model)
    assert traced(model).graphs is not first.graphs


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Changing, "forward", lambda self, x: self.last(self.inner(x))),
        (changing_models.Inner, "forward", lambda self, x: self.linear(x) * 3.0),
        (nn.Linear, "forward", lambda self, x: x * self.weight.sum()),
        (torch.nn.functional, "relu", torch.tanh),
        (settings_of_models, "GAIN", 4.0),
        (inner_settings, "POWER", 3),
        (changing_models, "FACTOR", {"value": 5.0}),
        (changing_models, "settings_of_models", type(settings_of_models)("other")),
    ],
)
def test_changes_of_the_code(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "settings_of_models":
        value.GAIN = 0.5
    model = Changing()
    first = traced(model)
    plan(model)
    monkeypatch.setattr(owner, name, value)
    assert_traced_anew(model, first)


def test_changes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Changing()
    first = traced(model)
    monkeypatch.setenv("MODEL_SCALE", "6")
    assert_traced_anew(model, first)


def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    return nullcontext()


def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    return nullcontext()


@pytest.mark.parametrize(
    ("setting", "differs"),
    [
        (deterministic, True),
        (in_float64, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), True),
        (torch.no_grad, False),  # a plan is for training; the graph is the same
        (lambda: torch.device("meta"), False),
    ],
)
def test_changes_of_torch(setting: Callable[[], AbstractContextManager], differs: bool) -> None:
    model = Changing()
    first = traced(model)
    try:
        with setting():
            assert traced(model).graphs is not first.graphs
            if differs:
                assert_traced_anew(model, first)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(16, WIDTH),
        torch.zeros(8, WIDTH, dtype=torch.float64).float().requires_grad_(),
        (SAMPLE, True),
        dict(x=SAMPLE),
        dict(x=SAMPLE, flag=True),
    ],
)
def test_changes_of_the_sample(sample: Any) -> None:
    model = Changing()
    assert traced(model).graphs is not traced(model, sample).graphs
    second = traced(model, sample)
    KEPT_MODELS.clear()
    assert_same(second.whole, traced(model, sample).whole)


def test_another_loss() -> None:
    model = Changing()
    assert_traced_anew(model, traced(model), loss_fn=changing_models.other_loss)


def test_a_loss_that_holds_another_number() -> None:
    model, held = Changing(), [2.0]

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean() * held[0]

    first = traced(model, loss_fn=loss)
    held[0] = 3.0
    assert_traced_anew(model, first, loss_fn=loss)


def test_another_precision() -> None:
    model = Changing()
    first = plan(model)
    second = plan(model, precision="bf16")
    assert second.fingerprint != first.fingerprint
    KEPT_MODELS.clear()
    assert second == plan(model, precision="bf16")


def test_evaluation_mode_and_back() -> None:
    model = Changing()
    first = traced(model)
    second = plan(model.eval())
    KEPT_MODELS.clear()
    assert second == plan(model)
    assert second.fingerprint == first.whole.fingerprint


def test_a_rule_that_is_registered_in_between() -> None:
    model, name = Changing(), "aten.relu"
    options: dict[str, Any] = dict(
        parallel=dict(tensor=dict(size=2, mode="1d")), micro_batch_size=8
    )
    first, known = plan(model, **options), registry._MAKERS[name]
    try:
        autopar.register_rule(name)(lambda call: None)
        second = plan(model, **options)
    finally:
        registry._MAKERS[name] = known
    assert any("aten.relu" in note for note in second.notes)
    assert first == plan(model, **options)


def test_drawn_numbers_are_drawn_anew() -> None:
    model = Drawing()
    first = traced(model)
    place = random.getstate()
    second = traced(model)
    assert second.whole.fingerprint != first.whole.fingerprint
    random.setstate(place)
    assert_same(second.whole, traced(model).whole)


def test_a_model_with_an_iterator_is_traced_each_time() -> None:
    model = Counting()
    assert traced(model).whole.fingerprint != traced(model).whole.fingerprint


def test_the_kept_graphs_do_not_keep_the_model() -> None:
    model, sample = zoo.gpt2(layers=3)
    autopar.plan(model, sample, 2, **OPTIONS)
    assert KEPT_MODELS._kept
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not KEPT_MODELS._kept


def test_only_the_last_models_are_kept() -> None:
    models = [Changing() for _ in range(6)]
    graphs = [traced(model).graphs for model in models]
    assert [traced(m).graphs is g for m, g in zip(models[2:], graphs[2:], strict=True)] == [
        True
    ] * 4
    assert traced(models[0]).graphs is not graphs[0]


def test_a_compiled_model_has_the_tensors_of_the_model() -> None:
    model = Changing()
    made = plan(model)
    captured = traced(model).whole
    assert captured.state["last.weight"] is model.last.weight
    model.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))  # of the same kind
    again = traced(model)
    assert again.whole.state["last.weight"] is model.last.weight
    assert again.analyse(2)[0].captured.state["last.weight"] is model.last.weight
    assert plan(model) == made


def test_programs_leave_the_kept_graphs_as_they_are() -> None:
    """A compiled model runs, and the next plan and the next program are those of a first call."""
    model, options = Changing(), dict(OPTIONS, loss_fn=changing_models.loss, parallel={})
    sample = torch.rand(8, WIDTH)
    first = autopar.compile(model, sample, 1, **options)
    first(sample)["loss"].backward()
    graph = str(traced(model, sample).graphs.whole.graph)
    second = autopar.compile(model, sample, 1, **options)
    assert str(traced(model, sample).graphs.whole.graph) == graph
    KEPT_MODELS.clear()
    third = autopar.compile(model, sample, 1, **options)
    assert first.plan == second.plan == third.plan
    assert second(sample)["loss"].item() == third(sample)["loss"].item()


def test_a_plan_of_another_thread_waits() -> None:
    model, sample = zoo.gpt2(layers=3)
    budgets = [None, 1e9, 2e9, 3e9]
    alone = [autopar.plan(model, sample, 2, **OPTIONS, memory_budget=b) for b in budgets]
    KEPT_MODELS.clear()
    _ = TracedModel(model, sample, None).graphs
    found: dict[int, autopar.Plan] = {}

    def run(i: int) -> None:
        found[i] = autopar.plan(model, sample, 2, **OPTIONS, memory_budget=budgets[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(budgets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(budgets))] == alone


def test_a_plan_that_a_user_changes_is_no_plan_of_a_later_call() -> None:
    model = Changing()
    first, expected = plan(model), plan(model)
    first.rows.clear()
    first.nodes.clear()
    first.seconds["compute"] = 0.0
    first.stages[0].nbytes.clear()
    assert first != expected
    assert plan(model) == expected


def test_the_same_call_again_searches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = zoo.gpt2(layers=3)
    first = autopar.plan(model, sample, 2, **OPTIONS)
    monkeypatch.setattr(planner, "best_plan", None)
    second = autopar.plan(model, sample, 2, **OPTIONS)
    assert first == second
    assert second.options == first.options
    assert list(second.timings) == ["capture", "total"]
    assert second.timings["total"] < first.timings["total"]
    with pytest.raises(TypeError):  # another option
        autopar.plan(model, sample, 2, **{**OPTIONS, "zero": 2})


def test_a_search_that_its_time_limit_ends_is_not_kept() -> None:
    model, sample = zoo.gpt2(layers=3)
    limited: dict[str, Any] = dict(progress=False, time_limit=1e-3)
    first = autopar.plan(model, sample, 4, **limited)
    assert list(autopar.plan(model, sample, 4, **limited).timings) != ["capture", "total"]
    assert first.compared


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_plan_traces_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call with another cluster or budget finds the plan of a process of its own."""
    model, sample = zoo.gpt2(layers=3)
    others: list[dict[str, Any]] = [dict(cluster="a100-sxm"), dict(memory_budget=1e9)]
    autopar.plan(model, sample, 2, **OPTIONS)
    monkeypatch.setattr(traced_model, "_trace", None)
    found = [autopar.plan(model, sample, 2, **OPTIONS, **other) for other in others * count]
    monkeypatch.undo()
    KEPT_MODELS.clear()
    for other, second in zip(others * count, found, strict=True):
        assert second == autopar.plan(model, sample, 2, **OPTIONS, **other)
        KEPT_MODELS.clear()
