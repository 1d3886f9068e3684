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
from pool import Pools
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.capture_graph import capture
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import CaptureError, PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.rules import OperatorCall, Rule, register_rule, registry
from autopar.runtime.kernels import graph_kernels


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is reversed and scaled: domain-adversarial training (arXiv
    1409.7495).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * grad, None


reverse = Reverse.apply  # bound before anything is traced, as its users write


class Several(torch.autograd.Function):
    """Two results and an index, which has no gradient. Gradients that nobody needs are not
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, more: list[torch.Tensor], kind: str
    ) -> Any:
        ctx.save_for_backward(x, weight)
        best = x.argmax(-1)
        noted = x.detach() * 2  # is_floating_point, and not differentiable
        ctx.mark_non_differentiable(best, noted)
        return x * weight + more[0] * more[1], x.sin() if kind == "sin" else x.cos(), best, noted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor, *rest: Any) -> Any:
        x, weight = ctx.saved_tensors
        dx = 3 * first * weight - second if ctx.needs_input_grad[0] else None
        dw = 5 * (first * x).sum(0) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class Setup(torch.autograd.Function):
    """The newer form of a Function, with keyword defaults."""

    @staticmethod
    def forward(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 7 * grad * ctx.saved_tensors[0], None


class Noisy(torch.autograd.Function):
    """Draws random numbers in its forward. Every rank has the whole operator, so every rank must
    draw the same numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@torch.library.custom_op("autopar_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return cube(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 11 * grad * ctx.saved_tensors[0]


class Net(nn.Module):
    """A body, the function ``between`` on its features, and a head."""

    def __init__(self, between: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.between = between

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        y = self.head(self.between(self, h))
        return {"loss": y.square().mean() + self.other(h).abs().mean(), "y": y}


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
    assert all(n.meta["source"].startswith("tests/test_functions.py:") for n in calls)


def everywhere() -> dict[str, float]:
    """Runs on each rank and returns the worst error of each plan of each net."""
    found = {}
    for name in BETWEEN:
        model, sample = made(name)
        expected = equivalence.step(copy.deepcopy(model), sample)
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
        for label, options in plans.items():
            compiled = autopar.compile(copy.deepcopy(model), sample, 2, progress=False, **options)
            done = equivalence.step(compiled, sample)
            here = equivalence.own(expected, done) if label == "pipeline" else expected
            found[f"{name}, {label}"] = equivalence.worst(equivalence.differences(done, here))[0]
    return found


def test_functions_under_every_kind_of_plan(ranks: Pools) -> None:
    for errors in ranks(2).run(everywhere):
        assert len(errors) == 9
        assert max(errors.values()) < 1e-9, errors


def test_without_a_rule_it_runs_whole_and_is_not_cut_into_microbatches() -> None:
    model, sample = made("reversed_twice")
    plan = autopar.plan(model, sample, 2, parallel=dict(data=2), progress=False)
    assert any("test_functions.Reverse has no sharding rule" in note for note in plan.notes)
    with pytest.raises(
        PlanError,
        match=r"Reverse in module .* at tests/test_functions.py:\d+ has no rule.*register_rule",
    ):
        autopar.compile(model, sample, 1, micro_batch_size=2, progress=False)


def test_a_rule_splits_a_function() -> None:
    model, sample = made("reversed_twice")
    with mock.patch.dict(registry._MAKERS):

        @register_rule("test_functions.Reverse")
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


class Dirty(Reverse):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(scale)


class Closed(Reverse):
    model: Net

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * Closed.model.scale


def view_written_to(net: Net, h: torch.Tensor) -> torch.Tensor:
    y = h * 1
    z = Reverse.apply(y, 2.0)
    y.add_(1)
    return z


def closed(net: Net, h: torch.Tensor) -> torch.Tensor:
    Closed.model = net
    return Closed.apply(h, 2.0)


def hook(name: str) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def between(net: Net, h: torch.Tensor) -> torch.Tensor:
        getattr(h, name)(*[] if name == "retain_grad" else [lambda g: -g])
        return h

    return between


def module_hook(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.head.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return h


class Quantised(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: t.half(), lambda t: t.float())


def quantised(net: Net, h: torch.Tensor) -> torch.Tensor:
    with Quantised():
        return h * h.sin()


def penalty(net: Net, h: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(net.head(h).sigmoid().sum(), h, create_graph=True)
    return h + grad.norm(dim=1, keepdim=True)


REFUSED = {
    "writes to its operands": lambda net, h: Dirty.apply(h, 2.0),
    r"given a Net, which.*give it tensors as arguments of their own": lambda net, h: Reverse.apply(
        h, net
    ),
    "reads a tensor of the model that is not among its arguments": closed,
    "returns a view of its operand, and": view_written_to,
    "under a transform of torch.func": lambda net, h: torch.func.vmap(Setup.apply)(h),
    "register_hook in the forward.*write a torch.autograd.Function": hook("register_hook"),
    "retain_grad in the forward": hook("retain_grad"),
    "a module has a backward hook": module_hook,
    "saved_tensors_hooks": quantised,
    "is under a transform of torch.func": lambda net, h: torch.func.vmap(
        lambda row: row * row.softmax(0)
    )(h),
    "torch.autograd.grad in the forward": penalty,
    "backward.. in the forward": lambda net, h: (h.sum().backward(), h)[1],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(problem: str) -> None:
    with pytest.raises(CaptureError, match=rf"at tests/test_functions.py:\d+.*{problem}"):
        capture(Net(REFUSED[problem]), torch.randn(8, 8))
