"""Programs compiled by inductor compute what they compute eagerly, dropout included, and are
compiled once. Outputs besides the loss have no gradients. That the eager program is that of one
device: test_equivalence.py.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import equivalence
import pytest
import random_plans
import torch
import torch.distributed as dist
import zoo
from program_parts import Counter
from torch import nn

import autopar
from autopar.runtime.communication import functional
from autopar.runtime.compilation.inductor_fixes import right_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RATE = 0.2


def both(
    made: zoo.Made, world: int, folder: Path, **options: Any
) -> tuple[autopar.Plan, list[Any]]:
    """The program of one plan, eager and compiled."""
    # Ranks share what inductor caches, and start no processes that would outlive the test.
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder), TORCHINDUCTOR_COMPILE_THREADS="1")
    warnings.filterwarnings("ignore", module="torch")  # of its own parts
    model, sample = made
    plan = autopar.plan(model, sample, world, progress=False, **options)
    return plan, [
        autopar.compile(
            copy.deepcopy(model),
            sample,
            world,
            plan=dataclasses.replace(
                plan,
                backend=backend,
                options=plan.options | {"backend": backend},
            ),
            progress=False,
        )
        for backend in ("eager", "inductor")
    ]


def train(program: nn.Module, sample: Any, steps: int = 3) -> list[equivalence.Step]:
    """A few steps with the same random numbers, whatever was drawn before."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    done = []
    for _ in range(steps):
        optimizer.zero_grad()
        made = equivalence.step(program, sample)
        gradients = {n: None if g is None else g.clone() for n, g in made.gradients.items()}
        done.append(dataclasses.replace(made, gradients=gradients))
        optimizer.step()
    return done


def compilations(program: Any) -> int:
    return program._backend.compilations


def worst(found: list[equivalence.Step], expected: list[equivalence.Step]) -> tuple[float, str]:
    return max(
        equivalence.worst(equivalence.differences(mine, other))
        for mine, other in zip(found, expected, strict=True)
    )


def test_one_rank(tmp_path: Path, ranks: Any) -> None:
    ranks(1).run(one_rank, tmp_path, timeout=900)


def one_rank(folder: Path) -> None:
    model, sample = zoo.mlp(dtype=torch.float64, dropout=RATE)
    _, (eager, compiled) = both((model, sample), 1, folder, micro_batch_size=4, recompute="full")
    expected = train(eager, sample)
    assert worst(train(compiled, sample), expected) < (1e-12, "")
    counted = dict(torch._dynamo.utils.counters["aot_autograd"])
    assert compilations(compiled) == 1
    torch.manual_seed(4)
    assert abs(equivalence.step(compiled, sample).outputs["loss"] - expected[0].outputs["loss"]) > 0
    assert dict(torch._dynamo.utils.counters["aot_autograd"]) == counted
    # Another set of trained parameters, and evaluation, are other programs: once each.
    for program in (eager, compiled):
        next(iter(program.parameters())).requires_grad_(False)
    assert worst(train(compiled, sample, 2), train(eager, sample, 2)) < (1e-12, "")
    assert compilations(compiled) == 2
    with torch.no_grad():
        losses = [equivalence.loss_of(p.eval()(**sample)) for p in (eager, compiled, compiled)]
    assert torch.allclose(*losses[:2], rtol=1e-12)
    assert compilations(compiled) == 3


@pytest.mark.parametrize("world", [1, 2])
def test_retained_graphs(world: int, tmp_path: Path, ranks: Any) -> None:
    ranks(world).run(retained_graphs, tmp_path, timeout=900)


def retained_graphs(folder: Path) -> None:
    made, world = zoo.mlp(dtype=torch.float64), dist.get_world_size()
    with equivalence.Double():
        _, programs = both(made, world, folder, parallel=dict(data=world), zero=0)
        for program in programs:
            loss = equivalence.loss_of(program(**made[1]))
            loss.backward(retain_graph=True)
            loss.backward()
    for eager, compiled in zip(*(p.parameters() for p in programs), strict=True):
        assert torch.allclose(equivalence.full(eager.grad), equivalence.full(compiled.grad))


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "zero=3": dict(parallel=dict(data=2), zero=3, recompute="full", micro_batch_size=2),
    "1d": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "1f1b": dict(parallel=dict(pipeline=2), schedule="1f1b", micro_batch_size=2),
}


def test_two_ranks(tmp_path: Path, ranks: Any) -> None:
    ranks(2).run(two_ranks, tmp_path, timeout=1100)


def two_ranks(folder: Path) -> None:
    made = zoo.gpt2(dtype=torch.float64, dropout=RATE, layers=1)
    for label, options in CONFIGURATIONS.items():
        with equivalence.Double():
            plan, (eager, compiled) = both(made, dist.get_world_size(), folder, **options)
            assert label not in ("zero=3",) or any(" -> " in name for name in plan.recomputed)
            expected = train(eager, made[1], 2)
            error = worst(train(compiled, made[1], 2), expected)
        assert error < (1e-9, ""), label
        # Before the block, the block, and after it; a stage is on a mesh of one rank here.
        assert compilations(compiled) == (1 if label == "1f1b" else 3), label


class NextToken(nn.Module):
    """The cross entropy of each next token; the last one of a row has none."""

    VOCABULARY = 1024

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, 16)
        self.head = nn.Linear(16, self.VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        following = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def test_the_loss_of_a_vocabulary_that_is_cut(tmp_path: Path, ranks: Any) -> None:
    ranks(2).run(next_token, tmp_path, timeout=300)


def next_token(folder: Path) -> None:
    torch.manual_seed(0)
    model, sample = NextToken(), torch.randint(NextToken.VOCABULARY, (8, 128))
    expected = model(sample)
    parallel = dict(tensor=dict(size=2, mode="1d"))
    plan, (_, compiled) = both((model, sample), 2, folder, parallel=parallel, recompute="none")
    assert str(plan.nodes["linear"].out[0]) == "S2"
    torch.testing.assert_close(equivalence.loss_of(compiled(sample)), expected)


# Programs that torch 2.13 compiles to wrong gradients, or to other collectives on each rank: equal
# results, zeros in a backward, and a buffer that is too small.
@pytest.mark.parametrize("seed", [20, 137, 193])
def test_random_programs(seed: int, tmp_path: Path, ranks: Any) -> None:
    ranks(2).run(random_program, tmp_path, seed, timeout=300)


def random_program(folder: Path, seed: int) -> None:
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder), TORCHINDUCTOR_COMPILE_THREADS="1")
    (job,) = random_plans.planned([seed], 2, 0, 1, "inductor")
    outcome = job.outcome or random_plans.checked(job, 2)
    assert outcome.kind == "right", outcome.detail


class Counted(nn.Module):
    """What its backward reads of a buffer is changed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.counter, self.last = nn.Linear(8, 8), Counter(8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.counter(self.first(self.norm(x)))).square().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_buffer_that_changes(world: int, tmp_path: Path, ranks: Any) -> None:
    for options in ({}, dict(micro_batch_size=2)):  # of which each updates the statistics
        ranks(world).run(changing, tmp_path, options, timeout=600)


def changing(folder: Path, options: dict[str, Any]) -> None:
    made = Counted(), {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    _, (eager, compiled) = both(made, dist.get_world_size(), folder, **options)
    assert worst(train(compiled, made[1]), train(eager, made[1])) < (1e-5, "")
    for name, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name), msg=name)
    assert compilations(compiled) <= 3


def test_bools_stay_bools(tmp_path: Path, ranks: Any) -> None:
    ranks(2).run(bools, tmp_path, timeout=300)


def bools(folder: Path) -> None:
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder), TORCHINDUCTOR_COMPILE_THREADS="1")
    warnings.filterwarnings("ignore", module="torch")  # of its own parts
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def gathered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = functional.wait_tensor(functional.all_gather_into_tensor(x > 0, 2, group))
        turned = functional.wait_tensor(functional.all_to_all_single(x < 0, [1, 1], [1, 1], group))
        return found, turned

    x = torch.tensor([[1.0, -1.0, 2.0], [-1.0, 3.0, -2.0]]) * (1 - 2 * dist.get_rank())
    expected = torch.cat([x > 0, x < 0] if dist.get_rank() == 0 else [x < 0, x > 0])
    for function in (gathered, torch.compile(gathered)):
        with right_code():
            whole, turned = function(x)
        assert whole.dtype is turned.dtype is torch.bool
        assert torch.equal(whole, expected)
        assert turned[dist.get_rank()].equal(x[dist.get_rank()] < 0)


class Heads(nn.Module):
    """A head that the loss depends on, and heads that are only returned, of the first and of the
    last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head, self.early, self.late = nn.Linear(16, 1), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        early = self.first(x).relu()
        late = self.last(early).relu()
        y = self.head(late)
        return {
            "loss": y.square().mean(),
            "y": y,
            "early": self.early(early),
            "late": self.late(late),
        }


def heads() -> zoo.Made:
    torch.manual_seed(0)
    return Heads(), {"x": torch.randn(8, 8)}


def test_parameters_of_other_outputs_have_no_gradient(tmp_path: Path, ranks: Any) -> None:
    ranks(1).run(other_outputs, tmp_path, {}, timeout=600)
    for options in (dict(parallel=dict(data=2)), CONFIGURATIONS["1f1b"]):
        ranks(2).run(other_outputs, tmp_path, options, timeout=600)


def other_outputs(folder: Path, options: dict[str, Any]) -> None:
    model, sample = heads()
    model(**sample)["loss"].backward()
    _, programs = both(heads(), dist.get_world_size(), folder, zero=0, **options)
    for program in programs:
        out = program(**sample)
        assert all(each.requires_grad for each in out.values())
        out["loss"].backward()
        for name, p in program.named_parameters():
            expected = model.get_parameter(name).grad
            assert (p.grad is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(equivalence.full(p.grad), expected)
    for output in ("y", "early", "late"):
        with pytest.raises(autopar.RunError, match="a gradient came back through an output that"):
            programs[1](**sample)[output].to_local().sum().backward()
