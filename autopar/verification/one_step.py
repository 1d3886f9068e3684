"""Runs one training step on one device: of the model, and of its captured graph."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.module_state import ModuleState
from autopar.capture.sample_call import sample_arguments, traced_call
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.verification.differences import TOLERANCE, StepResults, relative_error

ChangeOutputs = Callable[[Sequence[Any]], Sequence[Any]]
_GIVEN = ("input", "hoisted")  # kinds of placeholders that are no state of the model


def eager_step(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> StepResults:
    """Forward and backward of the model in training mode, which changes the model's buffers.

    Raises:
        CaptureError: the forward changes an attribute from call to call, or a buffer of the loss
            function.
    """
    set_training(model)
    called = called_module(model, sample, loss_fn)
    before = ModuleState(called)
    with SameRandomNumbers():
        leaves = pytree.tree_leaves(model_outputs(model, sample, loss_fn))
        after = ModuleState(called)
        _check_loss_buffers(before, after)
        results = _results(captured, leaves, {n: b.clone() for n, b in model.named_buffers()})
        if changed := after.changed_since(before):
            before.put_back_buffers()
            with torch.no_grad():
                second = pytree.tree_leaves(model_outputs(model, sample, loss_fn))
            each_call = ModuleState(called).numbers_changed_since(after)
            _check_state(changed, each_call, leaves, second)
    return results


def graph_step(
    captured: CapturedModel, given: Sequence[torch.Tensor], change: ChangeOutputs | None = None
) -> StepResults:
    """Forward and backward of the captured graph.

    Args:
        captured: the captured model.
        given: the sample's tensors and the hoisted values, in the order of ``captured.inputs``.
        change: replaces the outputs of the graph before the backward.
    """
    state = {i.target: captured.state[i.target] for i in captured.inputs if i.kind not in _GIVEN}
    # The graph writes to statistics, so it gets copies of them.
    own = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in state.items()}
    buffers = {i.target: own[i.target] for i in captured.inputs if i.kind == "buffer"}
    interpreter = fx.Interpreter(fx.GraphModule(nn.Module(), captured.graph))
    with SameRandomNumbers():
        flat = run_graph(captured, given, interpreter, own)
        count = captured.out_spec.num_leaves
        outputs = change(flat[:count]) if change is not None else flat[:count]
        buffers |= zip(captured.updates, flat[count:], strict=True)
        return _results(captured, outputs, buffers)


def called_module(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> nn.Module:
    """The model, or where there is a loss function, a module that holds both."""
    return traced_call(model, sample, loss_fn)[0]


def model_outputs(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> Any:
    """The outputs of the model, with the user's loss if there is one."""
    module, args, kwargs = traced_call(model, _copied(sample), loss_fn)
    return module(*args, **kwargs)


def run_graph(
    captured: CapturedModel,
    given: Sequence[torch.Tensor],
    interpreter: fx.Interpreter,
    own: Mapping[str, torch.Tensor],
) -> Sequence[Any]:
    """The flat results of the graph, on ``given`` inputs and the model's ``own`` tensors."""
    tensors = iter(given)
    arguments = [next(tensors) if i.kind in _GIVEN else own[i.target] for i in captured.inputs]
    return interpreter.run(*arguments)  # type: ignore[no-any-return]


def tensors_of(captured: CapturedModel, sample: Any) -> list[torch.Tensor]:
    """Copies of the sample's tensors that the graph has placeholders for, in their order."""
    leaves = captured.in_spec.flatten_up_to(sample_arguments(_copied(sample)))
    return [leaf for i, leaf in enumerate(leaves) if i not in captured.constant_inputs]


def output_name(captured: CapturedModel, i: int) -> str:
    """The name of flat output ``i`` in messages."""
    return "loss" if i == captured.loss else f"output {i}"


def set_training(model: nn.Module) -> None:
    """Sets all modules to training mode, the mode in which models are traced."""
    for module in model.modules():
        module.training = True


def is_floating(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


class SameRandomNumbers(TorchDispatchMode):
    """Within, a random operator draws the same numbers for operands of the same shapes.

    The order of the operators does not matter, nor whether an operator writes to a tensor
    (``normal_``) or returns a new one (``normal_functional``, ``uniform``).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            shapes = [
                tuple(a.shape) if isinstance(a, torch.Tensor) else a
                for a in args
                if isinstance(a, (torch.Tensor, list, tuple))
            ]
            name = f"{func.overloadpacket}".removesuffix("_functional").removesuffix("_")
            name = name.replace("randint_like", "random")
            torch.manual_seed(zlib.crc32(f"{name} {shapes}".encode()))
        return func(*args, **(kwargs or {}))


def _copied(sample: Any) -> Any:
    """A copy of the sample, because a forward may write to its input."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), sample
    )


def _check_loss_buffers(before: ModuleState, after: ModuleState) -> None:
    """Raises CaptureError where a loss function changes its own buffers."""
    for name, value in after.buffers.items():
        was = before.buffers.get(name)
        if name.startswith("loss_fn.") and (was is None or not torch.equal(value, was)):
            raise CaptureError(
                f"the loss function changes its buffer {name}; only buffers of the model may "
                "change: make the loss function a part of the model, and return its result as loss"
            )


def _check_state(
    changed: Sequence[str], each_call: Sequence[str], first: Sequence[Any], second: Sequence[Any]
) -> None:
    """Raises CaptureError where a forward changes its state in a way that a graph cannot repeat.

    An attribute that changes in the first call only is a cache, and passes unless the outputs of
    the ``first`` and ``second`` call differ. An attribute that changes in ``each_call`` counts.
    """
    advice = (
        "a compiled model has the value of its trace for good. Register it as a buffer and "
        "write to that, or keep it outside of the forward"
    )
    if each_call:
        raise CaptureError(f"the forward changes {_names(each_call)} from call to call: {advice}")
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor)]
    if any(relative_error(b, a) > TOLERANCE.get(a.dtype, 0.0) for a, b in pairs):
        raise CaptureError(
            f"what the forward computes depends on {_names(changed)}, which it changes: {advice}"
        )


def _names(attributes: Sequence[str]) -> str:
    return ", ".join(name.removeprefix("model.") for name in attributes)


def _results(
    captured: CapturedModel, leaves: Sequence[Any], buffers: dict[str, torch.Tensor]
) -> StepResults:
    tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    outputs = {output_name(captured, i): tensor for i, tensor in tensors}
    loss, state = outputs["loss"], captured.state.items()
    trained = {n: t for n, t in state if isinstance(t, nn.Parameter) and t.requires_grad}
    found = _gradients(loss, list(trained.values())) if loss.requires_grad else ()
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(trained, dense, strict=True)) if loss.requires_grad else {}
    others = {name: v.detach() for name, v in outputs.items() if name != "loss"}
    return StepResults({"loss": loss.detach(), **others}, gradients, buffers)


def _gradients(loss: torch.Tensor, parameters: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    try:
        # Not backward(), which calls hooks that may step an optimizer.
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as e:
        if "checkpoint" not in str(e):
            raise
    before = [p.grad for p in parameters]  # a re-entrant checkpoint supports only backward()
    for p in parameters:
        p.grad = None
    loss.backward()
    found = [p.grad for p in parameters]
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad
    return found
