"""Every optimizer of torch on several ranks does what it does on one device, in float64, or is
refused with the reason before its first step.
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from typing import Any

import pytest
import staged
import torch
import zoo
from equivalence import full, loss_of
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import autopar
from autopar.errors import RunError

TOLERANCE = 1e-9
STEPS = 3
OPTIMIZERS = sorted(
    n
    for n, c in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(c, torch.optim.Optimizer) and n != "Optimizer"
)
CASES: dict[str, Any] = {
    "zero": dict(parallel=dict(data=2), zero=2),
    "data": dict(parallel=dict(data=2), zero=0),
    "1d": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": staged.Case(2, "1f1b", options=dict(micro_batch_size=4)),
}
REFUSED = {
    "Adafactor": {"zero": "whole rows and columns", "1d": "whole rows and columns"},
    "LBFGS": {"pipeline": "all parameters as one vector"},
    "Rprop": dict.fromkeys(("zero", "data", "1d"), "writes to parts of gradients"),
    "SparseAdam": dict.fromkeys(CASES, "wants sparse gradients"),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.n = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.LayerNorm(8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.n(self.b(torch.tanh(self.a(x)))) - x).square().mean()


class Wide(TorchFunctionMode):
    """Lets Muon, which computes in bfloat16, compute in float64: its arithmetic is compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    # Muon takes matrices only.
    chosen = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
    return getattr(torch.optim, name)(
        chosen, **(dict(momentum=0.9, lr=0.1) if name == "SGD" else {})
    )


def _train(name: str, model: nn.Module) -> None:
    optimizer = _optimizer(name, model)
    for seed in range(STEPS):

        def closure(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(seed))
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            with Wide():
                optimizer.step()


def _every(case: str) -> dict[str, str]:
    """By optimizer: "yes" or "refused"."""
    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    options, start = CASES[case], Small()
    if isinstance(options, staged.Case):
        plan = staged.staged_plan(
            start, batch(0), 2, options.pipeline, options.schedule, **options.options
        )
    else:
        plan = autopar.plan(start, batch(0), 2, progress=False, **options)
    compiled, found = autopar.compile(copy.deepcopy(start), batch(0), 2, plan=plan), {}
    for name in OPTIMIZERS:
        compiled.load_state_dict(start.state_dict())
        compiled.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if case in REFUSED.get(name, {}):
                with pytest.raises(RunError, match=REFUSED[name][case]):
                    _train(name, compiled)
                assert all(
                    torch.equal(full(p), start.get_parameter(n))
                    for n, p in compiled.named_parameters()
                ), "it has stepped"
                found[name] = "refused"
                continue
            model = copy.deepcopy(start)
            _train(name, model)
            _train(name, compiled)
        assert moved(compiled, model, start, f"{case}, {name}") > 1e-5, f"{case}, {name}"
        found[name] = "yes"
    return found


def moved(compiled: nn.Module, model: nn.Module, start: nn.Module, label: str) -> float:
    """How far the parameters went from ``start``; they must be those of ``model``."""
    far = 0.0
    for n, p in compiled.named_parameters():
        expected = model.get_parameter(n).detach()
        torch.testing.assert_close(
            full(p).detach(),
            expected,
            rtol=TOLERANCE,
            atol=TOLERANCE * float(expected.abs().max()),
            msg=lambda m: f"{label}: {m}",
        )
        far = max(far, float((expected - start.get_parameter(n).detach()).abs().max()))
    return far


@pytest.mark.parametrize("case", ["zero", "1d", "pipeline"])
def test_every_optimizer_is_that_of_one_device_or_refused(ranks: Pools, case: str) -> None:
    assert set(ranks(2).run(_every, case, timeout=120)[0]) == set(OPTIMIZERS)


@pytest.mark.slow
def test_every_optimizer_on_whole_parameters(ranks: Pools) -> None:
    ranks(2).run(_every, "data", timeout=120)


def _tensor_as_rate() -> None:
    _clear_sharding_prop_cache()
    start = Small()
    compiled = autopar.compile(copy.deepcopy(start), batch(0), 2, progress=False, **CASES["zero"])
    model = copy.deepcopy(start)
    for each in (model, compiled):
        rate = torch.tensor(1e-2, dtype=torch.float64)
        optimizer = torch.optim.AdamW(each.parameters(), lr=rate)
        for seed in range(STEPS):
            optimizer.zero_grad()
            each(batch(seed)).backward()
            optimizer.step()
            rate.mul_(0.5)  # as a compiled scheduler does
    assert moved(compiled, model, start, "a tensor as lr") > 1e-5


def test_a_tensor_may_be_the_learning_rate(ranks: Pools) -> None:
    ranks(2).run(_tensor_as_rate)


def _made_before() -> None:
    model, sample = zoo.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = autopar.compile(model, sample, 1, progress=False)
    loss_of(compiled(**sample)).backward()
    with pytest.raises(
        autopar.RunError,
        match=r"torch.optim.SGD has parameters of the model.*from compiled.parameters\(\)",
    ):
        optimizer.step()
    loss_of(model(**sample)).backward()  # a model may go on beside its program
    optimizer.step()


def test_an_optimizer_made_before_compile_is_refused(ranks: Pools) -> None:
    ranks(1).run(_made_before)


def _collected_in_a_step() -> None:
    compiled = [autopar.compile(Small(), batch(0), 2, progress=False) for _ in range(2)]
    optimizer = torch.optim.SGD(compiled[0].parameters(), lr=0.1)

    def drop(*_: Any) -> None:
        compiled[1:] = []
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (drop, lambda *_: None)]
    loss_of(compiled[0](batch(0))).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()


def test_a_program_may_be_collected_while_an_optimizer_steps(ranks: Pools) -> None:
    ranks(2).run(_collected_in_a_step)
