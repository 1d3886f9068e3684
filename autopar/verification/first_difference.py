"""Finds the first place where a model and its captured graph differ, for an error message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.ir.captured import CapturedModel, LossFunction
from autopar.verification.differences import TOLERANCE, Difference, relative_error
from autopar.verification.one_step import (
    SameRandomNumbers,
    is_floating,
    model_outputs,
    run_graph,
    set_training,
    tensors_of,
)


def first_module_that_differs(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> str:
    """The first module with a result that no node of its part of the graph computes; "" for none.

    Modules are in the order in which their forwards end.
    """
    watched = _WatchedInterpreter(captured.graph)
    results = _module_results(model, sample, loss_fn)
    with SameRandomNumbers():
        own = {name: t.clone() for name, t in captured.state.items()}
        run_graph(captured, tensors_of(captured, sample), watched, own)
    for name, value in results:
        inside = [
            (n, t) for n, t in watched.seen if f"{n.meta.get('module', '')}.".startswith(f"{name}.")
        ]
        allowed = TOLERANCE.get(value.dtype, 0.0)
        if inside and not any(
            t.shape == value.shape and relative_error(t, value) <= allowed for _, t in inside
        ):
            source = inside[-1][0].meta.get("source")
            return f"; the first module that differs is {name!r}, at {source}"
    return ""


def gradient_that_differs(found: Sequence[Difference]) -> str:
    """For a model whose values agree: the last parameter whose gradient differs; "" for none."""
    gradients = [d for d in found if d.name.startswith("gradient of ")]
    right = [d.name for d in gradients if d.is_allowed]
    wrong = [d.name for d in gradients if not d.is_allowed]
    if not wrong:
        return ""
    agrees = f" (the {right[-1]} does)" if right else ""
    return f"; its values agree, but the {wrong[-1]} does not{agrees}"


def _module_results(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> list[tuple[str, torch.Tensor]]:
    """The floating-point results of all modules, in the order in which their forwards end."""
    results: list[tuple[str, torch.Tensor]] = []

    def note(name: str) -> Any:
        return lambda module, given, out: results.extend(
            (name, t.detach().clone()) for t in pytree.tree_leaves(out) if is_floating(t)
        )

    handles = [
        module.register_forward_hook(note(name)) for name, module in model.named_modules() if name
    ]
    try:
        set_training(model)
        with SameRandomNumbers():
            model_outputs(model, sample, loss_fn)
    finally:
        for handle in handles:
            handle.remove()
    return results


class _WatchedInterpreter(fx.Interpreter):
    """Runs a graph and keeps the floating-point results of its calls."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(nn.Module(), graph))
        self.seen: list[tuple[fx.Node, torch.Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, as an interpreter does."""
        result = super().run_node(n)
        self.seen.extend(
            (n, t.detach())
            for t in pytree.tree_leaves(result)
            if n.op == "call_function" and is_floating(t)
        )
        return result
