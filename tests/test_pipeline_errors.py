"""What a stage holds at a time, and what an error in a pipeline says and leaves."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, loss_of
from pipeline_cases import build, part
from pool import Pools
from staged import Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import PlanError, RunError


class _Tag:
    """An object that lives as long as the graph that refers to it."""


def _held(case: Case) -> list[list[int]]:
    """For each stage of this rank the number of microbatches with a graph, after each forward."""
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64, batch=case.batch)
        compiled = build(model, sample, case)
    assert compiled._runner.stages is not None
    compute = compiled._runner._work.compute
    programs = compiled._runner.stages.programs([stage.train for stage in compiled._lowered.stages])
    stage_of = {id(program): i for i, program in enumerate(programs)}
    tags: list[list[weakref.ref[_Tag]]] = [[] for _ in stage_of]
    counts: list[list[int]] = [[] for _ in stage_of]

    def watched(program: nn.Module, arguments: Any, roots: Any) -> Any:
        flat = compute(program, arguments, roots)
        tag, i = _Tag(), stage_of[id(program)]
        next(x for x in flat if x.requires_grad).grad_fn.metadata["tag"] = tag
        tags[i].append(weakref.ref(tag))
        del tag
        counts[i].append(sum(t() is not None for t in tags[i]))
        return flat

    compiled._runner._work.compute = watched  # type: ignore[method-assign]
    with Double():
        compiled(**sample)
    assert all(t() is None for held in tags for t in held)
    return counts


@pytest.mark.slow
def test_a_stage_holds_as_many_microbatches_as_its_schedule_says(ranks: Pools) -> None:
    assert [max(c) for (c,) in ranks(4).run(_held, Case(4, "1f1b", batch=12, options=part(2)))] == [
        4,
        3,
        2,
        1,
    ]
    assert [max(c) for (c,) in ranks(2).run(_held, Case(2, "gpipe", options=part(2)))] == [4, 4]


# -- errors ----------------------------------------------------------------------------------------


def _errors() -> None:
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, Case(2, "1f1b", options=part(2)))
        with pytest.raises(RunError, match="size 4 in dim 0, expected 8"):
            compiled(**{name: x[:4] for name, x in sample.items()})
        loss = loss_of(compiled(**sample))
        loss.backward()
        with pytest.raises(RunError, match="twice"):
            loss.backward()
        with pytest.raises(PlanError, match="needs at least 2 microbatches, there are 1"):
            build(model, sample, Case(2, "1f1b"))
        captured = (
            autopar.frontend.traced_model.TracedModel(model, sample, None).analyse(1)[0].captured
        )
        last = [n.name for n in captured.graph.nodes if n.op == "call_function"][-1]
        with pytest.raises(PlanError, match="rank 1 of 2 would have no parameter"):
            build(model, sample, Case(2, "gpipe"), starts=[last])


def test_errors(ranks: Pools) -> None:
    ranks(2).run(_errors)


def _fails() -> None:
    """An error in the last backward of the first stage. No other rank waits for this backward."""
    with Double():
        model, sample = zoo.mlp(dtype=torch.float64)
        compiled = build(model, sample, Case(2, "gpipe", options=part(2)))
        first = compiled.mesh.pipeline_rank == 0
        assert compiled._runner.stages is not None

        def failing(index: int) -> None:
            raise ValueError("no memory")

        if not first:
            assert loss_of(compiled(**sample)).item() > 0
            return
        compiled._runner.stages._schedule_runner._on_last_backward = failing
        with pytest.raises(ValueError, match="no memory"):
            compiled(**sample)
        assert all(w.leaf.grad is None for w in compiled._runner.weights)
        assert all(p.grad is None for p in compiled.parameters())
        dist.all_reduce(
            torch.zeros((), dtype=torch.float64), group=compiled.mesh.pipeline_group()
        )  # the loss's sum, in which the other rank waits
        with pytest.raises(RunError, match="an earlier step failed"):
            compiled(**sample)


def test_a_failed_step_leaves_nothing(ranks: Pools) -> None:
    ranks(2).run(_fails)


def _is_checkpointed(case: Case) -> str:
    model, sample = zoo.mlp(dtype=torch.float64, batch=case.batch)
    compiled = build(model, sample, case)

    def loss(*_: Any) -> torch.Tensor:
        return loss_of(compiled(**sample))

    try:
        checkpoint(loss, torch.zeros(()), use_reentrant=False).backward()
    except RunError as e:
        return str(e)
    return ""


def test_checkpointing_around_a_pipeline_is_refused() -> None:
    pool = Pools()(2)
    case = Case(2, "1f1b", options=part(2))
    for message in pool.run_to_the_end(_is_checkpointed, case, timeout=120):
        assert "the compiled model is called inside of its own call" in message
