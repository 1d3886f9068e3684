"""Gradient handlers: a user's function sees every synchronised gradient once, and changes it as the
same function changes the gradients of one device.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, full, loss_of
from pipeline_cases import DATA, GRID, TENSOR, ZERO, build, close, part
from pool import Pools
from staged import Case
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RunError
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.parameters.gradient_handlers import _OF_ALL_PROGRAMS

ZERO3 = dict(parallel=dict(data=2), zero=3)
ON_ONE = {"one": {}, "microbatches": part(2)}
ON_TWO = {
    "data": DATA,
    "zero": ZERO,
    "zero3": ZERO3,
    "zero3 in microbatches": part(2, **ZERO3),
    "tensor": TENSOR,
    "bf16": dict(DATA, precision="bf16"),
}
PIPED = {
    "1f1b": Case(2, "1f1b", options=part(2)),
    "zero-bubble": Case(2, "zero-bubble", 2, options=part(2)),
}
PIPED_ON_FOUR = {
    "1f1b of zero 2": Case(2, "1f1b", options=part(2, **ZERO)),
    "interleaved of tensor": Case(2, "interleaved-1f1b", 2, options=part(2, **TENSOR)),
}
LIMIT = 0.05


def clip(gradient: torch.Tensor) -> torch.Tensor:
    """The factor that leaves a whole gradient a norm of at most LIMIT."""
    return (LIMIT / full(torch.linalg.vector_norm(gradient))).clamp(max=1.0)


def clip_each(gradient: autopar.ParameterGradient) -> None:
    gradient.local.mul_(clip(gradient.tensor).to(gradient.local.dtype))


def _compiled(model: nn.Module, sample: Any, options: dict[str, Any] | Case) -> autopar.Compiled:
    if isinstance(options, Case):
        return build(model, sample, options)
    own = copy.deepcopy(model)
    return autopar.compile(own, sample, dist.get_world_size(), progress=False, **options)


def _clips(options: dict[str, Any] | Case, tolerance: float = 1e-9) -> list[str]:
    """Two backwards that accumulate, with each gradient clipped; the names in the order seen."""
    seen: list[autopar.ParameterGradient] = []

    def watch(gradient: autopar.ParameterGradient) -> None:
        seen.append(gradient)

    model, sample = zoo.gpt2(dtype=torch.float64)
    warnings.filterwarnings("ignore", module="torch")  # of inductor's own parts
    with Double():
        compiled = _compiled(model, sample, options)
        with autopar.register_gradient_handler(watch), autopar.register_gradient_handler(clip_each):
            for _ in range(2):
                (loss_of(compiled(**sample)) * 2).backward()
    for p in model.parameters():
        p.register_hook(lambda g: g * clip(g))
    with Double():
        for _ in range(2):
            (loss_of(model(**sample)) * 2).backward()
    found, expected = dict(compiled.named_parameters()), dict(model.named_parameters())
    for name, p in found.items():
        close(p.grad, expected[name].grad, tolerance, name)
    assert Counter(g.name for g in seen) == dict.fromkeys(found, 2)
    for gradient in seen:
        stored = compiled.plan.parameters[gradient.name].stored
        p = found[gradient.name]
        assert (gradient.layout, gradient.local.shape) == (stored, local_tensor(p).shape)
        assert gradient.placements == (p.placements if isinstance(p, DTensor) else ())
    names = [g.name for g in seen]
    assert names[: len(found)] == names[len(found) :]
    return names


@pytest.mark.parametrize("name", ON_ONE)
def test_one_device(ranks: Pools, name: str) -> None:
    (names,) = ranks(1).run(_clips, ON_ONE[name])
    assert names.index("transformer.ln_f.weight") < names.index("transformer.h.0.ln_1.weight")


@pytest.mark.sampled(fast=3, slow=2)
@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(ranks: Pools, name: str) -> None:
    tolerance = 1e-9 if name != "bf16" else 0.05  # of bfloat16's 8 bits, over two layers
    first, second = ranks(2).run(_clips, ON_TWO[name], tolerance)
    assert first == second
    assert first.index("transformer.ln_f.weight") < first.index("transformer.h.0.ln_1.weight")


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", PIPED)
def test_a_pipeline(ranks: Pools, name: str) -> None:
    first, second = ranks(2).run(_clips, PIPED[name])
    assert {*first, *second} == {n for n, _ in zoo.gpt2()[0].named_parameters()}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", PIPED_ON_FOUR)
def test_a_pipeline_of_meshes(ranks: Pools, name: str) -> None:
    orders = ranks(4).run(_clips, PIPED_ON_FOUR[name])
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]


@pytest.mark.exhaustive
def test_a_grid_and_inductor(ranks: Pools) -> None:
    ranks(4).run(_clips, GRID)
    ranks(2).run(_clips, dict(DATA, backend="inductor"), timeout=400)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def _net(options: dict[str, Any]) -> tuple[autopar.Compiled, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 4)
    return autopar.compile(model, x, dist.get_world_size(), progress=False, **options), x


def _gradients(compiled: autopar.Compiled, x: torch.Tensor) -> dict[str, torch.Tensor]:
    compiled.zero_grad()
    compiled(x).backward()
    return {n: full(p.grad).clone() for n, p in compiled.named_parameters()}


def _wrong(options: dict[str, Any]) -> dict[str, str]:
    def flat(gradient: autopar.ParameterGradient) -> torch.Tensor:
        return gradient.local.new_zeros(3)

    def half(gradient: autopar.ParameterGradient) -> torch.Tensor:
        return gradient.local.half()

    def whole(gradient: autopar.ParameterGradient) -> torch.Tensor:
        return gradient.name  # type: ignore[return-value]

    def grow(gradient: autopar.ParameterGradient) -> None:
        gradient.local.data = gradient.local.new_zeros(5)

    said = {}
    for handler in (flat, half, whole, grow):
        compiled, x = _net(options)
        with autopar.register_gradient_handler(handler), pytest.raises(RunError) as raised:
            compiled(x).backward()
        said[handler.__name__] = str(raised.value)
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_results_are_refused(ranks: Pools, world_size: int) -> None:
    options = {1: {}, 2: dict(parallel=dict(data=2), zero=0)}[world_size]
    for said in ranks(world_size).run(_wrong, options):
        for name, what in (
            ("flat", r"gradient handler flat returned a Tensor of shape (3,), torch.float32"),
            ("half", r"gradient handler half returned a Tensor of shape (1,), torch.float16"),
            ("whole", r"gradient handler whole returned a str for the gradient of down.bias"),
            ("grow", r"gradient handler grow left a Tensor of shape (5,), torch.float32"),
        ):
            assert what in said[name]
            assert "down.bias, whose local part has shape (1,), torch.float32 on cpu" in said[name]
            assert "change gradient.local in place" in said[name]


def _registers(options: dict[str, Any]) -> None:
    @autopar.register_gradient_handler
    def double(gradient: autopar.ParameterGradient) -> None:
        """Twice the gradient."""
        gradient.local.mul_(2)

    try:
        (one, x), (other, _) = _net(options), _net(options)
        twice = _gradients(one, x)
        negated = one.register_gradient_handler(lambda gradient: -gradient.local)
        copied = copy.deepcopy(one)
        for program, factor in ((one, -1.0), (copied, -1.0), (other, 1.0)):
            found = _gradients(program, x)
            assert all(torch.equal(found[n], factor * g) for n, g in twice.items())
        negated.remove()
        negated.remove()
        assert all(torch.equal(g, twice[n]) for n, g in _gradients(one, x).items())
        assert not torch.equal(_gradients(copied, x)["up.weight"], twice["up.weight"])
        assert (double.__name__, double.__doc__) == ("double", "Twice the gradient.")
    finally:
        double.remove()
    once = _gradients(one, x)
    assert all(torch.equal(2 * once[n], g) for n, g in twice.items())
    assert _OF_ALL_PROGRAMS == []
    # A hook of the parameter comes first; what torch.autograd.grad returns is not handled.
    one.down.bias.register_hook(lambda gradient: gradient + 1)
    with autopar.register_gradient_handler(double.function):
        torch.testing.assert_close(_gradients(one, x)["down.bias"], 2 * (once["down.bias"] + 1))
        (asked,) = torch.autograd.grad(other(x), [other.up.weight])
        assert torch.equal(full(asked), once["up.weight"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_all_programs_and_of_one(ranks: Pools, world_size: int) -> None:
    options = {1: {}, 2: dict(parallel=dict(data=2), zero=0)}[world_size]
    ranks(world_size).run(_registers, options)


def _compares() -> int:
    compiled, x = _net(dict(parallel=dict(data=2), zero=0))
    seen: list[str] = []
    with compiled.register_gradient_handler(lambda gradient: seen.append(gradient.name)):
        for _ in range(8):
            compiled(x).backward()
        before = len(seen)
        compiled.compare(x)
    return len(seen) - before


def test_the_step_of_compare_is_not_handled(ranks: Pools) -> None:
    assert ranks(2).run(_compares) == [0, 0]


def test_a_handler_is_callable() -> None:
    with pytest.raises(RunError, match="give a function of one argument"):
        autopar.register_gradient_handler(3)  # type: ignore[arg-type]
