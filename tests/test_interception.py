"""What acts on the calls in a forward, or on tensors beyond their values, raises an error where the
compiled program would not show it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import autopar

BATCH = torch.arange(32.0).reshape(8, 4) / 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x)).mean()


class ReluForGelu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.relu if func is nn.functional.gelu else func
        return function(*args, **(kwargs or {}))


class ReluForAtenGelu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            return torch.relu(args[0])
        return func(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """Its linear layers have twice the result."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


def _compiled() -> Any:
    torch.manual_seed(0)
    return autopar.compile(Model(), BATCH, 1, progress=False)


@contextmanager
def _hook(register: str) -> Iterator[None]:
    def hook(*_: Any) -> None:
        return None

    handle = getattr(module, register)(hook)
    try:
        yield
    finally:
        handle.remove()


HOOKS = (
    "register_module_forward_pre_hook",
    "register_module_forward_hook",
    "register_module_full_backward_pre_hook",
    "register_module_full_backward_hook",
)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_all_modules_are_refused(name: str) -> None:
    compiled = _compiled()
    expected = compiled(BATCH)
    with _hook(name):
        with pytest.raises(autopar.RunError, match=rf"a hook of all modules.*\({name}\)"):
            compiled(BATCH)
        with pytest.raises(autopar.CaptureError, match=rf"a hook of all modules.*\({name}\)"):
            _compiled()
    torch.testing.assert_close(compiled(BATCH), expected, rtol=0, atol=0)


def test_a_call_is_in_the_function_modes_of_the_trace() -> None:
    compiled = _compiled()
    model = Model()
    model.load_state_dict(compiled.state_dict())
    message = r"Modes that are active: ReluForGelu; when the model was compiled: none"
    with ReluForGelu():
        with pytest.raises(autopar.RunError, match=message):
            compiled(BATCH)
        inside = autopar.compile(model, BATCH, 1, progress=False)
        torch.testing.assert_close(inside(BATCH), model(BATCH))
    torch.testing.assert_close(compiled(BATCH), model(BATCH))
    for program in (inside, copy.deepcopy(inside)):
        with pytest.raises(autopar.RunError, match=r"active: none; when .*: ReluForGelu"):
            program(BATCH)


def test_what_torch_itself_registers_and_modes_of_the_dispatcher_work() -> None:
    compiled, model = _compiled(), Model()
    model.load_state_dict(compiled.state_dict())
    with torch.device("cpu"), FlopCounterMode(display=False) as flops:
        compiled(BATCH).backward()
    assert flops.get_total_flops() == 2 * (2 * 8 * 4 * 4)  # forward, and gradient of the weight
    with ReluForAtenGelu():
        found, expected = compiled(BATCH), model(BATCH)
    torch.testing.assert_close(found, expected)
    assert abs(found - model(BATCH)) > 1e-3


# torch.func.jvp warns of torch.jit.script.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is:DeprecationWarning")
def test_transforms_and_tangents_are_refused() -> None:
    compiled = _compiled()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return compiled(x)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: torch.func.grad(loss)(BATCH),
        lambda: torch.func.vmap(loss)(BATCH[None]),
        lambda: torch.func.jvp(loss, (BATCH,), (BATCH,)),
    )
    for call in calls:
        with pytest.raises(autopar.RunError, match=r"a transform of torch\.func"):
            call()
    with (
        forward.dual_level(),
        pytest.raises(autopar.RunError, match=r"has a tangent \(forward-mode"),
    ):
        compiled(forward.make_dual(BATCH, torch.ones_like(BATCH)))


def test_tensors_with_own_code_are_refused() -> None:
    compiled = _compiled()
    doubled = BATCH.as_subclass(Doubled)
    with pytest.raises(autopar.RunError, match=r"Doubled, a subclass of Tensor.*\.as_subclass"):
        compiled(doubled)
    distributed = distribute_tensor(BATCH, init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(autopar.RunError, match=r"is a DTensor: pass a plain tensor"):
        compiled(distributed)
    for plain in (BATCH, nn.Parameter(BATCH), nn.Buffer(BATCH), doubled.as_subclass(torch.Tensor)):
        compiled(plain)
