"""Gradients that wait for their sum over ranks: accumulated without communication, they end as the
gradients of one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from pool import Pools
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache

import autopar
from autopar.errors import RunError

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(parallel=dict(data=2), zero=0)),
    "zero 1": (2, dict(parallel=dict(data=2), zero=1)),
    "zero 3": (2, dict(parallel=dict(data=2), zero=3)),
    "tensor": (2, dict(parallel=dict(tensor=dict(size=2, mode="1d")))),
    "bf16": (2, dict(parallel=dict(data=2), zero=1, precision="bf16")),
    "microbatches": (2, dict(parallel=dict(data=2), micro_batch_size=1)),
    "pipeline": (2, dict(parallel=dict(pipeline=2), micro_batch_size=2, schedule="1f1b")),
    "data x tensor": (4, dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")), zero=1)),
}
ROUNDS = 4  # a power of two: the loss is float32, and its third would be rounded


def batches() -> list[dict[str, torch.Tensor]]:
    found = []
    for seed in range(ROUNDS):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = torch.randint(1, 16, (8, 8))
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def made(**options: Any) -> tuple[Any, Any]:
    """A model of one device, and its program."""
    _clear_sharding_prop_cache()
    dtype = torch.float32 if "precision" in options else torch.float64
    model, _ = zoo.gpt2(dtype=dtype, layers=1)
    program = autopar.compile(
        copy.deepcopy(model), batches()[0], dist.get_world_size(), progress=False, **options
    )
    return model, program


def loss_of(program: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return program(**batch)["loss"] / ROUNDS


def accumulate(program: Any) -> None:
    with program.no_sync():
        for batch in batches()[:-1]:
            loss_of(program, batch).backward()
    loss_of(program, batches()[-1]).backward()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def error(program: Any, expected: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, relative to the largest of its values."""
    return max(
        float((whole(p.grad) - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-12))
        for n, p in program.named_parameters()
        if p.grad is not None
    )


def of_one_device(model: Any) -> dict[str, torch.Tensor]:
    for batch in batches():
        loss_of(model, batch).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def the_sum(options: dict[str, Any]) -> tuple[float, float]:
    """Twice, with gradients set to zero and to None between."""
    model, program = made(**options)
    expected = of_one_device(model)
    found = []
    for set_to_none in (True, False):
        accumulate(program)
        found.append(error(program, expected))
        for p in program.parameters():
            p.grad = None if set_to_none else p.grad.zero_()
    return found[0], found[1]


@pytest.mark.sampled(fast=2, slow=3)
@pytest.mark.parametrize(
    "way",
    [
        "data",
        "zero 1",
        *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w not in ("data", "zero 1")),
    ],
)
def test_the_gradients_are_those_of_one_device(ranks: Pools, way: str) -> None:
    world, options = WAYS[way]
    tolerance = 0.05 if way == "bf16" else 1e-9
    for found in ranks(world).run(the_sum, options):
        assert max(found) < tolerance, found


def while_they_wait(options: dict[str, Any]) -> None:
    model, program = made(**options)
    expected = of_one_device(model)
    with program.no_sync():
        loss_of(program, batches()[0]).backward()
        for batch in batches()[1:]:
            loss = loss_of(program, batch)
            with CommDebugMode() as watched:
                loss.backward()
            assert watched.get_total_counts() == 0
    # What reads a gradient that waits gets the sum.
    assert all(any(q.is_partial() for q in p.grad.placements) for p in program.parameters())
    assert error(program, expected) < 1e-9
    # An optimizer's step sums first.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (program, model)]
    for optimizer in optimizers:
        optimizer.step()
    for (n, p), q in zip(program.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(whole(p.data), q, rtol=1e-9, atol=1e-12), n


def test_nothing_is_sent_and_what_reads_a_gradient_gets_the_sum(ranks: Pools) -> None:
    ranks(2).run(while_they_wait, WAYS["zero 1"][1])


def clipped(options: dict[str, Any]) -> None:
    """Clipping by torch and by autopar, while gradients wait."""
    for clip in (torch.nn.utils.clip_grad_norm_, autopar.clip_grad_norm_):
        model, program = made(**options)
        expected = of_one_device(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with program.no_sync():
            for batch in batches():
                loss_of(program, batch).backward()
        found = whole(clip(program.parameters(), 0.05))
        assert torch.allclose(found.to(norm.dtype), norm, rtol=1e-9), clip
        assert error(program, expected) < 1e-9, clip


@pytest.mark.parametrize("way", ["zero 1", "tensor"])
def test_clipping_sees_the_sum(ranks: Pools, way: str) -> None:
    ranks(2).run(clipped, WAYS[way][1])


def unscaled(options: dict[str, Any]) -> None:
    """Scalers by torch and by autopar divide the sum, and see that one rank's part overflows."""
    model, program = made(**options)
    expected = of_one_device(model)
    start = [whole(p.detach()).clone() for p in program.parameters()]
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    for scaler in torch.amp.GradScaler("cpu", 256.0), autopar.LossScaler(program, init_scale=256.0):
        for overflows in (True, False):
            optimizer.zero_grad()
            with program.no_sync():
                for batch in batches():
                    scaler.scale(loss_of(program, batch)).backward()
            if overflows and dist.get_rank() == 1:
                next(p.grad for p in program.parameters()).to_local().fill_(torch.inf)
            scaler.unscale_(optimizer)
            assert overflows or error(program, expected) < 1e-9, scaler
            scaler.step(optimizer)
            scaler.update()
            found = [whole(p.detach()) for p in program.parameters()]
            assert all(map(torch.equal, found, start)) is overflows, scaler
        with torch.no_grad():  # back to the expected gradients
            for p in program.parameters():
                p.add_(p.grad, alpha=0.1)
        start = [whole(p.detach()).clone() for p in program.parameters()]


def test_a_loss_scaler_sees_the_sum(ranks: Pools) -> None:
    ranks(2).run(unscaled, WAYS["zero 1"][1])


def seen(options: dict[str, Any]) -> None:
    """Who sees gradients, sees sums: hooks, handlers, and torch.autograd.grad."""
    model, program = made(**options)
    name, parameter = next(iter(program.named_parameters()))
    loss_of(model, batches()[0]).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}[name]

    def check(gradient: torch.Tensor) -> None:
        assert torch.allclose(whole(gradient), expected, rtol=1e-9, atol=1e-12)
        found.append(True)

    found: list[bool] = []
    with program.no_sync():
        check(torch.autograd.grad(loss_of(program, batches()[0]), [parameter])[0])
        hook = parameter.register_hook(check)
        loss_of(program, batches()[0]).backward()
        hook.remove()
        check(parameter.grad)
        # A gradient that is summed stays so: the next is added to it.
        loss_of(program, batches()[0]).backward()
        assert torch.allclose(whole(parameter.grad), 2 * expected, rtol=1e-9, atol=1e-12)
    assert len(found) == 3


def test_who_sees_gradients_sees_sums(ranks: Pools) -> None:
    ranks(2).run(seen, WAYS["zero 1"][1])


def alone(options: dict[str, Any]) -> str:
    _, program = made(**options)
    try:
        if dist.get_rank() == 1:
            with program.no_sync():
                loss_of(program, batches()[0]).backward()
        else:
            loss_of(program, batches()[0]).backward()
    except RunError as e:
        return str(e)
    return ""


def test_ranks_enter_it_alike() -> None:
    pool: Callable[..., Any] = Pools()(2).run_to_the_end
    for message in pool(alone, WAYS["data"][1], timeout=120):
        assert "in train() in no_sync(), not in train()" in message
