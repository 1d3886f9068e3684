"""Every optimizer of torch on several ranks does what it does on one device, in float64, or is
refused with the reason before its first step.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any
from unittest import mock

import peaks
import pytest
import staged
import torch
import zoo
from equivalence import full, loss_of
from pool import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode

import autopar
from autopar.errors import RunError
from autopar.ir import state_buckets
from autopar.plan import Plan

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
        assert _moved(compiled, model, start, f"{case}, {name}") > 1e-5, f"{case}, {name}"
        found[name] = "yes"
    return found


def _moved(compiled: nn.Module, model: nn.Module, start: nn.Module, label: str) -> float:
    """How far the parameters went from ``start``; they must be those of ``model``."""
    moved = 0.0
    for n, p in compiled.named_parameters():
        expected = model.get_parameter(n).detach()
        torch.testing.assert_close(
            full(p).detach(),
            expected,
            rtol=TOLERANCE,
            atol=TOLERANCE * float(expected.abs().max()),
            msg=lambda m: f"{label}: {m}",
        )
        moved = max(moved, float((expected - start.get_parameter(n).detach()).abs().max()))
    return moved


@pytest.mark.parametrize("case", ["zero", "1d", "pipeline"])
def test_every_optimizer_is_that_of_one_device_or_refused(ranks: Pools, case: str) -> None:
    assert set(ranks(2).run(_every, case, timeout=120)[0]) == set(OPTIMIZERS)


@pytest.mark.slow
def test_every_optimizer_on_whole_parameters(ranks: Pools) -> None:
    ranks(2).run(_every, "data", timeout=120)


def _takes(name: str, option: str) -> bool:
    """Whether an optimizer that ranks allow has an implementation of that name."""
    refused = any(case in REFUSED.get(name, {}) for case in CASES)
    return option in inspect.signature(getattr(torch.optim, name)).parameters and not refused


def _in_buckets(case: str) -> dict[str, list[str]]:
    _clear_sharding_prop_cache()
    start, found = Small(), dict[str, list[str]]()
    compiled = autopar.compile(copy.deepcopy(start), batch(0), 2, progress=False, **CASES[case])
    for option in ("foreach", "fused"):
        for name in (n for n in OPTIMIZERS if _takes(n, option)):
            compiled.load_state_dict(start.state_dict())
            model, states = copy.deepcopy(start), []
            for each in (model, compiled):
                options = {option: True} | (dict(momentum=0.9) if name == "SGD" else {})
                optimizer = getattr(torch.optim, name)(each.parameters(), lr=1e-2, **options)
                for seed in range(STEPS):
                    optimizer.zero_grad()
                    each(batch(seed)).backward()
                    with mock.patch.object(state_buckets, "UPDATE_BYTES", 64 * 8):
                        optimizer.step()
                states.append(optimizer.state)
            label = f"{case}, {name}, {option}"
            assert _moved(compiled, model, start, label) > 1e-5, label
            for parameter, state in states[1].items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        assert value.placements == parameter.placements, f"{label}: {key}"
            found.setdefault(option, []).append(name)
    return found


@pytest.mark.parametrize("case", ["zero", "1d"])
def test_parameters_in_buckets_are_updated_as_on_one_device(ranks: Pools, case: str) -> None:
    found = ranks(2).run(_in_buckets, case, timeout=120)[0]
    assert {"Adam", "AdamW", "RMSprop", "SGD"} <= set(found["foreach"])
    assert set(found["fused"]) == {"Adagrad", "Adam", "AdamW", "SGD"}


def _kinds() -> None:
    mesh = init_device_mesh("cpu", (2,))
    theirs = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(2)]
    compiled = autopar.compile(Small(), batch(0), 2, progress=False, **CASES["zero"])
    ours = [p for p in compiled.parameters() if isinstance(p, DTensor)]
    compiled(batch(0)).backward()
    gradients, counts = [p.grad for p in ours], [torch.zeros(()) for _ in ours]
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def are_local(lists: list[list[Any]]) -> bool:
        """Whether the optimizer gets this rank's parts."""
        ((found, _),) = group(lists, with_indices=True).values()
        return not any(isinstance(x, DTensor) for each in found for x in each)

    assert are_local([ours, gradients, [], counts])
    assert not are_local([theirs, theirs])
    assert not are_local([ours, gradients, [None] * len(ours)]), "torch makes state as DTensors"
    pending = DTensor.from_local(theirs[0].to_local(), ours[0].device_mesh, [Partial()])
    assert not are_local([[pending], [pending]])
    assert not are_local([ours, [torch.zeros(p.shape) for p in ours]])
    with mock.patch.object(state_buckets, "UPDATE_BYTES", 1):
        parts = group([ours, gradients], with_indices=True).values()
    assert [indices for _, indices in parts] == [[i] for i in range(len(ours))]
    for ((own,), (gradient,)), (i,) in parts:
        assert own.data_ptr() == ours[i].to_local().data_ptr()
        assert gradient.data_ptr() == gradients[i].to_local().data_ptr()


def test_only_parts_of_programs_that_lie_alike_are_updated_as_parts(ranks: Pools) -> None:
    ranks(2).run(_kinds)


def _peak(plan: Plan, limit: int) -> float:
    with mock.patch.object(state_buckets, "UPDATE_BYTES", limit):
        return peaks.measured(plan, "wide", 16)


def test_a_step_has_the_temporaries_of_one_bucket(ranks: Pools) -> None:
    model, sample = peaks.made("wide", 16)
    sizes = [4 * p.numel() for p in model.parameters()]
    found = []
    for limit in (max(sizes), sum(sizes)):
        with mock.patch.object(state_buckets, "UPDATE_BYTES", limit):
            plan = autopar.plan(
                model, sample, 2, parallel=dict(data=2), zero=0, backend="eager", progress=False
            )
        real = ranks(2).run(_peak, plan, limit)[0]
        print(f"buckets of {limit:,}: predicted {plan.peak_memory[0]:,.0f} bytes, found {real:,}")
        assert plan.peak_memory[0] == pytest.approx(real, rel=0.01)
        found.append(real)
    assert found[1] - found[0] == pytest.approx(sum(sizes) - max(sizes), rel=0.05)


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
    assert _moved(compiled, model, start, "a tensor as lr") > 1e-5


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
