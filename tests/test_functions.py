"""A ``torch.autograd.Function`` in a forward is one operator, with the backward that its author
wrote.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import equivalence
import pytest
import torch
import torch.nn.functional as F
from autograd_functions import Cube, Net, Noisy, Reverse, Setup, Several, reverse
from pool import Pools
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.layout import I
from autopar.rules import OperatorCall, Rule, register_rule, registry
from autopar.runtime.kernels import graph_kernels


def reversed_twice(net: Net, h: torch.Tensor) -> torch.Tensor:
    return reverse(h, 0.5) + F.relu(Reverse.apply(h * net.scale, 2.0))


def several(net: Net, h: torch.Tensor) -> torch.Tensor:
    first, second, best, noted = Several.apply(h, net.scale, [net.scale * 2, h], "sin")
    return first + second * F.one_hot(best, 8) + noted


def frozen(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight = Reverse.apply(h, 3.0)
    return Setup.apply(h) * weight + Setup.apply(h, 3)


def wrapped(net: Net, h: torch.Tensor) -> torch.Tensor:
    return Cube.apply(h) + functools.reduce(
        torch.add, [Reverse.apply(part, 2.0) for part in (h, h.sin())]
    )


BETWEEN = {f.__name__: f for f in (reversed_twice, several, frozen, wrapped)}


def made(between: str) -> tuple[Net, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Net(BETWEEN[between]).double(), {"x": torch.randn(8, 8, dtype=torch.float64)}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_function_keeps_its_own_backward(between: str) -> None:
    model, sample = made(between)
    compiled = autopar.compile(copy.deepcopy(model), sample, 1, progress=False)
    assert equivalence.worst(equivalence.compare(model, sample, compiled))[0] < 1e-12
    calls = [
        n
        for n in TracedModel(model, sample, None).whole.graph.nodes
        if isinstance(n.target, FunctionOperator)
    ]
    assert calls
    assert all(n.meta["source"].startswith("tests/autograd_functions.py:") for n in calls)


def everywhere() -> dict[str, float]:
    """Runs on each rank and returns the worst error of each plan of each net."""
    found = {}
    for name in BETWEEN:
        model, sample = made(name)
        plans: dict[str, dict[str, Any]] = {
            "data": dict(parallel=dict(data=2)),
            "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d")), recompute="full"),
        }
        if name == "reversed_twice":
            plans["pipeline"] = dict(
                parallel=dict(pipeline=dict(size=2, split_before=["head"])),
                schedule="gpipe",
                micro_batch_size=8,
            )
        errors = equivalence.worst_of_plans(model, sample, 2, plans)
        found.update({f"{name}, {label}": error for label, error in errors.items()})
    return found


def test_functions_under_every_kind_of_plan(ranks: Pools) -> None:
    for errors in ranks(2).run(everywhere):
        assert len(errors) == 9
        assert max(errors.values()) < 1e-9, errors


def test_without_a_rule_it_runs_whole_and_is_not_cut_into_microbatches() -> None:
    torch.manual_seed(0)
    model, sample = Net(lambda net, h: Noisy.apply(h)), {"x": torch.randn(8, 8)}
    plan = autopar.plan(model, sample, 2, parallel=dict(data=2), progress=False)
    assert any("autograd_functions.Noisy has no sharding rule" in note for note in plan.notes)
    with pytest.raises(
        PlanError,
        match=r"Noisy in module .* at tests/autograd_functions.py:\d+ has no rule.*register_rule",
    ):
        autopar.compile(model, sample, 1, micro_batch_size=2, progress=False)


def test_a_function_whose_operators_are_unknown_runs_whole() -> None:
    torch.manual_seed(0)
    model, sample = Net(lambda net, h: Cube.apply(h)), {"x": torch.randn(8, 8)}
    plan = autopar.plan(model, sample, 2, parallel=dict(data=2), progress=False)
    assert any("autograd_functions.Cube runs whole on every rank" in n for n in plan.notes)
    assert plan.nodes["Cube"].out == (I,)


def test_a_rule_splits_a_function() -> None:
    model, sample = made("reversed_twice")
    with mock.patch.dict(registry._MAKERS):

        @register_rule("autograd_functions.Reverse")
        def pointwise(call: OperatorCall) -> Rule:
            assert call["scale"] in (0.5, 2.0)
            return call.rule("b f -> b f")

        expected = equivalence.step(copy.deepcopy(model), sample)
        compiled = autopar.compile(model, sample, 1, micro_batch_size=2, progress=False)
        assert compiled.plan.microbatches == 4
        assert (
            equivalence.worst(
                equivalence.differences(equivalence.step(compiled, sample), expected)
            )[0]
            < 1e-12
        )
        plan = autopar.plan(model, sample, 2, parallel=dict(data=2), progress=False)
    assert not any("Reverse" in note for note in plan.notes)
    assert plan.nodes["Reverse"].factors == ("b",)


def test_what_a_forward_draws_is_drawn_alike_on_all_ranks() -> None:
    model = Net(lambda net, h: Noisy.apply(h))
    compiled = autopar.compile(model, torch.randn(4, 8), 1, progress=False)
    (call,) = (
        n
        for n in compiled._lowered.train.graph.nodes
        if n.target is graph_kernels.call_random_operator
    )
    assert call.args[0] == FunctionOperator(Noisy, (None,), True, random=True)


def traced(between: Callable[[Net, torch.Tensor], torch.Tensor]) -> str:
    """The fingerprint of a net with the function ``between``."""
    torch.manual_seed(0)
    return TracedModel(Net(between), torch.randn(8, 8), None).whole.fingerprint


def test_the_fingerprint_depends_on_the_function_and_its_arguments() -> None:
    assert traced(lambda net, h: Reverse.apply(h, 0.5)) == traced(lambda net, h: reverse(h, 0.5))
    assert traced(lambda net, h: Reverse.apply(h, 0.5)) != traced(
        lambda net, h: Reverse.apply(h, 0.25)
    )
    assert traced(lambda net, h: Cube.apply(h)) != traced(lambda net, h: Noisy.apply(h))


def test_both_forms_of_checkpoint_are_plain_code() -> None:
    def between(use_reentrant: bool | None) -> Callable[[Net, torch.Tensor], torch.Tensor]:
        def run(net: Net, h: torch.Tensor) -> torch.Tensor:
            def inner(h: torch.Tensor, scale: float) -> torch.Tensor:
                return Reverse.apply(net.other(h), scale) * h

            return (
                inner(h, 2.0)
                if use_reentrant is None
                else checkpoint(inner, h, 2.0, use_reentrant=use_reentrant)
            )

        return run

    assert traced(between(True)) == traced(between(False)) == traced(between(None))
