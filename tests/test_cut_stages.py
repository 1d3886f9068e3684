"""Cutting a graph into stages and splitting it at the cuts: which tensors are sent, which calls are
duplicated, and which cuts are refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from equivalence import Double, full, loss_of
from staged import cut_plan, even_starts
from torch import fx, nn

import autopar
from autopar.capture.capture_graph import capture
from autopar.errors import PlanError
from autopar.ir.captured import CapturedModel
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.passes.lowering.lower import lower
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels import graph_kernels

MODELS = ("gpt2", "llama", "t5", "vit", "unet", "cnn", "bert")
STAGES = 4


def captured(name: str) -> tuple[CapturedModel, nn.Module, dict[str, Any]]:
    with Double():
        model, sample = getattr(zoo, name)(dtype=torch.float64, batch=4)
        return canonicalise(capture(model, sample)), model, sample


def _cut(whole: CapturedModel, starts: list[str]) -> CapturedModel:
    return cut_stages(Analysis(whole), starts).captured


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def sends(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is graph_kernels.send]


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_graph_computes_the_same(name: str) -> None:
    whole, model, sample = captured(name)
    before = str(whole.graph)
    cut = _cut(whole, even_starts(whole, STAGES))
    assert str(whole.graph) == before
    assert [n.name for n in calls(cut.graph) if n.target is not graph_kernels.send] == [
        n.name for n in calls(whole.graph)
    ]
    assert [n.name for n in sends(cut.graph)] == [
        "send",
        *(f"send_{i}" for i in range(1, len(sends(cut.graph)))),
    ]
    with Double():
        found, _ = zoo.run(cut, **sample)
        assert torch.equal(loss_of(found), loss_of(zoo.run(whole, **sample)[0]))
        # The graph divides a sum by a count where the model takes a mean: with some processors'
        # instructions that is a last bit.
        torch.testing.assert_close(
            loss_of(found), loss_of(copy.deepcopy(model)(**sample)), rtol=1e-15, atol=0
        )


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_in_a_stage_was_sent_there(name: str) -> None:
    whole, _, _ = captured(name)
    cut = _cut(whole, even_starts(whole, STAGES))
    for node in calls(cut.graph):
        stage = node.meta["stage"]
        for operand in node.all_input_nodes:
            made = operand.meta.get("stage")
            if node.target is graph_kernels.send:
                assert made == stage - 1
            elif made is not None:
                assert made == stage
    loss = cut.graph.output_node().args[0][cut.loss]
    assert loss.meta["stage"] == STAGES - 1


def test_cheap_tensors_are_not_sent() -> None:
    """Masks and rotary tables are not sent: between two layers only the hidden state is."""
    whole, _, _ = captured("llama")
    start = next(n for n in calls(whole.graph) if n.meta["module"].startswith("model.layers.1."))
    cut = _cut(whole, [start.name])
    (send,) = sends(cut.graph)
    assert send.meta["val"].shape == (4, zoo.SEQUENCE, 32)
    copied = {str(n.target) for n in calls(cut.graph) if n.meta["stage"] is None}
    assert {"aten.cos.default", "aten.sin.default", "aten.arange.start_step"} & copied
    assert all(
        n.meta["stage"] is not None
        for n in calls(cut.graph)
        if "linear" in str(n.target) or "embedding" in str(n.target)
    )


def test_a_long_skip_is_relayed() -> None:
    whole, _, _ = captured("unet")
    (_, down), (up, higher) = (
        [n.name for n in calls(whole.graph) if kind in str(n.target)]
        for kind in ("max_pool", "upsample")
    )
    starts = [down, up, higher]
    cut = _cut(whole, starts)
    widths = [
        [n.meta["val"].shape[1:3] for n in sends(cut.graph) if n.meta["stage"] == s]
        for s in (1, 2, 3)
    ]
    assert [len(w) for w in widths] == [2, 3, 2]
    assert all(
        (8, 16) in w for w in widths
    )  # the output of the first convolution, which the last block reads
    relays = [n for n in sends(cut.graph) if n.args[0].target is graph_kernels.send]
    assert len(relays) == 3


class Several(nn.Module):
    """Operators with several results, and a loss before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        values, places = self.a(x).topk(4)
        loss = values.square().mean()
        return {"loss": loss, "extra": self.b(values) * places.sum()}


def test_results_stay_with_their_operator() -> None:
    whole = canonicalise(capture(Several(), {"x": torch.randn(4, 8)}))
    starts = [n.name for n in calls(whole.graph) if "getitem" in str(n.target)][1:]
    cut = _cut(whole, starts)
    assert {n.meta["stage"] for n in calls(cut.graph) if "getitem" in str(n.target)} == {0}
    cut.graph.lint()
    extra = next(n for n in calls(whole.graph) if n.meta["module"] == "b")
    cut = _cut(whole, [extra.name])
    assert cut.graph.output_node().args[0][cut.loss].target is graph_kernels.send


class Counting(nn.Module):
    """A counter whose new value depends on itself alone, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.a(x) / self.calls + self.mean
        h = self.b(h) / self.calls
        with torch.no_grad():
            self.mean.add_(h.mean(0))  # type: ignore[operator]
        return h.square().mean()


def test_a_buffer_that_changes_is_of_one_stage() -> None:
    whole = canonicalise(capture(Counting(), {"x": torch.randn(4, 8)}))
    second = next(n for n in calls(whole.graph) if n.meta["module"] == "b")
    with pytest.raises(PlanError, match="in stage 1 changes buffer 'b_mean', which stage 0 reads"):
        _cut(whole, [second.name])
    first = next(n for n in calls(whole.graph) if n.meta["module"] == "a")
    division = first.next
    cut = _cut(whole, [division.name])
    assert [n.meta["stage"] for n in calls(cut.graph) if n.name == "add"] == [None]  # the counter
    assert len(sends(cut.graph)) == 1


class Normalised(nn.Module):
    """One BatchNorm that is called in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.norm(self.a(x)))).square().mean()


def test_statistics_are_of_one_stage() -> None:
    whole = canonicalise(capture(Normalised(), {"x": torch.randn(4, 8)}))
    second = next(n for n in calls(whole.graph) if n.meta["module"] == "b")
    with pytest.raises(PlanError, match="changes buffer 'b_norm_running_"):
        _cut(whole, [second.name])


def test_wrong_starts() -> None:
    whole, _, _ = captured("gpt2")
    names = [n.name for n in calls(whole.graph)]
    with pytest.raises(PlanError, match="stage 1 starts at 'nothing', which is no operator"):
        _cut(whole, ["nothing"])
    with pytest.raises(PlanError, match=r"stage 2 starts at .* at or before the start of stage 1"):
        _cut(whole, [names[9], names[9]])
    with pytest.raises(PlanError, match="stage 0 would be empty"):
        _cut(whole, [names[0]])


@pytest.mark.sampled(fast=3, slow=2)
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_are_the_whole(name: str) -> None:
    whole, model, sample = captured(name)
    with Double():
        single = autopar.plan(model, sample, 1, progress=False)
    plan = cut_plan(single, whole, even_starts(whole, STAGES), STAGES, "gpipe")
    analysis = cut_stages(Analysis(whole), [stage.start for stage in plan.stages[1:]])
    lowered = lower(analysis, plan)
    kinds = {i.target: i for i in whole.inputs}
    assert set(lowered.state) <= set(kinds)
    given = [sample[i.target] for i in whole.inputs if i.kind == "input"]
    buffers = {k: v.clone() for k, v in whole.state.items()}
    arguments = [*(buffers[k] for k in lowered.state), *given]
    with torch.no_grad():
        expected = fx.GraphModule(nn.Module(), lowered.train.graph)(
            None, *[a.clone() for a in arguments]
        )
    passed: list[torch.Tensor] = []
    results: dict[int, torch.Tensor] = {}
    for stage in lowered.stages:
        graph = stage.train
        assert [tuple(x.shape) for x in passed] == [c.shape for c in graph.received]
        assert [x.dtype for x in passed] == [c.dtype for c in graph.received]
        with torch.no_grad():
            flat = fx.GraphModule(nn.Module(), graph.graph)(
                None, *(arguments[i] for i in graph.used_placeholders), *passed
            )
        passed = list(flat[: len(graph.sent)])
        results.update(zip(graph.results, flat[len(graph.sent) :], strict=False))
    for i, found in results.items():
        assert torch.equal(full(found), expected[i])
    assert sorted(results) == list(range(len(lowered.output_layouts)))
    assert sorted(i for stage in lowered.stages for i in stage.train.updates) == list(
        range(len(whole.updates))
    )
    assert all(not stage.evaluate.updates for stage in lowered.stages)
