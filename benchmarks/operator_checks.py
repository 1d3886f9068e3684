"""One sample input: captured, and each node split in every way on ranks that are emulated."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from emulate import Program, Row, close, every, local, tensors_in
from operator_cases import (
    NOT_EXPORTABLE,
    REFUSED,
    SPLIT,
    TOLERANCE,
    UNSPLIT,
    Case,
    draws_numbers,
    eager_step,
    first_line,
    is_random,
)
from torch import nn
from torch.utils._pytree import tree_map

from autopar.capture.capture_graph import capture
from autopar.errors import AutoparError, CaptureError
from autopar.ir.captured import CapturedModel
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.rules import rule_of

AROUND = {  # what the module does beside the operator
    torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.remainder.Scalar,
    torch.ops.aten.sum.dim_IntList, torch.ops.aten.reshape.default, torch.ops.aten.to.dtype,
    torch.ops.aten.view_as_real.default,
}  # fmt: skip


class _Values(fx.Interpreter):
    """Runs a captured graph, and keeps what each node read and made."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(nn.Module(), graph))
        self.seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self.seen[n.name] = self.fetch_args_kwargs_from_env(n)
        return super().run_node(n)


def check(case: Case, checked: set[str]) -> tuple[str, str]:
    """What becomes of a case, and the reason; ``checked`` are the calls around the operator that
    need not be checked again, to which it adds."""
    model = case.model()
    try:
        eager_step(model, case.tensors)
    except Exception as e:
        return NOT_EXPORTABLE, f"not even eager: {first_line(e)}"
    try:
        raw = capture(model, case.tensors)
    except CaptureError as e:
        if e.__cause__ is not None:  # export's own
            return NOT_EXPORTABLE, first_line(e.__cause__)
        return REFUSED, first_line(e)
    try:
        captured = canonicalise(raw)
    except AutoparError as e:
        return REFUSED, first_line(e)
    interpreter = _check_captured(case, model, captured)
    return _split(captured.graph, interpreter.seen, checked)


def _check_captured(case: Case, model: nn.Module, captured: CapturedModel) -> _Values:
    """Runs the captured graph, which must compute what the model does unless it draws numbers."""
    loss, grads = eager_step(model, case.tensors)
    tensors = {i.target: i for i in captured.inputs}
    given = iter(case.tensors)
    state = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = [
        next(given)
        if i.kind == "input"
        else state[i.target]
        if i.target in state
        else captured.state[i.target]
        for i in tensors.values()
    ]
    interpreter = _Values(captured.graph)
    torch.manual_seed(1)
    found = interpreter.run(*values, enable_io_processing=False)[captured.loss]
    if not draws_numbers(captured.graph):
        close(found.detach(), loss, "captured", TOLERANCE)
        for name, grad in zip(
            state, torch.autograd.grad(found, list(state.values()), allow_unused=True), strict=True
        ):
            if (expected := grads[name]) is not None:
                grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
                close(
                    grad if grad is not None else torch.zeros_like(expected),
                    expected,
                    f"captured gradient of {name}",
                    TOLERANCE,
                )
    return interpreter


def _split(graph: fx.Graph, seen: dict[str, Any], checked: set[str]) -> tuple[str, str]:
    """Each node in each of its ways; of the calls that the module itself makes each kind once."""
    without: list[str] = []
    calls = [n for n in graph.nodes if n.op == "call_function" and n.name in seen]
    for node in calls:
        rule = rule_of(node)
        if rule is None:
            without.append(str(node.target))
            continue
        if str(node.target) == "<built-in function getitem>" or is_random(node):
            continue
        args, kwargs = tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, seen[node.name]
        )
        if node.target in AROUND:
            kind = f"{node.target} {tree_map(_kind, (args, kwargs))}"
            if kind in checked:
                continue
            checked.add(kind)
        program = Program(Row(node.target, args, kwargs, _without_gradient(node, args, kwargs)))
        for strategy in local(every(program, (2,))):
            try:
                program.check(strategy, (2,))
            except AssertionError as e:
                raise AssertionError(f"{node.target} as {strategy}: {e}") from e
    return (UNSPLIT, ", ".join(dict.fromkeys(without))) if without else (SPLIT, "")


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def _without_gradient(node: fx.Node, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Which operands torch has no derivative for."""
    tensors = tensors_in((args, kwargs))
    leaves = iter(
        t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors
    )
    values = [next(leaves) for _ in tensors]
    left = iter(values)
    given = tree_map(lambda x: next(left) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    try:
        results = [r for r in tensors_in(node.target(*given[0], **given[1])) if r.requires_grad]  # type: ignore[operator]
        wanted = [v for v in values if v.requires_grad]
        if results and wanted:
            torch.autograd.grad(
                results, wanted, [torch.ones_like(r) for r in results], allow_unused=True
            )
    except (RuntimeError, NotImplementedError):
        return tuple(range(len(tensors)))
    return ()
