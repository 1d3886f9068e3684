"""Training in mixed precision follows one device: losses, autocast, accumulation, clipping,
evaluation, checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from casts_by_hand import PAIR, ByHand, build, distance, planned
from equivalence import full, loss_of, step, traced_once
from pool import Pools
from torch import nn

import autopar

STEPS = 20


def train(model: nn.Module, sample: Mapping[str, Any]) -> torch.Tensor:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(**sample))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def _trains(name: str, labels: list[str]) -> tuple[dict[str, float], float, float]:
    """The distance of each configuration's losses from those of float32, the same distance on one
    device, and the decrease of the loss.
    """
    model, sample = getattr(zoo, name)()
    exact = train(copy.deepcopy(model), sample)
    alone = train(ByHand(copy.deepcopy(model), torch.bfloat16), sample)
    found = {}
    with traced_once():
        for label, plan in planned(
            model, sample, {label: PAIR[label] for label in labels}, "bf16"
        ).items():
            compiled = build(model, sample, plan=plan)
            found[label] = float((train(compiled, sample) - exact).abs().max())
            state = {n: full(t) for n, t in compiled.state_dict().items()}
            assert all(
                state[n].dtype == p.dtype for n, p in model.state_dict().items() if n in state
            ), label
    return found, float((alone - exact).abs().max()), float(exact[0] - exact[-1])


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("llama", ["zero 1"]),
        *(
            pytest.param(n, [label for label in PAIR if label != "zero 1"], marks=pytest.mark.slow)
            for n in ("gpt2", "llama")
        ),
    ],
    ids=["llama, zero 1", "gpt2", "llama"],
)
def test_training_in_bf16_follows_float32_as_one_device_does(
    ranks: Pools, name: str, labels: list[str]
) -> None:
    for found, alone, learned in ranks(2).run(_trains, name, labels, timeout=240):
        assert list(found) == labels
        for label, mine in found.items():
            assert mine < 2 * alone + 0.01 * learned, (label, mine, alone, learned)
        assert learned > 0.5


def _autocast() -> None:
    model, sample = zoo.gpt2()
    context = torch.autocast("cpu", torch.bfloat16)
    exact = step(copy.deepcopy(model), sample)
    with context:
        alone = step(copy.deepcopy(model), sample)
    with traced_once():
        for label, plan in planned(
            model,
            sample,
            {n: PAIR[n] for n in ("data", "tensor", "microbatches", "pipeline")},
            "fp32",
        ).items():
            compiled = build(model, sample, plan=plan)
            if label == "pipeline":
                with (
                    context,
                    pytest.raises(
                        autopar.RunError, match=r"under torch.autocast, and the stages.*precision="
                    ),
                ):
                    compiled(**sample)
                continue
            with context:
                mine = step(compiled, sample)
            assert 0 < distance(mine, exact) < 2 * distance(alone, exact), label


def test_autocast_around_a_call_does_what_it_does_to_the_model(ranks: Pools) -> None:
    ranks(2).run(_autocast)


# -- the loop around it
# --------------------------------------------------------------------------------------------------


def _loop(options: dict[str, Any], path: str) -> None:
    model, sample = zoo.gpt2()
    compiled = build(model, sample, precision="bf16", **options)
    before = {n: full(t).clone() for n, t in compiled.state_dict().items()}
    for n, tensor in model.state_dict().items():
        assert torch.equal(before[n], tensor), n  # bit for bit: the cast parameters are copies
    loss_of(compiled(**sample)).backward()
    once = {n: full(p.grad).clone() for n, p in compiled.named_parameters()}
    (loss_of(compiled(**sample)) * 2).backward()
    for n, p in compiled.named_parameters():
        torch.testing.assert_close(
            full(p.grad), 3 * once[n], rtol=1e-6, atol=1e-6 * float(once[n].abs().max())
        )
    norm = autopar.clip_grad_norm_(compiled.parameters(), 0.1)
    expected = torch.stack([3 * g.norm() for g in once.values()]).norm()
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    compiled.eval()
    with torch.no_grad():
        found = compiled(**sample)
    plain = ByHand(copy.deepcopy(model).eval(), torch.bfloat16)(**sample)
    torch.testing.assert_close(found["loss"], plain["loss"].detach(), rtol=2**-8, atol=0)
    assert full(found["logits"]).dtype == torch.bfloat16
    with torch.no_grad():
        for p in compiled.parameters():
            p.mul_(0)
        assert not full(compiled(**sample)["logits"]).any(), (
            "the casts are not made again when parameters change"
        )
        compiled.load_state_dict(model.state_dict())
        assert torch.equal(compiled(**sample)["loss"], found["loss"])
        dcp.save({"model": compiled.state_dict()}, checkpoint_id=path)
        for p in compiled.parameters():
            p.mul_(0)
        state = {"model": compiled.state_dict()}
        dcp.load(state, checkpoint_id=path)
        compiled.load_state_dict(state["model"])
        assert torch.equal(compiled(**sample)["loss"], found["loss"])


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize("label", ["data", "zero 1", "zero 3", "microbatches"])
def test_accumulation_clipping_evaluation_and_checkpoints(
    ranks: Pools, label: str, tmp_path: Path
) -> None:
    ranks(2).run(_loop, PAIR[label], str(tmp_path))
