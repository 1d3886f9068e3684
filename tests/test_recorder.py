"""Measured times: naps of known length are found in the parts of the step that they are in, and
recording does not change the training.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import handmade
import pytest
import staged
import torch
import torch.distributed as dist
import zoo
from naps import STEPS, about, compiled_gpt2, insert_nap, seconds_of, train
from pool import Pools
from staged import Case

import autopar
from autopar import Comparison, Plan
from autopar.cost_model import simulate_schedule
from autopar.runtime.communication import collectives

pytestmark = pytest.mark.alone


# -- what is measured ------------------------------------------------------------------------------


def _one() -> None:
    compiled, sample = compiled_gpt2()
    insert_nap(compiled._lowered.train, 0.06, 0.12)
    train(compiled, lambda _: sample, between=0.18)
    found = compiled.compare()
    took = seconds_of(found)
    about(took["stage 0", "forward"], 0.06)
    about(took["stage 0", "backward"], 0.12)
    about(took["step", "compute"], 0.18)
    about(took["step", "optimizer"], 0.09)
    about(took["step", "other"], 0.18)
    about(took["step", "total"], 0.06 + 0.12 + 0.09 + 0.18)
    assert found.steps == STEPS - 3  # two steps warm up, and the last one has no end
    assert found.predicted["total"] == pytest.approx(compiled.plan.step_time)
    assert sum(v for k, v in found.measured.items() if k != "total") == pytest.approx(
        found.measured["total"]
    )
    assert took["rank 0", "peak memory"] is None
    assert "memory was not measured" in str(found)


def test_a_forward_a_backward_an_optimizer_and_the_rest(ranks: Pools) -> None:
    ranks(1).run(_one)


def _a_subclass_after_its_base() -> None:
    torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], lr=0.1
    )  # from now on torch calls hooks for SGD.step, called by Slow.step too
    _one()


def test_an_optimizer_that_calls_the_step_of_its_base_is_measured_whole(ranks: Pools) -> None:
    ranks(1).run(_a_subclass_after_its_base)


def _in_parts() -> None:
    compiled, sample = compiled_gpt2(micro_batch_size=4)
    assert compiled.plan.microbatches == 2
    insert_nap(compiled._lowered.train, 0.03, 0.06)
    train(compiled, lambda _: sample)
    took = seconds_of(compiled.compare())
    about(took["stage 0", "forward"], 2 * 0.03)
    about(took["stage 0", "backward"], 2 * 0.06)


def test_microbatches_add_up(ranks: Pools) -> None:
    ranks(1).run(_in_parts)


def _conversion() -> None:
    compiled = handmade.build("columns")
    # The only conversion of the forward; the backward has none.
    own = collectives._MOVEMENTS["P", "I"]

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.08)
        return own(*args)

    with mock.patch.dict(collectives._MOVEMENTS, {("P", "I"): slow}):
        train(compiled, handmade.batch)
    (took,) = compiled.mesh.recorder.times(0, [0], None).stages.values()
    about(took["forward conversions"], 0.08)
    about(took["forward"], 0.08)
    about(took["backward conversions"], 0.0)
    about(took["backward"], 0.0)


def test_a_conversion(ranks: Pools) -> None:
    ranks(2).run(_conversion)


def _synchronisation() -> dict[str, float]:
    compiled = handmade.build("data")
    insert_nap(compiled._lowered.train, 0.0, 0.1 * dist.get_rank())
    train(compiled, handmade.batch)
    times = compiled.mesh.recorder.times(0, [0], None)
    return {**times.seconds, **times.stages[0]}


def test_who_is_done_first_waits_for_the_others_gradients(ranks: Pools) -> None:
    first, second = ranks(2).run(_synchronisation)
    about(
        first["gradient synchronisation"], 0.1 - 0.01
    )  # less the time between the beginnings of the ranks' backwards
    about(first["backward"], 0.0)
    about(second["gradient synchronisation"], 0.0)
    about(second["backward"], 0.1)


def _pipelined(forward: float, backward: float, microbatches: int) -> tuple[Comparison, str, Plan]:
    model, sample = zoo.gpt2()
    case = Case(2, "1f1b", options=dict(micro_batch_size=2))
    plan = staged.staged_plan(model, sample, 2, case.pipeline, case.schedule, **case.options)
    compiled = autopar.compile(model, sample, 2, plan=plan)
    assert compiled.plan.microbatches == microbatches
    if compiled.mesh.pipeline_rank == 1:
        insert_nap(
            compiled._runner.stages.programs([stage.train for stage in compiled._lowered.stages])[
                0
            ],
            forward,
            backward,
        )
    train(compiled, lambda _: sample)
    found = compiled.compare(sample)
    return found, str(found), plan


def test_the_stages_of_a_pipeline(ranks: Pools) -> None:
    forward, backward, microbatches = 0.02, 0.04, 4
    (found, text, plan), (other, _, _) = ranks(2).run(_pipelined, forward, backward, microbatches)
    assert other == found  # the same on every rank
    took = seconds_of(found)
    about(took["stage 0", "forward"], 0.0)
    about(took["stage 0", "backward"], 0.0)
    about(took["stage 1", "forward"], microbatches * forward)
    about(took["stage 1", "backward"], microbatches * backward)
    line = simulate_schedule(
        "1f1b", 2, 1, microbatches, [0.0, forward], [0.0, backward]
    )  # the naps alone
    waits = line.ends[0][-1] - line.busy[0]
    assert waits == pytest.approx(microbatches * (forward + backward))
    about(took["rank 0", "waiting"], waits - 0.01)  # the rank does not wait while stage 0 computes
    about(took["rank 1", "waiting"], 0.0)
    about(
        found.measured["compute"], microbatches * (forward + backward)
    )  # those of the rank with the most work
    predicted = {(row.where, row.what): row.predicted for row in found.rows}
    assert predicted["stage 1", "forward"] == pytest.approx(
        microbatches * plan.stages[1].seconds["forward"]
    )
    assert [predicted[f"rank {r}", "peak memory"] for r in (0, 1)] == list(plan.peak_memory)
    assert "stage 1" in text
    assert "waiting: for other ranks" in text
