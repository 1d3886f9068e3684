"""The sources of a program's random numbers: torch's seed and the number of the call; and the
random state in a checkpoint.
"""

from __future__ import annotations

import io
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F

import autopar

WIDTH = 64


class Dropping(nn.Module):
    """Drops some of the ones that it returns, so the output shows the draw; with ``always`` in
    eval() too.
    """

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.weight, self.always = nn.Parameter(torch.ones(WIDTH)), always

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.dropout(x * self.weight, 0.5, self.training or self.always)
        return {"loss": y.sum(), "y": y}


def program(model: nn.Module | None = None, **options: Any) -> autopar.Compiled:
    # it refers to meshes of earlier tests, whose groups no longer exist
    _clear_sharding_prop_cache()
    world = dist.get_world_size()
    return autopar.compile(
        model or Dropping(), {"x": torch.ones(8, WIDTH)}, world, progress=False, **options
    )


def draw(compiled: nn.Module) -> tuple[bool, ...]:
    """The elements that a call keeps."""
    y = compiled(x=torch.ones(8, WIDTH))["y"].detach()
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    return tuple((y != 0).flatten().tolist())


def seeds(options: dict[str, Any]) -> list[tuple[bool, ...]]:
    """Programs made after seed 7, 99 and 7, on ranks that seed differently, as DDP's users do."""
    rank, found = dist.get_rank(), []
    for seed in (7, 99, 7):
        torch.manual_seed(seed + rank)
        compiled = program(**options)
        found.append(draw(compiled))
        assert compiled.random_state[1:].tolist() == [1, 0]
    one = compiled
    found += [draw(one)]
    torch.manual_seed(7 + rank)  # the same seed again: as on one device
    found += [draw(one), draw(one)]
    state = torch.get_rng_state()
    found += [draw(one)]
    torch.set_rng_state(state)
    found += [draw(one)]
    with torch.random.fork_rng(devices=[]):
        found += [draw(one)]
    found += [draw(one)]
    torch.manual_seed(5 + rank)
    found += [draw(one)]
    return found


@pytest.mark.parametrize(
    "options",
    [dict(parallel=dict(data=2)), dict(parallel=dict(data=2), micro_batch_size=2)],
    ids=["data", "parts"],
)
def test_the_seed_is_torchs_and_the_users_generator_is_followed(
    ranks: Pools, options: dict[str, Any]
) -> None:
    first, second = ranks(2).run(seeds, options)
    assert first == second  # all ranks take rank 0's seed
    a, b, again, more, a2, more2, third, third2, fourth, fourth2, other = first
    assert a == again == a2
    assert more == more2
    assert third == third2
    assert fourth == fourth2
    assert len({a, b, more, third, fourth, other}) == 6


def evaluating() -> None:
    """Evaluation does not move the draws of training; calls without gradients draw."""
    for always in (False, True):
        torch.manual_seed(3)
        compiled = program(Dropping(always))
        straight = [draw(compiled) for _ in range(3)]
        torch.manual_seed(3)
        compiled = program(Dropping(always))
        before, one = torch.get_rng_state(), draw(compiled)
        assert not torch.equal(torch.get_rng_state(), before)
        compiled.eval()
        before = torch.get_rng_state()
        with torch.no_grad():
            evaluated = [draw(compiled) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        assert len({*evaluated, *straight}) == (5 if always else 4)
        assert all(evaluated[0]) == (not always)
        compiled.train()
        with torch.no_grad():
            assert [one, draw(compiled), draw(compiled)] == straight
        assert compiled.random_state[1:].tolist() == [3, 2 * always]


def test_evaluation_does_not_move_trainings_draws(ranks: Pools) -> None:
    ranks(1).run(evaluating)


def resuming(path: str) -> None:
    """A resumed run draws the same as an uninterrupted one. State dicts have the model's keys, when
    saved and when loaded.
    """
    torch.manual_seed(11)
    first = program()
    draw(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    dcp.save({"model": first.state_dict(), "random": first.random_state}, checkpoint_id=path)
    expected = [draw(first) for _ in range(2)]
    for by_dcp in (False, True):
        torch.manual_seed(12)
        second = program()
        if by_dcp:
            state = {"model": second.state_dict(), "random": second.random_state}
            dcp.load(state, checkpoint_id=path)
            second.load_state_dict(state["model"])
            second.random_state = state["random"]
        else:
            file.seek(0)
            second.load_state_dict(torch.load(file))
        assert [draw(second) for _ in range(2)] == expected
    plain = Dropping()
    assert list(first.state_dict()) == list(plain.state_dict())
    first.load_state_dict(plain.state_dict())
    if dist.get_world_size() == 1:
        plain.load_state_dict(first.state_dict())
    with pytest.raises(autopar.RunError, match="three integers"):
        first.random_state = torch.zeros(2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_goes_on_with_its_draws(ranks: Pools, world: int) -> None:
    with tempfile.TemporaryDirectory() as path, warnings.catch_warnings():
        ranks(world).run(resuming, path)


def two_programs() -> None:
    torch.manual_seed(0)
    one, two = program(), program()
    assert draw(one) != draw(two)


def test_two_programs_draw_apart(ranks: Pools) -> None:
    ranks(2).run(two_programs)
