"""The rule of a ``torch.autograd.Function`` is made from the operators that it calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import equivalence
import pytest
import torch
from autograd_functions import (
    Affine,
    Clip,
    Cube,
    Gated,
    InPlace,
    Net,
    Noisy,
    Normalised,
    OverRows,
    Product,
    Quantised,
    Reverse,
    Rounded,
    Setup,
    Several,
    Squares,
    Switching,
)
from pool import Pools
from torch import nn

import autopar
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.layout import R
from autopar.rules import OperatorCall, Rule, register_rule, registry, rule_of

Between = Callable[[Net, torch.Tensor], torch.Tensor]
BETWEEN: dict[str, Between] = {
    "clip": lambda net, h: Clip.apply(h),
    "clipped scale": lambda net, h: h * Clip.apply(net.scale),
    "rounded": lambda net, h: Rounded.apply(h, 0.01),
    "rounded weight": lambda net, h: h @ Rounded.apply(net.body.weight, 0.01),
    "quantised": lambda net, h: Quantised.apply(h),
    "quantised weight": lambda net, h: h @ Quantised.apply(net.body.weight),
    "gated": lambda net, h: Gated.apply(h, h.sin()),
    "normalised": lambda net, h: Normalised.apply(h, net.scale, 1e-6),
    "affine": lambda net, h: Affine.apply(h, net.body.weight, net.scale),
    "product": lambda net, h: Product.apply(h, net.body.weight),
    "in place": lambda net, h: InPlace.apply(h),
    "several": lambda net, h: Several.apply(h, net.scale, [net.scale * 2, h], "sin")[0],
    "squares": lambda net, h: h + Squares.apply(h) / 64,
    "over rows": lambda net, h: OverRows.apply(h),
    "setup": lambda net, h: Setup.apply(h),
    "cube": lambda net, h: Cube.apply(h),
}
# The rule's text: upper-case factors stay whole; then what else it says.
RULES = {
    "clip": "a b -> a b, linear in 0, complete gradient",
    "clipped scale": "a -> a, linear in 0, complete gradient",
    "rounded": "a b -> a b",
    "rounded weight": "a b -> a b",
    "quantised": "A B -> C D",
    "quantised weight": "A B -> C D",
    "gated": "a b, a b -> a b, linear in 1",
    "normalised": "a B, C -> a D, linear in 1",
    "affine": "a B, c D, c -> a c",
    "product": "a b, b c -> a c, sums b",
    "in place": "a b -> a b",
    "several": "a B, C, D, a E -> a F",
    "squares": "a b -> , sums a b",
    "over rows": "A b -> C b, linear in 0",
    "setup": "a b -> a b",
    "cube": "A B -> C D",
}
# Those that are not computed in microbatches: they mix samples, or may do so.
MIXING = ("clipped scale", "quantised", "squares", "over rows", "cube")
PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2)),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "free": dict(mesh=(2,), zero=3),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=2),
    "pipeline": dict(
        parallel=dict(pipeline=dict(size=2, split_before=["head"])), micro_batch_size=4
    ),
}


def made(name: str) -> tuple[Net, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Net(BETWEEN[name]).double(), {"x": torch.randn(16, 8, dtype=torch.float64)}


def function_rule(name: str) -> Rule | None:
    graph = TracedModel(*made(name), None).whole.graph
    (call,) = (n for n in graph.nodes if isinstance(n.target, FunctionOperator))
    return rule_of(call)


def text(rule: Rule) -> str:
    """A rule as RULES has it."""
    names = {f: chr(ord("a") + i) for i, f in enumerate(rule.sizes)}
    names |= {f: names[f].upper() for f in rule.whole}

    def written(dims: Any) -> str:
        return " ".join(names[f] for dim in dims for f in dim)

    found = f"{', '.join(map(written, rule.operands))} -> {written(rule.output)}"
    if rule.sums:
        found += f", sums {' '.join(sorted(names[f] for f in rule.sums))}"
    for term in rule.terms:
        found += f", linear in {' '.join(map(str, sorted(term)))}"
    return found + ", complete gradient" * rule.complete_gradient


@pytest.mark.parametrize("name", BETWEEN)
def test_the_rule_of_a_function(name: str) -> None:
    rule = function_rule(name)
    assert rule is not None
    assert text(rule) == RULES[name]


def test_what_draws_random_numbers_has_no_rule() -> None:
    with mock.patch.dict(BETWEEN, noisy=lambda net, h: Noisy.apply(h)):
        assert function_rule("noisy") is None


def everywhere() -> dict[str, float]:
    """Runs on each rank and returns the worst error of each plan of each net."""
    found = {}
    for name in BETWEEN:
        model, sample = made(name)
        mixes = name in MIXING
        plans = {k: o for k, o in PLANS.items() if not (mixes and "micro_batch_size" in o)}
        errors = equivalence.worst_of_plans(model, sample, 2, plans)
        found.update({f"{name}, {label}": error for label, error in errors.items()})
    return found


def test_functions_are_split_as_their_rules_say(ranks: Pools) -> None:
    for errors in ranks(2).run(everywhere):
        assert len(errors) == len(BETWEEN) * len(PLANS) - 2 * len(MIXING)
        assert max(errors.values()) < 1e-9, errors


class Wide(nn.Module):
    """Two layers with a clipped gradient in between, which is a pending sum along a tensor axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(1024, 1024), nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(Clip.apply(self.first(x))).relu()).square().mean()


def test_a_backward_that_is_not_linear_gets_the_whole_gradient() -> None:
    parallel = dict(tensor=dict(size=4, mode="1d"))
    sample = torch.randn(64, 1024)
    plan = autopar.plan(Wide(), sample, 4, cluster="a100-sxm", parallel=parallel, progress=False)
    assert R not in plan.nodes["Clip"].out
    with mock.patch.dict(registry._MAKERS):
        register_rule("autograd_functions.Clip")(lambda call: call.rule("~... -> ..."))
        plan = autopar.plan(
            Wide(), sample, 4, cluster="a100-sxm", parallel=parallel, progress=False
        )
    assert plan.nodes["Clip"].out == (R,)  # which is faster, and would clip parts of a sum


@pytest.mark.parametrize("name", MIXING)
def test_what_may_mix_samples_is_not_computed_in_microbatches(name: str) -> None:
    model, sample = made(name)
    message = {
        "clipped scale": "has a backward that is not known to be linear in the gradient",
        "squares": "add.Tensor in module .* mixes samples",
    }.get(name, "is not known to keep samples apart")
    with pytest.raises(PlanError, match=message):
        autopar.compile(model, sample, 1, micro_batch_size=4, progress=False)


def test_a_function_that_computes_otherwise_on_chunks_is_refused() -> None:
    with mock.patch.dict(BETWEEN, switching=lambda net, h: Switching.apply(h)):
        model, sample = made("switching")
    found = autopar.compile(copy.deepcopy(model), sample, 1, micro_batch_size=8, progress=False)
    expected = equivalence.step(copy.deepcopy(model), sample)
    done = equivalence.step(found, sample)
    assert equivalence.worst(equivalence.differences(done, expected))[0] < 1e-12
    with pytest.raises(PlanError, match=r"Switching .* calls other operators on chunks .*\(4, 8\)"):
        autopar.compile(model, sample, 1, micro_batch_size=4, progress=False)


def test_a_registered_rule_comes_first() -> None:
    with mock.patch.dict(registry._MAKERS):

        @register_rule("autograd_functions.Reverse")
        def whole(call: OperatorCall) -> Rule:
            return call.rule("b f -> b f", whole=["b", "f"])

        with mock.patch.dict(BETWEEN, reverse=lambda net, h: Reverse.apply(h, 2.0)):
            rule = function_rule("reverse")
    assert rule is not None
    assert rule.whole == {"b", "f"}
