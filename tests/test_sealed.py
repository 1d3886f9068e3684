"""Uses of a compiled model beside training: hooks, attributes, new parts, copies, torch.compile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar

DATA = dict(parallel=dict(data=2), zero=0)
ZERO = dict(parallel=dict(data=2), zero=2)
PIPED = dict(parallel=dict(pipeline=2), micro_batch_size=8, schedule="gpipe")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Network(nn.Module):
    gain = 3.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.bn, self.dropout, self.head = (
            Block(),
            nn.BatchNorm1d(8, momentum=0.3),
            nn.Dropout(0.0),
            nn.Linear(8, 8),
        )
        self.beta = 4.0
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.dropout(self.bn(self.block(x)).tanh())) * self.beta * self.gain
        return {"loss": y.square().mean(), "y": y}


def sample(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    }


def build(model: nn.Module | None = None, **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds process groups of earlier tests
    return autopar.compile(
        model or Network(), sample(), dist.get_world_size(), progress=False, **options
    )


REFUSED: dict[str, Callable[[Any], Any]] = {
    r"compiled\.beta cannot be set.*value that beta had when": lambda c: setattr(c, "beta", 5.0),
    r"compiled\.gain cannot be set": lambda c: setattr(c, "gain", 5.0),
    r"compiled\.block\.scale cannot be set": lambda c: setattr(c.block, "scale", 5.0),
    r"compiled\.dropout\.p cannot be set": lambda c: setattr(c.dropout, "p", 0.5),
    r"compiled\.bn\.momentum cannot be set": lambda c: setattr(c.bn, "momentum", 0.2),
    r"compiled\.bn\.eps cannot be set": lambda c: setattr(c.bn, "eps", 0.2),
    r"compiled\.bn\.running_mean cannot be set.*copy_": lambda c: setattr(
        c.bn, "running_mean", torch.zeros(8)
    ),
    r"compiled\.a cannot be set, replaced or deleted": lambda c: setattr(c, "a", nn.Linear(2, 2)),
    r"compiled\.head cannot be set": lambda c: setattr(c, "head", nn.Linear(8, 8)),
    r"compiled\.head\.weight cannot be set": lambda c: setattr(
        c.head, "weight", nn.Parameter(torch.zeros(8, 8))
    ),
    r"compiled\.block\.extra cannot be set": lambda c: c.block.register_parameter(
        "extra", nn.Parameter(torch.zeros(8))
    ),
    r"compiled\.extra cannot be set": lambda c: c.register_buffer("extra", torch.zeros(8)),
    r"compiled\.dropout cannot be set, replaced or deleted": lambda c: delattr(c, "dropout"),
    r"compiled\.head\.weight cannot": lambda c: parametrize.register_parametrization(
        c.head, "weight", nn.Identity()
    ),
    r"compiled\.block\.register_forward_hook.*before compiling": lambda c: (
        c.block.register_forward_hook(print)
    ),
    r"compiled\.bn\.register_forward_pre_hook": lambda c: c.bn.register_forward_pre_hook(print),
    r"compiled\.block\.linear\.register_full_backward_hook": lambda c: (
        c.block.linear.register_full_backward_hook(print)
    ),
    r"stays torch\.float64 on cpu, asked for torch\.float32": lambda c: c.head.float(),
    r"cannot be pickled: save its state_dict": pickle.dumps,
}


def refuses() -> None:
    compiled = build()
    before = compiled(**sample())["loss"].item()
    for message, action in REFUSED.items():
        with pytest.raises(autopar.RunError, match=message):
            action(compiled)
    # Attributes that no forward reads.
    compiled.notes, compiled.block.notes, compiled.head.notes = 1, 2, 3
    compiled.bn.train(), compiled.requires_grad_(True), compiled.head.double()
    assert (type(compiled.head), type(compiled.bn), type(compiled.dropout)) == (
        nn.Linear,
        nn.BatchNorm1d,
        nn.Dropout,
    )
    assert not hasattr(compiled, "nothing")
    assert not hasattr(compiled.block, "nothing")
    assert compiled.bn.momentum == 0.3
    compiled.bn.reset_running_stats()
    assert compiled(**sample())["loss"].item() == before


def test_what_has_no_effect_is_refused(ranks: Pools) -> None:
    ranks(1).run(refuses)


def hooks() -> None:
    """On the compiled model itself hooks work as on a module."""
    model, seen = Network(), []
    compiled = build(model)
    for m in (model, compiled):
        handles = [
            m.register_forward_pre_hook(
                lambda _, a, k: seen.append("before") or (a, {"x": k["x"] * 2}), with_kwargs=True
            ),
            m.register_forward_hook(
                lambda _, a, out: seen.append("after") or {"loss": out["loss"] * 3}
            ),
        ]
        m(**sample())["loss"].backward()
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after"] * 2
    for (name, p), (_, q) in zip(
        model.named_parameters(), compiled.named_parameters(), strict=True
    ):
        torch.testing.assert_close(full(q.grad), p.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_hooks_on_the_compiled_model_run(ranks: Pools) -> None:
    ranks(2).run(hooks)


def trains(model: Any, average: Any, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in steps:
        model(**sample(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)


def copies(options: dict[str, Any]) -> None:
    """A moving average of a compiled model, and a copy that trains by itself, compared with the
    plain model's.
    """
    model = Network()
    compiled = build(copy.deepcopy(model), **options)
    compiled.notes = ["mine"]
    for multi in (get_ema_multi_avg_fn(0.5), None):
        mine, theirs = (
            AveragedModel(compiled, multi_avg_fn=multi),
            AveragedModel(model, multi_avg_fn=multi),
        )
        trains(compiled, mine, range(3)), trains(model, theirs, range(3))
        found, expected = (m.eval()(**sample(9))["loss"].item() for m in (mine, theirs))
        assert found == pytest.approx(expected, rel=1e-9)
    other, plain = copy.deepcopy(compiled), copy.deepcopy(model)
    assert other.notes == ["mine"]
    assert other.notes is not compiled.notes
    trains(other, None, range(3, 6)), trains(plain, None, range(3, 6))
    for m, expected in ((other, plain), (compiled, model)):
        state = expected.state_dict()
        for name, value in m.state_dict().items():
            torch.testing.assert_close(full(value), state[name], rtol=1e-9, atol=1e-12, msg=name)
    compiled.check_replicas()


@pytest.mark.parametrize("options", [DATA, ZERO, PIPED], ids=["data", "zero", "piped"])
def test_copies_and_averages(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(copies, options)


def torch_compiled() -> None:
    compiled = build(**DATA)
    expected = compiled(**sample())["loss"]
    found = torch.compile(compiled, backend="eager")(**sample())["loss"]
    assert found.item() == expected.item()
    found.backward()
    assert all(p.grad is not None for p in compiled.parameters())


def test_torch_compile_leaves_the_program_alone(ranks: Pools) -> None:
    ranks(2).run(torch_compiled)


def replicas(options: dict[str, Any]) -> None:
    rank, compiled = dist.get_rank(), build(**options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    compiled(**sample())["loss"].backward()
    optimizer.step()
    compiled.check_replicas(optimizer)
    first = next(iter(optimizer.state))
    moment = optimizer.state[first]["exp_avg"]
    with torch.no_grad():
        if rank == 1:
            compiled.bn.running_mean[0] += 0.25
            compiled.head.bias.to_local()[:1] += 0.5
            moment.to_local().view(-1)[:1] += 0.125
            optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(autopar.RunError) as error:
        compiled.check_replicas(optimizer)
    message = str(error.value)
    assert "bn.running_mean on rank 1 is not that on rank 0 (largest difference 0.25" in message
    assert "the settings of the optimizer's group 0 on rank 1" in message
    if options["zero"] == 0:  # otherwise each rank has a shard
        assert "head.bias on rank 1 is not that on rank 0 (largest difference 0.5" in message
        assert (
            "exp_avg of block.linear.weight on rank 1 is not that on rank 0 (largest difference "
            "0.125" in message
        )
    else:
        assert "head.bias" not in message


@pytest.mark.parametrize("options", [DATA, ZERO], ids=["data", "zero"])
def test_check_replicas_names_what_differs(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(replicas, options)
