"""Captures a model and a sample of its input as an ATen graph.

The model's parameters and buffers become placeholders of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.export_program import export
from autopar.capture.exported_graph import captured_model, input_paths
from autopar.capture.frozen_values import AttributeReads
from autopar.capture.sample_call import cache_off, sample_arguments, traced_call
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.ir.precision import fake_dtype, needs_cast


def capture(
    model: nn.Module,
    sample_input: Any,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | None = None,
    repeat_layers: bool = False,
) -> CapturedModel:
    """Trace ``model`` on ``sample_input``. This changes, computes and allocates nothing.

    Args:
        model: a model on one device, which may be ``meta``. It is captured in its current mode,
            ``train`` or ``eval``.
        sample_input: a tensor, a tuple of positional arguments, or a dict of keywords, with the
            shapes of the global batch. Values and device do not matter.
        loss_fn: ``loss_fn(output, batch) -> scalar``, where ``batch`` has the structure of
            ``sample_input``. Keywords (or trailing positional arguments) that the model's forward
            does not take, such as labels, go to ``loss_fn`` only. The captured output is then
            ``dict(loss=..., output=...)``. Without ``loss_fn``, the model's own output must have a
            ``loss``.
        dtype: the dtype of floating-point parameters, buffers and inputs in the graph; by default
            their own.
        repeat_layers: whether to trace few layers of each kind. The graph then has one call for
            each other layer, in whose place the canonical form has its nodes.

    Raises:
        CaptureError: the model cannot be traced, has no loss, or has shapes that depend on data.
    """
    in_spec = pytree.tree_structure(sample_arguments(sample_input))
    traced, args, kwargs = traced_call(model, sample_input, loss_fn)
    prefix = "" if traced is model else "model."
    added = cache_off(model, *sample_arguments(sample_input))
    notes: tuple[str, ...] = ("use_cache=False was added to the model's inputs",) if added else ()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _blank(_device(model), dtype), (args, kwargs))
    reads = AttributeReads(traced)
    with fake_dtype(model, dtype), reads.recording():
        program = export(traced, args, kwargs, model, repeat_layers)
    captured = captured_model(program, model, prefix, in_spec, notes)
    given = dict(
        zip(input_paths(in_spec), pytree.tree_leaves(sample_arguments(sample_input)), strict=False)
    )
    return replace(
        captured,
        compute_dtype=dtype,
        stored_dtypes=_stored(captured, given),
        attributes_read=frozenset(reads.found),
        tensors_read=tuple(
            captured.state[i.target] for i in captured.inputs if i.kind == "constant"
        ),
    )


def _device(model: nn.Module) -> torch.device | None:
    return next((t.device for t in (*model.parameters(), *model.buffers())), None)


def _blank(
    device: torch.device | None, dtype: torch.dtype | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes an empty tensor like one of the sample's, on the model's device.

    Each tensor gets its own memory, because torch.export takes a tensor that is given twice for one
    input.
    """

    def make(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if needs_cast(tensor, dtype) else tensor.dtype
        return torch.empty_like(
            tensor, dtype=kind, device=device or tensor.device, requires_grad=tensor.requires_grad
        )

    return make


def _stored(captured: CapturedModel, given: dict[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of tensors that have another dtype than their placeholder, by its name.

    ``given`` are the user's inputs, by name.
    """
    tensors = {
        i.name: given[i.target] if i.kind == "input" else captured.state[i.target]
        for i in captured.inputs
    }
    placeholders = captured.graph.find_nodes(op="placeholder")
    return {
        n.name: tensors[n.name].dtype
        for n in placeholders
        if tensors[n.name].dtype != n.meta["val"].dtype
    }
