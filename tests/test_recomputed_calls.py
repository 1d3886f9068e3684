"""Which calls of a small program are computed again, when, and with what numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from by_hand import part_of
from towers import SOME, X, Y, counted, equal, tower

from autopar.errors import PlanError, RunError
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.pipeline import recompute
from autopar.runtime.pipeline.recompute import RecomputedOperator


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


def test_names_that_name_nothing() -> None:
    with pytest.raises(PlanError, match="2 things that the graph has not: nonsense, tanh -> S0"):
        tower(("nonsense", "tanh", "tanh -> S0"))
