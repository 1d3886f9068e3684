"""Random programs under random legal plans are what the eager model is; ``benchmarks/programs.py``
runs thousands.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from equivalence import differences, step, worst
from pool import Pools
from random_plans import TOLERANCE, Outcome, slice_of
from random_programs import program
from torch import nn

import autopar

# seeds that reach much in little time: stages, microbatches, modes, ZeRO, recomputation, frozen
# weights, Functions, outputs
SLICES = {
    1: (2, 48, 136, 216, 261, 293, 0),
    2: (1006, 1011, 1037, 1059, 1101),
}
FAILED = {  # on two ranks, before
    11: "a buffer that was changed before the backward read it",
    14: "a pipeline with a floating input that is no sample of the first stage",
    17: "a mask that was offered as a pending sum, which truth values have not: the planner's own "
    "plan was refused",
    35: "a free plan of sorted values, whose microbatches were of another size",
    123: "a pipeline whose first stage is frozen",
    382: "a stage's output that is also sent: its memory was less than none, and the planner's "
    "own plan was refused",
    1044: "every other row of a dim that is cut: the second type check refused what is right",
}


@pytest.mark.parametrize("world_size", SLICES)
def test_random_programs_are_right_or_refused(ranks: Pools, world_size: int) -> None:
    everywhere: list[list[Outcome]] = ranks(world_size).run(
        slice_of, list(SLICES[world_size]), world_size, timeout=150
    )
    found = [outcome for outcomes in everywhere for outcome in outcomes]
    assert not [o for o in found if o.kind not in ("right", "refused")]
    assert Counter(o.kind for o in found)["right"] >= len(found) * 2 / 3, [o.detail for o in found]


def test_programs_that_failed_are_right(ranks: Pools) -> None:
    everywhere: list[list[Outcome]] = ranks(2).run(slice_of, list(FAILED), 2, timeout=150)
    assert not [
        (FAILED[o.seed], o) for outcomes in everywhere for o in outcomes if o.kind != "right"
    ]


def test_a_seed_gives_one_program() -> None:
    (first, batches), (second, others) = program(7), program(7)
    assert repr(first) == repr(second)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert all(
        torch.equal(batch[name], other[name])
        for batch, other in zip(batches, others, strict=True)
        for name in batch
    )
    assert not torch.equal(batches[0]["x"], batches[1]["x"])


class Fading(nn.Module):
    """A buffer that is read with a gradient and changed after."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w * self.scale.clone()
        self.scale.mul_(0.5)
        return y.square().mean()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_buffer_may_change_after_the_backward_needs_it(ranks: Pools, recompute: str) -> None:
    assert max(ranks(1).run(fading, recompute)) < (TOLERANCE, "")


def fading(recompute: str) -> tuple[float, str]:
    """The worst error of two steps; a rank's work."""
    model, sample = Fading(), {"x": torch.arange(32.0, dtype=torch.float64).view(8, 4)}
    compiled = autopar.compile(copy.deepcopy(model), sample, 1, recompute=recompute, progress=False)
    errors = []
    for _ in range(2):
        errors.append(worst(differences(step(compiled, sample), step(model, sample))))
        for trained in (model, compiled):
            trained.zero_grad()
    return max(errors)
