"""Captured equals eager: the model and its captured graph run once on the sample, and what they
make is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.module_state import ModuleState, model_restored
from autopar.capture.sample_call import sample_arguments, traced_call
from autopar.errors import CaptureError, RunError
from autopar.ir.captured import CapturedModel, LossFunction
from autopar.verification.differences import (
    TOLERANCE,
    Difference,
    StepResults,
    differences,
    relative_error,
)

ChangeOutputs = Callable[[Sequence[Any]], Sequence[Any]]
_GIVEN = ("input", "hoisted")  # kinds of placeholders that are none of the model's state
_BYTES = 1 << 31  # of tensors in the graph: a larger one is not run on one device


class SampleError(RunError):
    """The model fails on one device."""


def not_comparable(captured: CapturedModel, model: nn.Module, sample: Any) -> str:
    """Why model and graph are not run on ``sample``; empty where they can be."""
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
    if nbytes > _BYTES:
        return f"the graph's tensors take {nbytes / 2**30:.1f} GiB"
    return ""


def check_captured(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> list[Difference]:
    """Runs the model and ``captured``, the canonical graph of its training, on ``sample``; returns
    what was compared.

    Model and sample are afterwards as they were: gradients, buffers, modes, attributes of modules,
        and the random numbers to come.

    Raises:
        CaptureError: they differ, or the forward changes an attribute from call to call.
        SampleError: the model itself fails on this sample: its labels may be any numbers, or it may
            be too large for one device.
    """
    with model_restored(model), torch.enable_grad():
        try:
            eager = eager_step(captured, model, sample, loss_fn)
        except CaptureError:
            raise
        except Exception as e:
            raise SampleError(
                f"the model fails on the sample, {type(e).__name__}: "
                f"{str(e).splitlines()[0] if str(e) else ''}"
            ) from e
    with model_restored(model), torch.enable_grad():
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
        with model_restored(model), torch.enable_grad():
            place = _first_place(captured, model, sample, loss_fn) or _behind(found)
        raise CaptureError(
            f"the captured graph is not what the model computes: {first.name} is {first.found}, "
            f"in the model {first.expected} "
            f"(error {first.error:.1e}, allowed {first.allowed:.0e}){place}; {len(wrong)} of "
            f"{len(found)} things compared differ. "
            "Python values that change, and what autograd does not see, are not in the graph; "
            "verify=False compiles all the same"
        )
    return found


def eager_step(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> StepResults:
    """Forward and backward of the model in train(), which changes its buffers.

    Raises CaptureError where the forward changes an attribute from call to call.
    """
    _training(model)
    before = ModuleState(model)
    with _SameNumbers():
        leaves = pytree.tree_leaves(_outputs(model, sample, loss_fn))
        after = ModuleState(model)
        made = _results(captured, leaves, {n: b.clone() for n, b in model.named_buffers()})
        if changed := after.changed_since(before):
            before.put_back_buffers()
            with torch.no_grad():
                again = pytree.tree_leaves(_outputs(model, sample, loss_fn))
            _check_state(changed, ModuleState(model).numbers_changed_since(after), leaves, again)
    return made


def _outputs(model: nn.Module, sample: Any, loss_fn: LossFunction | None) -> Any:
    module, args, kwargs = traced_call(model, _copied(sample), loss_fn)
    return module(*args, **kwargs)


def _copied(sample: Any) -> Any:
    """For one forward, which may write to its input."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), sample
    )


def _training(model: nn.Module) -> None:
    """As it is traced: all of it in training, which passes make into what any of it does in
    ``eval()``.
    """
    for module in model.modules():
        module.training = True


def _check_state(
    changed: Sequence[str], each_time: Sequence[str], first: Sequence[Any], second: Sequence[Any]
) -> None:
    advice = (
        "a compiled model has the value of its trace for good. Register it as a buffer and "
        "write to that, or keep it outside of the forward"
    )
    if each_time:  # once is a cache, each time a counter
        raise CaptureError(
            f"the forward changes {', '.join(each_time)} from call to call: {advice}"
        )
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor)]
    if any(relative_error(b, a) > TOLERANCE.get(a.dtype, 0.0) for a, b in pairs):
        raise CaptureError(
            f"what the forward computes depends on {', '.join(changed)}, which it changes: {advice}"
        )


def graph_step(
    captured: CapturedModel, given: Sequence[torch.Tensor], change: ChangeOutputs | None = None
) -> StepResults:
    """Forward and backward of the captured graph.

    Args:
        given: the user's tensors and what was hoisted, in the order of ``captured.inputs``.
        change: makes other outputs of the graph's, before the backward.
    """
    own = {i.target: captured.state[i.target] for i in captured.inputs if i.kind not in _GIVEN}
    own = {
        name: t if isinstance(t, nn.Parameter) else t.clone() for name, t in own.items()
    }  # statistics are written to
    buffers = {i.target: own[i.target] for i in captured.inputs if i.kind == "buffer"}
    with _SameNumbers():
        flat = _run(
            captured, given, fx.Interpreter(fx.GraphModule(nn.Module(), captured.graph)), own
        )
        count = captured.out_spec.num_leaves
        outputs = change(flat[:count]) if change is not None else flat[:count]
        return _results(
            captured, outputs, {**buffers, **dict(zip(captured.updates, flat[count:], strict=True))}
        )


def tensors_of(captured: CapturedModel, sample: Any) -> list[torch.Tensor]:
    """The tensors of a sample that the graph has placeholders for, in their order: copies, which a
    forward may write to.
    """
    leaves = captured.in_spec.flatten_up_to(sample_arguments(_copied(sample)))
    return [leaf for i, leaf in enumerate(leaves) if i not in captured.constant_inputs]


def _run(
    captured: CapturedModel,
    given: Sequence[torch.Tensor],
    interpreter: fx.Interpreter,
    own: Mapping[str, torch.Tensor],
) -> Sequence[Any]:
    tensors = iter(given)
    return interpreter.run(
        *[next(tensors) if i.kind in _GIVEN else own[i.target] for i in captured.inputs]
    )  # type: ignore[no-any-return]


def _results(
    captured: CapturedModel, leaves: Sequence[Any], buffers: dict[str, torch.Tensor]
) -> StepResults:
    outputs = {
        output_name(captured, i): v for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)
    }
    loss, trained = (
        outputs["loss"],
        {
            n: t
            for n, t in captured.state.items()
            if isinstance(t, nn.Parameter) and t.requires_grad
        },
    )
    found = _gradients(loss, list(trained.values())) if loss.requires_grad else ()
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(trained, dense, strict=True)) if loss.requires_grad else {}
    done = {
        "loss": outputs.pop("loss").detach(),
        **{name: v.detach() for name, v in outputs.items()},
    }
    return StepResults(done, gradients, buffers)


def output_name(captured: CapturedModel, i: int) -> str:
    """What messages call flat output ``i``."""
    return "loss" if i == captured.loss else f"output {i}"


def _gradients(loss: torch.Tensor, parameters: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    try:
        return torch.autograd.grad(
            loss, parameters, allow_unused=True
        )  # and not backward, which calls hooks that may step an optimizer
    except RuntimeError as e:
        if "checkpoint" not in str(e):
            raise
    before = [p.grad for p in parameters]  # a re-entrant checkpoint knows backward alone
    for p in parameters:
        p.grad = None
    loss.backward()
    found = [p.grad for p in parameters]
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad
    return found


def _first_place(
    captured: CapturedModel, model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> str:
    """The first module to be done whose results are nowhere among those of its part of the
    graph.
    """
    done: list[tuple[str, torch.Tensor]] = []

    def note(name: str) -> Any:
        return lambda module, given, out: done.extend(
            (name, t.detach().clone()) for t in pytree.tree_leaves(out) if _floats(t)
        )

    handles = [
        module.register_forward_hook(note(name)) for name, module in model.named_modules() if name
    ]
    try:
        _training(model)
        with _SameNumbers():
            _outputs(model, sample, loss_fn)
    finally:
        for handle in handles:
            handle.remove()
    watched = _Values(captured.graph)
    with _SameNumbers():
        _run(
            captured,
            tensors_of(captured, sample),
            watched,
            {name: t.clone() for name, t in captured.state.items()},
        )
    for name, value in done:
        inside = [
            (n, t) for n, t in watched.seen if f"{n.meta.get('module', '')}.".startswith(f"{name}.")
        ]
        allowed = TOLERANCE.get(value.dtype, 0.0)
        if inside and not any(
            t.shape == value.shape and relative_error(t, value) <= allowed for _, t in inside
        ):
            return (
                f"; the first module that differs is {name!r}, at "
                f"{inside[-1][0].meta.get('source')}"
            )
    return ""


def _floats(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


class _SameNumbers(TorchDispatchMode):
    """Random operators draw the same for the same operands' shapes, in whatever order they run, and
    whether they write them to a tensor (``normal_``) or return a new one (``normal_functional``,
    ``uniform``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            shapes = [
                tuple(a.shape) if isinstance(a, torch.Tensor) else a
                for a in args
                if isinstance(a, (torch.Tensor, list, tuple))
            ]
            name = (
                f"{func.overloadpacket}".removesuffix("_functional")
                .removesuffix("_")
                .replace("randint_like", "random")
            )
            torch.manual_seed(zlib.crc32(f"{name} {shapes}".encode()))
        return func(*args, **(kwargs or {}))


class _Values(fx.Interpreter):
    """Keeps what each call returns."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(nn.Module(), graph))
        self.seen: list[tuple[fx.Node, torch.Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        """As an interpreter does."""
        result = super().run_node(n)
        self.seen.extend(
            (n, t.detach())
            for t in pytree.tree_leaves(result)
            if n.op == "call_function" and _floats(t)
        )
        return result


def _behind(found: Sequence[Difference]) -> str:
    """Where values agree and gradients do not."""
    gradients = [d for d in found if d.name.startswith("gradient of ")]
    right = [d.name for d in gradients if d.is_allowed]
    wrong = [d.name for d in gradients if not d.is_allowed]
    return (
        f"; its values agree, but the {wrong[-1]} does not"
        + (f" (the {right[-1]} does)" if right else "")
        if wrong
        else ""
    )
