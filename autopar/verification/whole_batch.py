"""Compares a model with its captured graph on the whole sample, in one training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.module_state import model_restored
from autopar.errors import CaptureError, RunError, first_line
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.verification.differences import Difference, differences
from autopar.verification.first_difference import (
    first_module_that_differs,
    gradient_that_differs,
)
from autopar.verification.one_step import called_module, eager_step, graph_step, tensors_of

_MAX_BYTES = 1 << 31  # a graph with more bytes of tensors is not run on one device


class SampleError(RunError):
    """The model fails on one device."""


def not_comparable(captured: CapturedModel, model: nn.Module, sample: Any) -> str:
    """The reason why model and graph cannot run on ``sample``; empty where they can."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(t for t in pytree.tree_leaves(sample) if isinstance(t, torch.Tensor)),
    ]
    if any(t.is_meta for t in tensors):
        return "weights or sample are on the meta device"
    if (
        any(p.is_floating_point() and p.dtype != captured.compute_dtype for p in model.parameters())
        and captured.compute_dtype is not None
    ):
        return f"the graph computes in {captured.compute_dtype}, the model does not"
    made = [n.meta["val"] for n in captured.graph.nodes if n.op == "call_function"]
    nbytes = sum(
        t.numel() * t.element_size()
        for t in pytree.tree_leaves(made)
        if isinstance(t, torch.Tensor)
    )
    if nbytes > _MAX_BYTES:
        return f"the graph's tensors take {nbytes / 2**30:.1f} GiB"
    return ""


def check_captured(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> list[Difference]:
    """Runs the model and ``captured``, the canonical graph of its training, on ``sample``.

    Afterwards model and sample are as before: gradients, buffers, modes, attributes of modules, and
    the state of random numbers. Returns the comparison of each tensor.

    Raises:
        CaptureError: they differ, or the forward changes an attribute from call to call.
        SampleError: the model itself fails on this sample, for example because the sample has
            invalid labels or is too large for one device.
    """
    called = called_module(model, sample, loss_fn)
    with model_restored(called), torch.enable_grad():
        try:
            eager = eager_step(captured, model, sample, loss_fn)
        except CaptureError:
            raise
        except Exception as e:
            raise SampleError(
                f"the model fails on the sample, {type(e).__name__}: {first_line(e)}"
            ) from e
    with model_restored(called), torch.enable_grad():
        try:
            graph = graph_step(captured, tensors_of(captured, sample))
        except Exception as e:
            raise CaptureError(
                f"the captured graph does not run where the model does, {type(e).__name__}: {e}; "
                "verify=False compiles all the same"
            ) from e
    found = differences(graph, eager)
    wrong = [d for d in found if not d.is_allowed]
    if wrong:
        first = wrong[0]
        with model_restored(called), torch.enable_grad():
            place = first_module_that_differs(
                captured, model, sample, loss_fn
            ) or gradient_that_differs(found)
        raise CaptureError(
            f"the captured graph is not what the model computes: {first.name} is {first.found}, "
            f"in the model {first.expected} "
            f"(error {first.error:.1e}, allowed {first.allowed:.0e}){place}; {len(wrong)} of "
            f"{len(found)} things compared differ. "
            "Python values that change, and what autograd does not see, are not in the graph; "
            "verify=False compiles all the same"
        )
    return found
