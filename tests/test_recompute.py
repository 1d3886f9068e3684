"""Recomputation changes no number, and no call is computed again without need."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import small_graphs
import staged
import torch
import zoo
from by_hand import calls, compiled, one_device, part_of
from equivalence import compare, loss_of, traced_once, worst
from pool import Pools
from torch import fx, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
import autopar.api
from autopar.api import _check_types
from autopar.errors import PlanError, RunError
from autopar.frontend import traced_model as tracing
from autopar.passes.lowering.lower import lower
from autopar.passes.lowering.mark_recomputed import recomputable
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.pipeline import recompute, recomputed_call
from autopar.runtime.pipeline.recompute import RecomputedOperator

Numbers = dict[str, torch.Tensor]


def numbers(program: nn.Module, sample: dict[str, Any], steps: int = 1) -> Numbers:
    """Loss, gradients and buffers after ``steps`` steps, with the random numbers of one seed."""
    torch.manual_seed(0)
    for _ in range(steps):
        loss = loss_of(program(**sample))
        loss.backward()
    gradients = {f"{n}.grad": p.grad for n, p in program.named_parameters() if p.grad is not None}
    found = {"loss": loss.detach(), **gradients, **dict(program.named_buffers())}
    return {name: getattr(value, "_local_tensor", value).clone() for name, value in found.items()}


def same(found: Numbers, expected: Numbers) -> bool:
    """Whether all tensors are equal bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def shares(names: list[str]) -> list[tuple[str, ...]]:
    """All names, and random parts of them."""
    return [
        tuple(names),
        *(part_of(names, share, seed) for seed, share in enumerate((0.3, 0.6, 0.9))),
    ]


# -- whole models


def on_one_rank(name: str, microbatches: int) -> list[bool]:
    model, sample = getattr(zoo, name)(dropout=0.1)
    analysis, prologue = tracing.TracedModel(model, sample, None).analyse(microbatches)

    def run(recomputed: tuple[str, ...]) -> Numbers:
        plan = one_device(analysis, microbatches=microbatches, recomputed=recomputed)
        program = compiled(analysis, plan, copy.deepcopy(model), prologue=copy.deepcopy(prologue))
        return numbers(program, sample, steps=2)

    expected = run(())
    return [same(run(recomputed), expected) for recomputed in shares(calls(analysis))]


@pytest.mark.parametrize(
    "name",
    ["gpt2", "cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama"))],
)
def test_the_same_numbers(ranks: Pools, name: str) -> None:
    assert all(ranks(1).run(on_one_rank, name, 1)[0])


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_the_same_numbers_in_microbatches(ranks: Pools, name: str) -> None:
    assert all(ranks(1).run(on_one_rank, name, 2)[0])


def on_several(name: str, sizes: tuple[int, ...], seeds: list[int]) -> list[tuple[bool, float]]:
    """For each seed: whether recomputation leaves the numbers of a random plan as they are, and
    their error against one device.
    """
    _clear_sharding_prop_cache()
    model, sample = small_graphs.make(name)
    analysis = small_graphs.analyse(model, sample)
    space, mesh = small_graphs.Space(analysis, sizes), Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = []
    for seed in seeds:
        plan = space.plan(space.random(seed))
        expected = numbers(compiled(analysis, plan, model, mesh), sample)
        names = sorted(set(recomputable(lower(analysis, plan).train.graph).values()))
        plan = dataclasses.replace(plan, recomputed=shares(names)[seed % 4])
        _check_types(analysis, lower(analysis, plan), mesh)
        alike = same(numbers(compiled(analysis, plan, model, mesh), sample), expected)
        found.append(
            (
                alike,
                worst(compare(copy.deepcopy(model), sample, compiled(analysis, plan, model, mesh)))[
                    0
                ],
            )
        )
    return found


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_random_plans(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    for found in ranks(math.prod(sizes)).run(on_several, name, sizes, list(range(3))):
        assert all(alike and error < 1e-9 for alike, error in found), found


def sharded(name: str, options: dict[str, Any]) -> list[bool]:
    _clear_sharding_prop_cache()
    model, sample = getattr(zoo, name)(dropout=0.1)
    plan = autopar.plan(model, sample, 2, progress=False, **options)
    analysis, prologue = tracing.TracedModel(model, sample, None).analyse(plan.microbatches)

    def run(recomputed: tuple[str, ...]) -> Numbers:
        given = dataclasses.replace(plan, recomputed=recomputed)
        return numbers(
            compiled(analysis, given, model, prologue=copy.deepcopy(prologue)), sample, steps=2
        )

    names = sorted(
        set(recomputable(lower(analysis, plan, copy.deepcopy(prologue)).train.graph).values())
    )
    expected = run(())
    return [same(run(recomputed), expected) for recomputed in shares(names)]


TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", TENSOR), ("mlp", dict(parallel=dict(data=2), zero=2, micro_batch_size=2))],
)
def test_sharded(ranks: Pools, name: str, options: dict[str, Any]) -> None:
    assert all(all(found) for found in ranks(2).run(sharded, name, options))


def pipelined(name: str, schedules: list[tuple[str, int]]) -> list[bool]:
    _clear_sharding_prop_cache()
    model, sample = getattr(zoo, name)(dropout=0.1)
    found = []
    with traced_once():
        analysis = autopar.frontend.traced_model.TracedModel(model, sample, None).analyse(4)[0]
        names = calls(analysis)
        for schedule, chunks in schedules:
            starts = staged.even_starts(analysis.captured, 2 * chunks)
            plan = staged.cut_plan(
                one_device(analysis, microbatches=4), analysis.captured, starts, 2, schedule
            )
            programs = [autopar.compile(model, sample, 2, plan=plan)]
            for recomputed in (tuple(names), part_of(names, 0.6, 0)):
                programs.append(
                    autopar.compile(
                        model, sample, 2, plan=dataclasses.replace(plan, recomputed=recomputed)
                    )
                )
            expected, *others = (numbers(program, sample, steps=2) for program in programs)
            found += [same(other, expected) for other in others]
    return found


SCHEDULES = [("1f1b", 1), ("zero-bubble", 1)]


@pytest.mark.parametrize("name", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_in_a_pipeline(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(pipelined, name, SCHEDULES, timeout=150):
        assert all(found), found


# -- the mechanism, on small programs


class Tower(nn.Module):
    """Products, statistics, views, a tensor with many readers, dropout and batch norm."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.norm, self.batch, self.drop = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            y = torch.tanh(layer(self.norm(h)))
            h = h + self.drop(y * y.exp()).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return (self.batch(h) * h).square().mean()


@dataclasses.dataclass
class Program:
    """A lowered program that needs no process group, and its leaves."""

    module: fx.GraphModule
    state: list[torch.Tensor]
    random_streams: RandomStreams

    def __call__(self, x: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        self.random_streams.microbatch = microbatch
        mesh: Any = SimpleNamespace(
            random_streams=self.random_streams, index=lambda axes: 0, count=lambda axes: 1
        )
        return recompute.run(self.module, mesh, [*self.state, x])[0]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self.state if t.requires_grad]

    def gradients(self) -> list[torch.Tensor]:
        found = [t.grad for t in self.leaves]
        for t in self.leaves:
            t.grad = None
        return found  # type: ignore[return-value]


def tower(recomputed: Any = (), layers: int = 2) -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tower(layers).double()
    analysis = small_graphs.analyse(model, X)
    names = calls(analysis)
    plan = one_device(
        analysis, recomputed=recomputed(names) if callable(recomputed) else recomputed
    )
    lowered = lower(analysis, plan)
    return Program(
        lowered.train, [analysis.captured.state[name] for name in lowered.state], RandomStreams(0)
    )


X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SOME = [
    tuple,
    lambda names: part_of(names, 0.5, 0),
    lambda names: part_of(names, 0.5, 1),
    lambda names: part_of(names, 0.8, 2),
]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("recomputed", SOME)
def test_several_forwards_are_alive_at_once(recomputed: Any) -> None:
    """As in a pipeline, backwards run in another order than forwards. Each backward takes the
    random numbers of its own forward.
    """
    expected = []
    for program in (tower(), tower(recomputed)):
        losses = [program(x, microbatch) for microbatch, x in enumerate((X, Y, X))]
        assert losses[0] != losses[2]  # dropout
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        expected.append(program.gradients())
        assert program.random_streams.microbatch == 2
    assert equal(*expected)


@pytest.mark.parametrize("recomputed", SOME)
def test_backward_twice(recomputed: Any) -> None:
    plain, program = tower(), tower(recomputed)
    losses = plain(X), program(X)
    for loss in losses:
        loss.backward(retain_graph=True)
    once = plain.gradients()
    assert equal(program.gradients(), once)
    for loss in losses:
        loss.backward()
    assert equal(plain.gradients(), once)
    assert equal(program.gradients(), once)
    with pytest.raises(RuntimeError, match="second time"):
        losses[1].backward()


@pytest.mark.parametrize("recomputed", SOME)
def test_split_backward(recomputed: Any) -> None:
    """As in zero-bubble schedules, the gradient of the input comes first, and the gradients of the
    parameters later. No call runs a third time.
    """
    results = []
    for program in (tower(), tower(recomputed)):
        x = X.clone().requires_grad_()
        loss = program(x)
        with counted() as made:
            (first,) = torch.autograd.grad(loss, x, retain_graph=True)
            second = torch.autograd.grad(loss, program.leaves)
        assert len(made) == len(set(made))
        results.append([first, *second])
    assert equal(*results)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of the calls that are recomputed within this context."""
    made: list[int] = []
    make = recomputed_call.RecomputedCall.make

    def noted(call: Any) -> None:
        made.append(call.number)
        make(call)

    with mock.patch.object(recomputed_call.RecomputedCall, "make", noted):
        yield made


def test_nothing_recomputed_costs_nothing() -> None:
    program = tower()
    assert not any(
        isinstance(node.target, RecomputedOperator) for node in program.module.graph.nodes
    )
    with mock.patch.object(recompute, "saved_tensors_hooks", side_effect=AssertionError):
        program(X).backward()


def test_without_gradients_nothing_is_noted() -> None:
    program = tower(tuple)
    with (
        torch.no_grad(),
        mock.patch.object(recompute, "saved_tensors_hooks", side_effect=AssertionError),
    ):
        loss = program(X)
    assert loss == tower()(X)


def test_only_what_is_read_is_made_again() -> None:
    program = tower(tuple)
    loss = program(X)
    with counted() as made:
        loss.backward()
    assert len(made) == len(set(made))
    # Nothing reads the last sums.
    assert (
        0
        < len(made)
        < sum(isinstance(node.target, RecomputedOperator) for node in program.module.graph.nodes)
    )


def test_statistics_are_updated_once() -> None:
    plain, program = tower(), tower(tuple)
    for p in (plain, program):
        p(X).backward()
    before, after = [[t for t in p.state if not t.requires_grad] for p in (plain, program)]
    assert len(after) > 1
    assert equal(after, before)


def test_a_long_chain_is_no_recursion() -> None:
    program = tower(tuple, layers=50)
    loss = program(X)
    loss.backward()
    plain = tower(layers=50)
    plain(X).backward()
    assert equal(program.gradients(), plain.gradients())


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    program = tower(lambda names: part_of(names, 0.5, 0))
    with LiveBytes() as live:
        loss = program(X)
        assert live.alive() > 1000
        del loss
        assert live.alive() == 0


def test_memory_goes_as_the_backward_goes() -> None:
    """Recomputing all but the output of every fourth layer takes less than half of the memory, in
    the backward, too.
    """
    layers = 24
    peaks = []
    for program in (tower(layers=layers), tower(_between, layers=layers)):
        with LiveBytes() as live:
            loss = program(X)
            loss.backward()
        program.gradients()
        peaks.append(live.peak)
    assert peaks[1] < 0.5 * peaks[0]


def _between(names: list[str]) -> list[str]:
    """All names except the sum at the end of every fourth layer."""
    sums = [name for name in names if name.startswith("add")]
    return [name for name in names if name not in sums[3::4]]


def test_a_parameter_that_changes_in_between_is_an_error() -> None:
    program = tower(tuple)
    loss = program(X)
    with torch.no_grad():
        program.leaves[0].add_(1.0)
    with pytest.raises(RunError, match="changed in place"):
        loss.backward()


def test_gathered_parameters_come_and_go() -> None:
    """A recomputed call does not hold the memory of gathered parameters. The backward reads them
    where they are then.
    """
    plain, program = tower(), tower(tuple)
    plain(X).backward()
    loss = program(X)
    values = [leaf.detach().clone() for leaf in program.leaves]
    for leaf in program.leaves:
        leaf.data = torch.empty(0, dtype=torch.float64)
    for leaf, value in zip(program.leaves, values, strict=True):
        leaf.data = value
    loss.backward()
    assert equal(program.gradients(), plain.gradients())


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_under_autocast() -> None:
    results = []
    for program in (tower(), tower(tuple)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = program(X.float().double())
        loss.backward()
        results.append(program.gradients())
    assert equal(*results)


class Results(nn.Module):
    """Operators with several results, complex numbers, and a buffer that the forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w + self.mean
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        values, places = h.exp().topk(3, -1)
        spectrum = torch.fft.rfft(h.sin(), dim=-1)
        spectrum = spectrum * spectrum.conj() + spectrum.exp()
        return (
            values.square().mean() + (h.gather(-1, places) * values).sum() + spectrum.abs().mean()
        )


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_several_results_complex_numbers_and_replaced_buffers(ranks: Pools, share: float) -> None:
    expected, found = ranks(1).run(replaced, share)[0]
    assert same(found, expected)


def replaced(share: float) -> tuple[Numbers, Numbers]:
    torch.manual_seed(0)
    model = Results()
    analysis = small_graphs.analyse(model, {"x": X})
    plans = (
        one_device(analysis),
        one_device(analysis, recomputed=part_of(calls(analysis), share, 3)),
    )
    expected, found = (
        numbers(compiled(analysis, plan, copy.deepcopy(model)), {"x": X}, steps=2) for plan in plans
    )
    return expected, found


def test_names_that_name_nothing() -> None:
    with pytest.raises(PlanError, match="2 things that the graph has not: nonsense, tanh -> S0"):
        tower(("nonsense", "tanh", "tanh -> S0"))
