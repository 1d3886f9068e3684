"""The dtypes of the user's model stay, and tf32 holds within a step only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from casts_by_hand import build
from equivalence import loss_of, step
from pool import Pools
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import CaptureError


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights; the two heads are tied."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.body, self.head, self.again = (
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        self.again.weight = self.head.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.head(self.body(x)[0] * self.scale))  # type: ignore[operator]
        assert y.dtype == torch.bfloat16
        if self.fails and y.sum() > 0:
            raise ValueError
        return y.square().mean()


def contents(model: nn.Module) -> list[tuple[Any, ...]]:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return [
        (name, id(t), t.dtype, t.requires_grad, t.data_ptr(), t._version)
        for name, t in tensors.items()
    ]


@pytest.mark.filterwarnings(
    "ignore:The tensor attributes self.body._flat_weights:UserWarning"
)  # torch's warning for every RNN
@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_the_model_as_it_is(fails: bool) -> None:
    model, x = Recurrent(fails), torch.randn(2, 3, 4)
    before, listed = contents(model), [id(w) for w in model.body._flat_weights]
    with contextlib.nullcontext() if not fails else pytest.raises(CaptureError):
        autopar.plan(model, x, 1, precision="bf16", progress=False)
    assert contents(model) == before
    assert [id(w) for w in model.body._flat_weights] == listed
    assert list(model.state_dict()) == [n for n, *_ in before if n != "scale"]


# -- tf32
# --------------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """The float32 matmul precision at each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        ):
            self.found.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


def _tf32(options: dict[str, Any]) -> None:
    def setting() -> tuple[str, str, str]:
        backends = torch.backends
        return (
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,
        )

    model, sample = zoo.mlp()
    expected, before = step(copy.deepcopy(model), sample), setting()
    compiled = build(model, sample, precision="tf32", **options)
    with Watching() as watching:
        loss = loss_of(compiled(**sample))
        forward, between = len(watching.found), setting()
        loss.backward()
    assert set(watching.found) == {"high"}
    assert (
        len(watching.found) == 8 if not options else 16 and forward
    )  # three layers forward and backward, without the gradient of the input
    assert between == setting() == before
    found = {n: p.grad for n, p in compiled.named_parameters()}
    for n, gradient in expected.gradients.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        compiled(**sample)
    assert setting() == before
    with pytest.raises(autopar.RunError):
        compiled()
    assert setting() == before


@pytest.mark.parametrize("options", [{}, dict(micro_batch_size=4)], ids=["whole", "microbatches"])
def test_tf32_holds_within_a_step_only(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(1).run(_tf32, options)
