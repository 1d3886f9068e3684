"""ZeRO buckets: one collective gathers the parameters of a block, and one sums their gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import peaks
import pytest
import torch
import zoo
from equivalence import loss_of
from pool import Pools
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.plan import Plan
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.zero_buckets import gather_bucket
from autopar.search.plan_check.check_plan import check_plan

LAYERS = 8
# The last is too large to be copied into one tensor with others.
SHAPES, DIMS = [(8,), (4, 6), (4, 4, 6), (256, 128)], [0, 1, 1, 0]


class Collectives(TorchDispatchMode):
    """Counts the collectives that start."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f.namespace == "_c10d_functional" and "wait" not in f.__name__:
            kind = "gather" if "gather" in f.__name__ else f.__name__.partition("_tensor")[0]
            self.count[kind] += 1
        return f(*args, **(kwargs or {}))


def gathered(dst: str, reduction_dtype: torch.dtype | None) -> list[Any]:
    """What a bucket gathers, and the gradients: one part is frozen, and one is not read."""
    mesh, generator = Mesh((2,), ("a",)), torch.Generator().manual_seed(0)
    rank = mesh.coordinate[0]
    wholes = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parts = [w.chunk(2, d)[rank].clone() for w, d in zip(wholes, DIMS, strict=True)]
    for part in parts[:-2] + parts[-1:]:
        part.requires_grad_()
    found = gather_bucket(parts, mesh, 0, [f"S{d}" for d in DIMS], dst, reduction_dtype)
    for whole, result in zip(wholes, found, strict=True):
        assert torch.equal(whole, result)
    assert not found[2].requires_grad
    # Along R the ranks' gradients differ, and are summed; along I they are equal.
    scale = 1 + rank if dst == "R" else 1
    sum(((scale * w * r).sum() for w, r in zip(wholes[1:], found[1:], strict=True))).backward()
    assert parts[0].grad is None
    assert parts[2].grad is None
    for i in (1, 3):
        expected = wholes[i] * (3 if dst == "R" else 1)
        if reduction_dtype is not None:
            expected = (wholes[i].bfloat16() + (2 * wholes[i]).bfloat16()).float()
        torch.testing.assert_close(parts[i].grad, expected.chunk(2, DIMS[i])[rank])
    return []


@pytest.mark.parametrize(("dst", "dtype"), [("R", None), ("R", torch.bfloat16), ("I", None)])
def test_values_and_gradients(ranks: Pools, dst: str, dtype: torch.dtype | None) -> None:
    ranks(2).run(gathered, dst, dtype)


def model(dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, dict[str, Any]]:
    return zoo.gpt2(dtype=dtype, layers=LAYERS)


def trained(plan: Plan) -> tuple[Counter[str], float, float]:
    """The collectives of a step, the loss, and the largest error of a gradient."""
    net, sample = model()
    single, _ = model()
    single.load_state_dict(net.state_dict())
    compiled = autopar.compile(net, sample, plan.world_size, plan=plan, progress=False)
    with Collectives() as started:
        loss = loss_of(compiled(**sample))
        loss.backward()
    expected = loss_of(single(**sample))
    expected.backward()
    errors = [
        float((p.grad.full_tensor() - q.grad).abs().max())
        for p, q in zip(compiled.parameters(), single.parameters(), strict=True)
    ]
    return started.count, float(loss.detach() - expected.detach()), max(errors)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_block_is_gathered_at_most_twice(ranks: Pools, recompute: str) -> None:
    options = dict(parallel=dict(data=2), zero=3, recompute=recompute, progress=False)
    plan = autopar.plan(*model(), 2, **options)
    times = 1 + any(" -> " in name for name in plan.recomputed)
    assert times == (2 if recompute == "full" else 1)
    for count, loss, gradient in ranks(2).run(trained, plan):
        # each block, the embeddings, and what follows the last block
        assert count["gather"] <= times * LAYERS + 4
        assert count["reduce_scatter"] <= LAYERS + 2
        assert abs(loss) < 1e-6  # GPT-2's loss is float32
        assert gradient < 1e-8


def test_parameters_of_a_bucket_may_differ_in_what_is_recomputed(ranks: Pools) -> None:
    """They are then gathered apart."""
    plan = autopar.plan(
        *model(), 2, parallel=dict(data=2), zero=3, recompute="full", progress=False
    )
    again = [name for name in plan.recomputed if not name.startswith(plan.zero_buckets[1][2:5])]
    edited = dataclasses.replace(plan, recomputed=tuple(again))
    for _, loss, gradient in ranks(2).run(trained, edited):
        assert abs(loss) < 1e-6  # GPT-2's loss is float32
        assert gradient < 1e-8


@pytest.mark.slow
def test_buckets_make_a_plan_faster_and_are_left_out_where_memory_is_short(ranks: Pools) -> None:
    """With room for less than a block's parameters at a time, each is gathered alone."""
    net, sample = peaks.made("gpt2", 8)
    options = dict(parallel=dict(data=2), zero=3, recompute="full", progress=False)
    ahead = autopar.plan(net, sample, 2, **options)
    together = autopar.plan(net, sample, 2, **options, memory_budget=max(ahead.peak_memory) - 1000)
    assert (ahead.prefetch, together.prefetch) == (1, 0)
    budget = max(together.peak_memory) - 1000
    alone = autopar.plan(net, sample, 2, **options, memory_budget=budget)
    assert together.zero_buckets
    assert not alone.zero_buckets
    assert max(alone.peak_memory) <= budget
    assert alone.step_time > together.step_time
    for plan in (together, alone):
        assert ranks(2).run(peaks.measured, plan, "gpt2", 8) == pytest.approx(
            [plan.peak_memory[0]] * 2, rel=1e-3
        )


def refuse(plan: Plan, buckets: tuple[tuple[str, ...], ...], message: str) -> None:
    """A plan with these buckets is refused before anything runs."""
    analysis, _ = TracedModel(*model(), None, plan.precision).analyse(plan.microbatches)
    check_plan(plan, analysis)
    with pytest.raises(PlanError, match=message):
        check_plan(dataclasses.replace(plan, zero_buckets=buckets), analysis)


@pytest.mark.slow
def test_wrong_buckets_are_refused() -> None:
    embedding, position = "p_transformer_wte_weight", "p_transformer_wpe_weight"
    plan = autopar.plan(*model(), 2, parallel=dict(data=2), zero=3, progress=False)
    assert plan.zero_buckets[0] == (embedding, position)
    refuse(plan, ((embedding, "nothing"),), "nothing, which is no parameter")
    refuse(plan, ((embedding,), (position, embedding)), f"{embedding} is in two ZeRO buckets")
    whole = autopar.plan(*model(), 2, parallel=dict(data=2), zero=0, progress=False)
    assert whole.zero_buckets == ()
    refuse(whole, ((embedding, position),), f"{embedding} is in a ZeRO bucket, and is not gathered")
