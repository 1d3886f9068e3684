"""A run goes on from a checkpoint: to the bit under the same plan, and as on one device under any
other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointed import RANKS, Batches, Language, Run, compiled_under
from pool import Pools

STEPS = 2  # before the checkpoint, and after it


def _drawn() -> tuple[float, float, float]:
    """What the loop of a user may draw."""
    return torch.rand(()).item(), random.random(), np.random.random()


def _resumes(label: str, folder: str) -> None:
    torch.manual_seed(3)
    straight = Run(compiled_under(label))
    straight.steps(STEPS)
    straight.model.save(f"{folder}/step-2", **straight.parts(), extra={"step": STEPS, "a": (1.5,)})
    expected, drawn = straight.steps(STEPS), _drawn()
    straight.model.finish_save()
    torch.manual_seed(99)
    resumed = Run(compiled_under(label, scale=2.0))
    assert resumed.model.load(folder, **resumed.parts()) == {"step": STEPS, "a": (1.5,)}
    assert resumed.steps(STEPS) == expected
    assert _drawn() == drawn
    pairs = zip(resumed.local_tensors(), straight.local_tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert resumed.scheduler.state_dict() == straight.scheduler.state_dict()


@pytest.mark.parametrize(
    "label",
    ["local", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zero", "tensor", "pipeline"))],
)
def test_a_run_resumes_to_the_bit(ranks: Pools, tmp_path: Path, label: str) -> None:
    ranks(2).run(_resumes, label, str(tmp_path))


def _begin(label: str, path: str) -> None:
    run = Run(compiled_under(label, dropout=0.0))
    run.steps(STEPS)
    run.model.save(path, **run.parts(), wait=True)


def _go_on(label: str, path: str, to: str) -> list[float]:
    run = Run(compiled_under(label, dropout=0.0, scale=2.0))
    run.model.load(path, **run.parts())
    run.model.save(to, **run.parts(), wait=True)
    return run.steps(STEPS)


def _chain(pools: Pools, tmp_path: Path, *labels: str) -> None:
    """Each plan of the chain loads what the one before it saved."""
    device = Run(Language(dropout=0.0))
    device.steps(STEPS)
    expected = pytest.approx(device.steps(STEPS), rel=1e-9)
    path = tmp_path / labels[0]
    pools(RANKS.get(labels[0], 2)).run(_begin, labels[0], str(path))
    for label in labels[1:]:
        to = tmp_path / f"{path.name}, {label}"
        for losses in pools(RANKS.get(label, 2)).run(_go_on, label, str(path), str(to)):
            assert losses == expected
        path = to


def test_another_plan_goes_on_as_one_device(ranks: Pools, tmp_path: Path) -> None:
    _chain(ranks, tmp_path, "zero", "pipeline")


@pytest.mark.slow
def test_many_plans_go_on_as_one_device(ranks: Pools, tmp_path: Path) -> None:
    _chain(ranks, tmp_path, "pipeline", "tensor", "grid", "zero 3", "alone", "grid", "zero")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "lbfgs": partial(torch.optim.LBFGS, max_iter=3),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
}


def _optimizers_resume(label: str, folder: str) -> None:
    model = compiled_under(label, dropout=0.0)

    def steps(optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = model(batch)
            found.backward()
            return found

        losses = []
        for seed in range(first, first + STEPS):
            batch = Batches(seed)()
            losses.append(optimizer.step(loss).item())
        return losses

    for name, make in OPTIMIZERS.items():
        optimizer = make(model.parameters())
        steps(optimizer, 0)
        model.save(f"{folder}/{name}", optimizer=optimizer, wait=True)
        expected = steps(optimizer, STEPS)
        fresh = make(model.parameters())
        model.load(f"{folder}/{name}", optimizer=fresh)
        assert steps(fresh, STEPS) == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("label", ["data", "zero", "alone"])
def test_optimizers_resume_to_the_bit(ranks: Pools, tmp_path: Path, label: str) -> None:
    ranks(RANKS.get(label, 2)).run(_optimizers_resume, label, str(tmp_path))
