"""Gradients after synchronisation against one device's autograd, in float64."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import handmade
import pytest
import torch
from pool import Pools
from torch.distributed.tensor import DTensor, Shard

from autopar.ir.layout import parse_layout
from autopar.runtime.optimizer.gradient_clipping import clip_grad_norm_
from autopar.runtime.parameters.gather import join_chunks, split_chunks
from autopar.runtime.parameters.gradient_handlers import GradientHandlers
from autopar.runtime.parameters.gradients import GradientSync

RANKS = {"one": 1, "data": 2, "zero": 2, "columns": 2, "slice": 2, "grid": 4, "data4": 4}
CASES = [pytest.param(case, id=case) for case in RANKS]


def _assert_alike(compiled: torch.nn.Module, model: torch.nn.Module) -> None:
    expected, found = handmade.gradients(model), handmade.gradients(compiled)
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name],
                gradient,
                rtol=1e-12,
                atol=1e-14,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def _train_twice(case: str, microbatches: int) -> None:
    model, compiled = (
        handmade.Network(),
        handmade.build(case, microbatches, seed=torch.distributed.get_rank()),
    )
    for seed, factor in ((0, 1.0), (1, 0.5)):  # the second backward adds to the first
        batch = handmade.batch(seed)
        expected, found = model(**batch)["loss"], compiled(**batch)["loss"]
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        (expected * factor).backward()
        (found * factor).backward()
        _assert_alike(compiled, model)
    for name, p in compiled.named_parameters():
        assert p.grad is None or type(p.grad) is type(p.data), name
        assert not isinstance(p, DTensor) or p.grad is None or p.grad.placements == p.placements
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, compiled)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        compiled(**batch)["loss"], model(**batch)["loss"], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_backwards_accumulate(ranks: Pools, case: str, microbatches: int) -> None:
    ranks(RANKS[case]).run(_train_twice, case, microbatches)


def test_four_microbatches(ranks: Pools) -> None:
    ranks(2).run(_train_twice, "zero", 4)


def _small_buckets(case: str) -> int:
    model, compiled = handmade.Network(), handmade.build(case)
    sync = GradientSync(compiled._runner.weights, compiled.mesh, GradientHandlers(), bucket_bytes=1)
    launched: list[int] = []
    compiled._runner._work.sync = sync
    for step in range(3):
        expected, found = (
            model(**handmade.batch(step))["loss"],
            compiled(**handmade.batch(step))["loss"],
        )
        expected.backward()
        finish = sync.finish

        def counted(finish=finish):  # type: ignore[no-untyped-def]
            launched.append(sync._next)
            return finish()

        sync.finish = counted  # type: ignore[method-assign]
        found.backward()
        sync.finish = finish  # type: ignore[method-assign]
        _assert_alike(compiled, model)
    # The idle parameter holds up its bucket in the first step only.
    assert launched[0] < launched[-1] == len(sync._buckets)
    return launched[-1]


@pytest.mark.parametrize("case", ["data", "zero"])
def test_buckets_start_during_the_backward(ranks: Pools, case: str) -> None:
    assert ranks(2).run(_small_buckets, case) == [5, 5]


def _other_losses(case: str) -> None:
    model, compiled = handmade.Network(), handmade.build(case, whole=case == "data")
    batch = handmade.batch()
    expected, found = model(**batch), compiled(**batch)
    # Through another output, together with the loss, and with a parameter used outside of the
    # graph.
    (3 * expected["loss"] + expected["logits"].pow(2).sum()).backward()
    logits = found["logits"]
    (3 * found["loss"] + logits.pow(2).sum().full_tensor()).backward()
    _assert_alike(compiled, model)
    (expected["idle"].sum()).backward()
    found["idle"].sum().full_tensor().backward()
    _assert_alike(compiled, model)
    for m in (model, compiled):
        m.zero_grad()
    # Two graphs in one backward, then one graph twice.
    sum(model(**handmade.batch(i))["loss"] for i in range(2)).backward()
    sum(compiled(**handmade.batch(i))["loss"] for i in range(2)).backward()
    _assert_alike(compiled, model)
    for loss in (model(**batch)["loss"], compiled(**batch)["loss"]):
        loss.backward(retain_graph=True)
        loss.backward()
    _assert_alike(compiled, model)


@pytest.mark.parametrize("case", ["data", "zero", "grid"])
def test_losses_made_by_the_user(ranks: Pools, case: str) -> None:
    ranks(RANKS[case]).run(_other_losses, case)


def _stale_graph(case: str) -> None:
    compiled = handmade.build(case)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    early = compiled(**handmade.batch())["loss"]
    compiled(**handmade.batch())["loss"].backward()
    optimizer.step()
    compiled(**handmade.batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("case", ["data", "zero"])
def test_backward_of_old_values_is_refused(ranks: Pools, case: str) -> None:
    ranks(2).run(_stale_graph, case)


def _failed_step(microbatches: int) -> None:
    model, compiled = handmade.Network(), handmade.build("zero", microbatches)
    program, calls = compiled._lowered.train, []

    def fails(_module, args, outputs):  # type: ignore[no-untyped-def]
        calls.append(args)
        if len(calls) == microbatches:
            outputs[0].register_hook(lambda _: 1 / 0)

    failing = program.register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        (2 * compiled(**handmade.batch())["loss"]).backward()
    failing.remove()
    for m in (model, compiled):
        m(**handmade.batch())["loss"].backward()
    _assert_alike(compiled, model)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_failed_step_leaves_nothing(ranks: Pools, microbatches: int) -> None:
    ranks(2).run(_failed_step, microbatches)


def _freeze() -> None:
    model, compiled = handmade.Network(), handmade.build("zero")
    for frozen in (True, False):
        for m in (model, compiled):
            m.zero_grad()
            m.fc1.weight.requires_grad_(not frozen)
            m(**handmade.batch())["loss"].backward()
        _assert_alike(compiled, model)


def test_freezing_later(ranks: Pools) -> None:
    ranks(2).run(_freeze)


def _memory() -> None:
    compiled = handmade.build("zero")
    leaf = compiled._state.weights["fc1.weight"].leaf
    assert leaf.numel() == 0
    loss = compiled(**handmade.batch())["loss"]
    assert leaf.numel() == handmade.WIDTH * handmade.HIDDEN
    loss.backward()
    assert leaf.numel() == 0
    with torch.no_grad():
        compiled(**handmade.batch())
    assert leaf.numel() == 0
    local = compiled.fc1.weight.to_local()
    assert local.shape == (handmade.HIDDEN // 2, handmade.WIDTH)
    assert compiled.fc1.weight.placements == (Shard(0),)
    gone = weakref.ref(compiled)
    del compiled, leaf, loss
    gc.collect()
    assert gone() is None


def test_gathered_values_and_programs_go(ranks: Pools) -> None:
    ranks(2).run(_memory)


def _clip(case: str, order: float) -> None:
    model, compiled, third = handmade.Network(), handmade.build(case), handmade.build(case)
    for m in (model, compiled, third):
        m(**handmade.batch())["loss"].backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
    torch.testing.assert_close(
        clip_grad_norm_(compiled.parameters(), 0.01, order), expected, rtol=1e-12, atol=0
    )
    _assert_alike(compiled, model)
    theirs = torch.nn.utils.clip_grad_norm_(third.parameters(), 0.01, order)
    torch.testing.assert_close(handmade.full(theirs), expected, rtol=1e-12, atol=0)
    _assert_alike(third, model)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("case", ["one", "columns", "grid", "data4"])
def test_clip_grad_norm(ranks: Pools, case: str, order: float) -> None:
    ranks(RANKS[case]).run(_clip, case, order)


@pytest.mark.parametrize(
    ("sizes", "types"),
    [
        ((2,), "S0"),
        ((2,), "S2"),
        ((2, 3), "S1 S1"),
        ((2, 3), "S1 S0"),
        ((2, 3), "S2 S1"),
        ((2, 3), "s1 S1"),
    ],
)
def test_join_chunks_undoes_split_chunks(sizes: tuple[int, ...], types: str) -> None:
    whole = torch.arange(6 * 12 * 4).view(6, 12, 4)
    layout = parse_layout(types)
    chunks = split_chunks(whole, sizes, layout)
    assert torch.equal(
        join_chunks(chunks.reshape(-1), sizes, layout, chunks.shape[len(sizes) :]), whole
    )
    for place in product(*map(range, sizes)):
        expected = whole
        # Earlier axes shard first, and axes of type s(d) last.
        for axis in sorted(range(len(sizes)), key=lambda a: (types.split()[a][0] == "s", a)):
            expected = expected.chunk(sizes[axis], layout[axis].dim)[place[axis]]
        assert torch.equal(chunks[place], expected)
