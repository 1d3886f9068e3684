"""Backwards through the outputs of a call: gradients of inputs, second losses, hooks, chosen
parameters. All equal those of one device, in float64, or are refused with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import staged
import torch
from equivalence import full
from pool import Pools
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.hooks import RemovableHandle

import autopar
from autopar.errors import RunError

TOLERANCE = 1e-9
WIDTH = 8
ONE: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2), zero=2),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
}
PARTS = {"microbatches": dict(parallel=dict(data=2), micro_batch_size=2)}
PIPELINE = {"pipeline": staged.Case(2, "1f1b", options=dict(micro_batch_size=2))}


class Net(nn.Module):
    """A critic of two inputs with several outputs. The first and the last layer read one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(self.second(torch.tanh(self.first(x)))) + y
        h = torch.sigmoid(self.third(h)) * x
        return {"loss": h.square().mean(), "h": h}


def sample(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) for name in "xy"}


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is not None and expected is not None:
        atol = TOLERANCE * float(expected.detach().abs().max())
        torch.testing.assert_close(
            full(found), expected, rtol=TOLERANCE, atol=atol, msg=lambda m: f"{what}: {m}"
        )


def alike(compiled: nn.Module, model: nn.Module, what: str) -> None:
    expected = dict(model.named_parameters())
    for name, p in compiled.named_parameters():
        close(p.grad, expected[name].grad, f"{what}: {name}")


def programs() -> Iterator[tuple[str, nn.Module, autopar.Compiled]]:
    """The model and its compiled programs on two ranks."""
    for name, options in (ONE | PARTS | PIPELINE).items():
        _clear_sharding_prop_cache()  # it holds process groups of earlier tests
        model = Net()
        plan = None
        if isinstance(options, staged.Case):
            plan = staged.staged_plan(
                model, sample(), 2, options.pipeline, options.schedule, **options.options
            )
        elif name == "microbatches":
            plan = autopar.plan(model, sample(), 2, progress=False, **options)
        else:
            plan = autopar.plan(
                model,
                sample(),
                2,
                progress=False,
                micro_batch_size=8 // plan_degree(name),
                **options,
            )
        yield name, model, autopar.compile(copy.deepcopy(model), sample(), 2, plan=plan)


def plan_degree(name: str) -> int:
    return 2 if name == "data" else 1


def _inputs(name: str, model: nn.Module, compiled: nn.Module) -> None:
    for number in range(3):
        for m in (model, compiled):
            m.zero_grad()
        given = [sample(number), sample(number)]
        made = []
        for batch in given:
            batch["x"].requires_grad_()
            made.append(batch["y"].requires_grad_())
            batch["y"] = 2 * made[-1]  # not a leaf: the gradient goes on to its producer
        losses = [m(**batch)["loss"] for m, batch in zip((model, compiled), given, strict=True)]
        assert given[1]["x"].grad is None, f"{name}: a gradient before the backward"
        for loss in losses:
            (loss * 3).backward()
        again = [{**b, "y": 2 * y} for b, y in zip(given, made, strict=True)]
        for loss in [m(**b)["loss"] for m, b in zip((model, compiled), again, strict=True)]:
            loss.backward()  # accumulates
        close(given[1]["x"].grad, given[0]["x"].grad, f"{name}, x")
        close(made[1].grad, made[0].grad, f"{name}, y")
        alike(compiled, model, name)
        for p in (*model.parameters(), *compiled.parameters()):
            p.requires_grad_(number != 0)  # frozen in the second round, as in adversarial training


def _second_loss(name: str, model: nn.Module, compiled: nn.Module) -> None:
    for m in (model, compiled):
        m.zero_grad()
    expected, found = model(**sample()), compiled(**sample())
    assert found["h"].requires_grad
    close(found["h"].detach(), expected["h"].detach(), name)  # reading outputs changes no gradient
    (expected["loss"] + expected["h"].pow(3).sum()).backward()
    both = found["loss"] + full(found["h"]).pow(3).sum()
    if name in ONE:
        both.backward()
        alike(compiled, model, name)
        compiled.zero_grad()
        outputs = compiled(**sample())
        (outputs["loss"] + outputs["h"].pow(3).sum()).backward()
        alike(compiled, model, f"{name}, of a DTensor")
    else:
        with pytest.raises(RunError, match="an output that is not the loss"):
            both.backward()
        assert all(p.grad is None for p in compiled.parameters())


def _penalty(name: str, model: nn.Module, compiled: nn.Module) -> None:
    """The loop adds a term of the parameters, of which each rank has a part."""
    losses = []
    for m in (model, compiled):
        m.zero_grad()
        terms = [0.1 * p.square().sum() + p.norm() for p in m.parameters()]
        total = 3 * m(**sample())["loss"] + sum(terms)
        total.backward()
        losses.append(total.detach())
    if name != "pipeline":  # where a rank has the parameters of one stage
        close(losses[1], losses[0], f"{name}, loss with a penalty")
    alike(compiled, model, f"{name}, penalty")


def _asked(name: str, model: nn.Module, compiled: nn.Module) -> None:
    for m in (model, compiled):
        m.zero_grad()
    mine = dict(compiled.named_parameters())
    true = torch.autograd.grad(model(**sample())["loss"], list(model.parameters()))
    expected = dict(zip(dict(model.named_parameters()), true, strict=True))
    found = torch.autograd.grad(compiled(**sample())["loss"] * 1.0, list(mine.values()))
    for (n, p), gradient in zip(mine.items(), found, strict=True):
        close(gradient, expected[n], f"{name}, grad of {n}")
        assert p.grad is None
    for m in (model, compiled):
        chosen = [p for n, p in m.named_parameters() if n in mine and n.endswith("weight")]
        m(**sample())["loss"].backward(inputs=chosen)
    alike(compiled, model, f"{name}, backward of some")
    for m in (model, compiled):
        m.zero_grad()
        loss = m(**sample())["loss"]
        loss.backward(retain_graph=True)
        (loss * 2).backward()
    alike(compiled, model, f"{name}, twice")
    with pytest.raises(
        RuntimeError if name in ONE else RunError, match="second time" if name in ONE else "twice"
    ):
        loss.backward()
    for m in (model, compiled):  # three calls: the first has no backward, the others share one
        m.zero_grad()
        m(**sample())
        early = m(**sample(1))["loss"]
        (early - 2 * m(**sample(2))["loss"]).backward()
    alike(compiled, model, f"{name}, two calls")
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(
            compiled(**sample())["loss"], list(compiled.parameters()), create_graph=True
        )
    for m in (model, compiled):
        m.zero_grad()
        loss = m(**sample())["loss"]
        loss /= 4  # as users do who accumulate gradients
        loss.backward()
    alike(compiled, model, f"{name}, in place")


def _backwards() -> None:
    for name, model, compiled in programs():
        _inputs(name, model, compiled)
        _second_loss(name, model, compiled)
        _penalty(name, model, compiled)
        _asked(name, model, compiled)
        _hooks(name, model, compiled)


def _hooks(name: str, model: nn.Module, compiled: nn.Module) -> None:
    calls: dict[str, list[str]] = {"model": [], "compiled": []}
    handles = []
    kept = {
        (which, n): isinstance(p, DTensor)
        for which, m in (("model", model), ("compiled", compiled))
        for n, p in m.named_parameters()
    }
    for which, m in (("model", model), ("compiled", compiled)):
        for n, p in m.named_parameters():

            def scaled(
                gradient: torch.Tensor, n: str = n, which: str = which
            ) -> torch.Tensor | None:
                assert isinstance(gradient, DTensor) == kept[which, n]
                calls[which].append(f"{n} {float(full(gradient).norm()):.9f}")
                return gradient * 0.5 if "second" in n else None

            def arrived(p: torch.Tensor, n: str = n, which: str = which) -> None:
                calls[which].append(f"{n} has {float(full(p.grad).norm()):.9f}")

            handles += [p.register_hook(scaled), p.register_post_accumulate_grad_hook(arrived)]
    for _ in range(2):
        for m in (model, compiled):
            m.zero_grad()
            for seed in range(2):
                m(**sample(seed))["loss"].backward()
    alike(compiled, model, f"{name}, hooks")
    own = set(dict(compiled.named_parameters()))
    assert sorted(calls["compiled"]) == sorted(c for c in calls["model"] if c.split()[0] in own), (
        name
    )
    _hooks_of_some(compiled, handles)
    _steps_in_the_backward(name, model, compiled)


def _hooks_of_some(compiled: nn.Module, handles: list[RemovableHandle]) -> None:
    """``torch.autograd.grad`` refuses while a parameter has hooks; all of them are removed."""
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(compiled(**sample())["loss"], list(compiled.parameters()))
    for handle in handles[2:]:
        handle.remove()
    for n, p in list(compiled.named_parameters())[:1]:
        handles.append(p.register_hook(lambda g: None))
        with pytest.raises(RunError, match="parameters that have hooks"):
            torch.autograd.grad(
                compiled(**sample())["loss"], [q for m, q in compiled.named_parameters() if m != n]
            )
    for handle in handles:
        handle.remove()


def _steps_in_the_backward(name: str, model: nn.Module, compiled: nn.Module) -> None:
    """Each parameter has its own optimizer, which steps as soon as the gradient is there, and frees
    the gradient.
    """
    handles = []
    for m in (model, compiled):
        m.zero_grad()
        for p in m.parameters():
            optimizer = torch.optim.AdamW([p], lr=0.1)

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            handles.append(p.register_post_accumulate_grad_hook(step))
    for seed in range(3):
        losses = [m(**sample(seed))["loss"] for m in (model, compiled)]
        close(losses[1].detach(), losses[0].detach(), f"{name}, step {seed}")
        for loss in losses:
            loss.backward()
    assert all(p.grad is None for p in compiled.parameters())
    mine = dict(model.named_parameters())
    for n, p in compiled.named_parameters():
        close(p.detach(), mine[n].detach(), f"{name}: {n}")
    for handle in handles:
        handle.remove()


def test_whatever_asks_for_gradients_gets_those_of_one_device(ranks: Pools) -> None:
    """Gradients of inputs, second losses, chosen parameters, several backwards, hooks."""
    ranks(2).run(_backwards, timeout=180)
