"""The option ``backend``: what a plan records of it, and what inductor's graph of a program draws,
saves and recomputes. Compiled programs are run in test_inductor.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import autopar
from autopar.errors import PlanError
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.compilation import random_masks
from autopar.runtime.compilation.backends import InductorBackend
from autopar.runtime.compilation.compiler_graph import CompilerGraph
from autopar.runtime.pipeline import recompute

MOMENT = 5, 2, 1  # a seed, a step, a microbatch


def plan_of(model: nn.Module, sample: dict, ranks: int = 1, **options: object) -> autopar.Plan:
    return autopar.plan(model, sample, ranks, progress=False, **options)


class Net(nn.Module):
    """A layer, something random, and a mean as the loss."""

    def __init__(self, random: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.random = nn.Linear(8, 8), random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (torch.bernoulli(y.sigmoid()) * y if self.random is None else self.random(y)).sum()


BATCH = torch.zeros(4, 8)


def test_default_is_inductor_on_gpus_and_eager_on_cpus() -> None:
    model = Net(nn.Dropout(0.5))
    plans = {cluster: plan_of(model, BATCH, cluster=cluster) for cluster in ("cpu", "h100-sxm")}
    assert {name: plan.backend for name, plan in plans.items()} == {
        "cpu": "eager",
        "h100-sxm": "inductor",
    }
    assert "backend inductor" in plans["h100-sxm"].report()
    assert plan_of(model, BATCH, cluster="cpu", backend="inductor").backend == "inductor"
    assert plan_of(model, BATCH, cluster="h100-sxm", backend="eager").backend == "eager"
    on_gpus, asked = plans["h100-sxm"], plan_of(model, BATCH, cluster="cpu", backend="inductor")
    assert (on_gpus.backend_on("cuda"), on_gpus.backend_on("cpu")) == ("inductor", "eager")
    assert asked.backend_on("cpu") == "inductor"


def test_what_is_not_compiled_runs_eagerly_with_a_note_or_is_refused() -> None:
    plan = plan_of(Net(), BATCH, cluster="h100-sxm")
    assert plan.backend == "eager"
    assert any("inductor does not compile a random operator" in note for note in plan.notes)
    with pytest.raises(PlanError, match=r"does not compile a random operator, aten\.bernoulli"):
        plan_of(Net(), BATCH, backend="inductor")
    model, sample = zoo.gpt2(layers=1)
    piped = dict(parallel=dict(pipeline=2), schedule="zero-bubble", backend="inductor")
    with pytest.raises(PlanError, match="each backward whole"):
        plan_of(model, sample, 2, **piped)
    square = dict(parallel=dict(tensor=dict(size=4, mode="2d")))
    with pytest.raises(PlanError, match="does not compile a product on a square of ranks"):
        plan_of(*zoo.mlp(), 4, backend="inductor", **square)
    assert plan_of(*zoo.mlp(), 4, cluster="h100-sxm", **square).backend == "eager"
    with pytest.raises(PlanError, match="backend='triton': give one of eager, inductor"):
        plan_of(model, sample, backend="triton")


def test_plan_files_keep_the_backend_and_older_files_are_eager(tmp_path: Path) -> None:
    plan = plan_of(Net(nn.Dropout(0.5)), BATCH, backend="inductor")
    plan.save(path := tmp_path / "plan.json")
    assert autopar.Plan.load(path) == plan
    data = json.loads(path.read_text())
    del data["backend"]
    path.write_text(json.dumps(data))
    assert autopar.Plan.load(path) == dataclasses.replace(plan, backend="eager")
    with pytest.raises(PlanError, match="backend 'triton' is none of eager, inductor"):
        dataclasses.replace(plan, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_those_of_the_eager_kernel(dtype: torch.dtype) -> None:
    x = torch.ones(6, 40, dtype=dtype).t()  # not contiguous: torch draws in the order of memory
    streams = RandomStreams()
    streams.moment = MOMENT
    with streams.seeded_for(3, 1):
        expected = torch.native_dropout(x, 0.3, True)[0]
    before = torch.get_rng_state()
    found = random_masks.dropout(x, 0.3, torch.tensor((*MOMENT, 1)), 2, 1)
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)
    for moment, node, chunk in (
        ((5, 3, 1, 1), 2, 1),
        ((5, 2, 0, 1), 2, 1),
        ((*MOMENT, 2), 2, 1),
        ((*MOMENT, 1), 3, 1),
        ((*MOMENT, 1), 2, 0),
    ):
        assert not torch.equal(
            random_masks.dropout(x, 0.3, torch.tensor(moment), node, chunk), found
        )


@pytest.mark.parametrize("case", ["plain", "causal", "bool mask", "bias", "grouped", "scale"])
def test_attention_with_dropout_is_torchs(case: str) -> None:
    heads = 2 if case == "grouped" else 4
    q, k, v = (torch.randn(2, h, 6, 8, dtype=torch.float64) for h in (4, heads, heads))
    mask = {"bool mask": torch.rand(2, 1, 6, 6) > 0.5, "bias": torch.randn(1, 4, 6, 6).double()}
    given = (mask.get(case), 0.3, case == "causal", 0.7 if case == "scale" else None)
    if case == "bool mask":
        mask[case][0, 0, 0] = False  # a row whose keys are all masked
    streams = RandomStreams()
    streams.moment = MOMENT
    results = []
    for compiled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if compiled:
            drawn = torch.tensor((*MOMENT, 1)), 2, 1
            out = random_masks.attention(*leaves, *given, case == "grouped", *drawn)
        else:
            with streams.seeded_for(3, 1):
                out = F.scaled_dot_product_attention(
                    *leaves, *given[:3], scale=given[3], enable_gqa=case == "grouped"
                )
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_graph_says_what_the_backward_recomputes() -> None:
    model, sample = zoo.gpt2(layers=1, dropout=0.1)
    compiled = autopar.compile(model, sample, 1, recompute="full", progress=False)
    recomputed = set(compiled.plan.recomputed)
    graph = CompilerGraph(compiled._lowered.train, compiled.mesh, (0,))
    assert graph.first_draw is not None
    tags = {node.name: node.meta.get("recompute") for node in graph.module.graph.nodes}
    marked = {n for n, tag in tags.items() if tag is CheckpointPolicy.MUST_RECOMPUTE}
    rest = {node.name for node in graph.module.graph.nodes if node.name in recomputed} - marked
    views = {"reshape", "transpose", "split", "slice", "t", "expand"}
    assert {name.partition("_")[0] for name in rest} <= views  # they make no memory
    assert len(marked) > 10
    # What a block gets and what leaves it, and masks that are drawn outside.
    saved = {name for name, tag in tags.items() if tag is CheckpointPolicy.MUST_SAVE}
    assert {name.rstrip("_0123456789") for name in saved} == {"add", "dropout"}


class Traced(InductorBackend):
    """Runs a program eagerly once the compiler has divided its forward and backward."""

    def run(self, program: Any, arguments: Any, roots: Any) -> Any:
        self._compile(program, arguments, roots, settings=None)
        return recompute.run(program, self._mesh, arguments)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node is an input of the program, or an input transposed, in the same memory."""
    while node.target in (torch.ops.aten.permute.default, torch.ops.aten.t.default):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", ["none", "selective", "full"])
def test_compiler_saves_what_the_plan_saves_or_less(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx as compiler

    parts: list[Any] = []

    def keep(part: Any, *_: Any, **__: Any) -> Any:
        parts.append(part)
        return part

    monkeypatch.setattr(compiler, "compile_fx_inner", keep)
    model, sample = zoo.gpt2(layers=2)
    compiled = autopar.compile(model, sample, 1, recompute=option, progress=False)
    compiled._runner._work._backend = Traced(compiled.mesh, False)
    compiled(**sample)
    forward, _ = parts
    saved = [n for n in forward.graph.output_node().args[0][2:] if not _is_parameter(n)]
    found = sum(node.meta["val"].nbytes for node in saved)
    # Of a normalisation it may save more, and it saves the state of a generator beside attention
    # that is recomputed: 5 kB, of 100 here.
    assert 0.5 < found / compiled.plan.stages[0].kept < 1.25


def test_kernels_that_draw_otherwise_are_refused() -> None:
    compiled = autopar.compile(Net(), BATCH, 1, progress=False)
    with pytest.raises(autopar.AutoparError, match="call_random_operator that draws"):
        CompilerGraph(compiled._lowered.train, compiled.mesh, (0,))
