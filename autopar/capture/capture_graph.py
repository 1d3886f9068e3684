"""Capture: a model and a sample of its input become an ATen graph whose state is lifted to
placeholders.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autopar.capture.export_program import export, source_line
from autopar.capture.function_tracer import is_transformed
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel, GraphInput, LossFunction
from autopar.ir.nodes import describe_node
from autopar.ir.precision import fake_dtype, needs_cast


def capture(
    model: nn.Module,
    sample_input: Any,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | None = None,
) -> CapturedModel:
    """Trace ``model`` on ``sample_input``; neither is changed, and nothing is computed or
    allocated.

    Args:
        model: on any one device, ``meta`` included; captured in the mode (``train`` or ``eval``)
            that it is in.
        sample_input: a tensor, a tuple of positional arguments, or a dict of keywords, with the
            shapes of the global batch. Values and device do not matter.
        loss_fn: ``loss_fn(output, batch) -> scalar``, where ``batch`` has the structure of
            ``sample_input``. Keywords (or trailing positional arguments) that the model's forward
            does not take, such as labels, are given to ``loss_fn`` alone. The captured output is
            then ``dict(loss=..., output=...)``. Without it, the model's own output must have a
            ``loss``.
        dtype: that of floating-point parameters, buffers and inputs in the graph; as they are
            unless given.

    Raises:
        CaptureError: the model cannot be traced, has no loss, or has shapes that depend on data.
    """
    in_spec = pytree.tree_structure(sample_arguments(sample_input))
    traced, args, kwargs = traced_call(model, sample_input, loss_fn)
    prefix = "" if traced is model else "model."
    added = _cache_off(model, *sample_arguments(sample_input))
    notes: tuple[str, ...] = ("use_cache=False was added to the model's inputs",) if added else ()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _blank(_device(model), dtype), (args, kwargs))
    with fake_dtype(model, dtype):
        program = export(traced, args, kwargs, model)
    captured = _unlift(program, model, prefix, in_spec, notes)
    given = dict(
        zip(_input_paths(in_spec), pytree.tree_leaves(sample_arguments(sample_input)), strict=False)
    )
    return replace(captured, compute_dtype=dtype, stored_dtypes=_stored(captured, given))


def traced_call(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What is traced for a sample: a module, the model itself or with the loss behind it, and its
    arguments.
    """
    args, kwargs = sample_arguments(sample)
    extra = _cache_off(model, args, kwargs)
    if loss_fn is not None:
        return _WithLoss(model, loss_fn, type(sample), extra), args, kwargs
    return model, args, {**kwargs, **extra}


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that a sample is."""
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    try:
        return (), dict(sample)  # transformers' BatchEncoding too
    except (TypeError, ValueError):
        kind = type(sample).__name__
        raise CaptureError(
            f"sample_input is a {kind}; give a tensor, a tuple of arguments or a dict of keywords"
        ) from None


def _cache_off(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers models return a key-value cache unless told not to, and export cannot return
    one.
    """
    names = list(inspect.signature(model.forward).parameters)
    return (
        {"use_cache": False}
        if "use_cache" in names[len(args) :] and "use_cache" not in kwargs
        else {}
    )


def _device(model: nn.Module) -> torch.device | None:
    return next((t.device for t in (*model.parameters(), *model.buffers())), None)


def _blank(
    device: torch.device | None, dtype: torch.dtype | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tensor like the sample's on the model's device, with a memory of its own: export takes one
    tensor given twice for one input.
    """

    def make(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if needs_cast(tensor, dtype) else tensor.dtype
        return torch.empty_like(
            tensor, dtype=kind, device=device or tensor.device, requires_grad=tensor.requires_grad
        )

    return make


def _stored(captured: CapturedModel, given: dict[str, Any]) -> dict[str, torch.dtype]:
    """The placeholders whose tensors have another dtype than the graph, and that dtype; ``given``
    are the user's inputs.
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


class _WithLoss(nn.Module):
    """The model followed by the user's loss."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, kind: type, extra: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.kind, self.extra = model, loss_fn, kind, extra
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {p.kind for p in parameters}
        self.names = (
            None if inspect.Parameter.VAR_KEYWORD in kinds else {p.name for p in parameters}
        )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.count = (
            None
            if inspect.Parameter.VAR_POSITIONAL in kinds
            else sum(p.kind in positional for p in parameters)
        )

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        known = {k: v for k, v in kwargs.items() if self.names is None or k in self.names}
        output = self.model(*args[: self.count], **known, **self.extra)
        batch = (
            args[0]
            if issubclass(self.kind, torch.Tensor)
            else args
            if issubclass(self.kind, (tuple, list))
            else kwargs
        )
        return {"loss": self.loss_fn(output, batch), "output": output}


_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def _unlift(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    prefix: str,
    in_spec: pytree.TreeSpec,
    notes: tuple[str, ...],
) -> CapturedModel:
    graph, out_spec = program.graph, program.call_spec.out_spec
    assert out_spec is not None
    _clean(graph, prefix)
    _check_shapes(graph)
    state, aliases = _state(model)
    entries = _entries(program, prefix, aliases, _input_paths(in_spec))
    specs = zip(entries.values(), program.graph_signature.input_specs, strict=True)
    state.update(
        (e.target, program.constants[str(spec.target)]) for e, spec in specs if e.kind == "constant"
    )
    inputs, constants = _placeholders(graph, entries, in_spec.num_leaves)
    return CapturedModel(
        graph,
        inputs,
        in_spec,
        constants,
        out_spec,
        _find_loss(graph, out_spec),
        (),
        state,
        aliases,
        notes,
    )


def _entries(
    program: torch.export.ExportedProgram, prefix: str, aliases: dict[str, str], paths: list[str]
) -> dict[fx.Node, GraphInput]:
    """What each placeholder stands for; of tied parameters, the placeholder of the first name takes
    all uses.
    """
    found: dict[fx.Node, GraphInput] = {}
    by_name: dict[str, fx.Node] = {}
    positions = iter(paths)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = _KINDS.get(spec.kind)
        if kind is None:
            raise CaptureError(
                f"the model uses {spec.target or node.name!r}, a {spec.kind.name} of export, "
                "which is not supported"
            )
        name = next(positions) if kind == "input" else str(spec.target).removeprefix(prefix)
        found[node] = GraphInput(node.name, kind, name)
        if kind != "input":
            by_name[name] = node
    for name, first in aliases.items():
        if name in by_name and first in by_name:
            by_name[name].replace_all_uses_with(by_name[first])
    return found


def _placeholders(
    graph: fx.Graph, entries: dict[fx.Node, GraphInput], given: int
) -> tuple[tuple[GraphInput, ...], dict[int, Any]]:
    """Drop the placeholders of unused state and of inputs that are no tensors; returns the rest,
    and those inputs.
    """
    kept: list[GraphInput] = []
    constants: dict[int, Any] = {}
    position = 0
    for node, entry in entries.items():
        is_input, is_tensor = entry.kind == "input", isinstance(node.meta["val"], torch.Tensor)
        if is_tensor and (node.users or is_input):
            kept.append(entry)
        else:
            graph.erase_node(node)
        if is_input:
            if (
                not is_tensor and position < given
            ):  # beyond it lies what capture added, use_cache=False
                constants[position] = node.meta["val"]
            position += 1
    return tuple(kept), constants


def _state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by their first name, and their further names."""
    state: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        first = names.setdefault(id(tensor), name)
        if first == name:
            state[name] = tensor
        else:
            aliases[name] = first
    return state, aliases


def _input_paths(in_spec: pytree.TreeSpec) -> list[str]:
    """How messages name each flat input: ``labels``, ``args[0]``, ``args[0]['mask']``."""
    leaves = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    paths = []
    for path, _ in pytree.tree_flatten_with_path(leaves)[0]:
        group, *rest = path
        if group.idx == 0:  # type: ignore[attr-defined]
            paths.append("args" + pytree.keystr(tuple(rest)))
        else:
            paths.append(str(rest[0].key) + pytree.keystr(tuple(rest[1:])))  # type: ignore[attr-defined]
    return [*paths, "use_cache"]


def _clean(graph: fx.Graph, prefix: str) -> None:
    """Keep of each node's meta what later stages read, also in the sub-graphs of regions."""
    seen: dict[str, str] = {}
    for node in graph.nodes:
        trace = node.meta.get("stack_trace") or ""
        if trace not in seen:
            seen[trace] = source_line(trace)
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        module = path.removeprefix("L['self']").lstrip(".").partition("@")[0]
        node.meta = {
            "val": node.meta.get("val"),
            "module": f"{module}.".removeprefix(prefix).rstrip("."),
            "source": seen[trace],
        }
        if node.op == "get_attr" and isinstance(
            inner := getattr(graph.owning_module, node.target), fx.GraphModule
        ):
            _clean(inner.graph, prefix)


def _check_shapes(graph: fx.Graph) -> None:
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        for val in pytree.tree_leaves(node.meta["val"]) if node.op == "call_function" else ():
            if is_transformed(val):
                raise CaptureError(
                    f"{describe_node(node)} is under a transform of torch.func (vmap, grad), and a "
                    "graph has no such: "
                    "write it for the whole batch"
                )
            if isinstance(val, symbols) or (
                isinstance(val, torch.Tensor) and any(isinstance(n, symbols) for n in val.shape)
            ):
                raise CaptureError(
                    f"{describe_node(node)} makes a number or a shape that depends on tensor values; a "
                    "plan needs shapes that are known "
                    "beforehand: use torch.where or a mask instead of selecting"
                )


def _find_loss(graph: fx.Graph, out_spec: pytree.TreeSpec) -> int:
    """An output called ``loss``, or else the only scalar floating-point one."""
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in graph.output_node().args[0]]  # type: ignore[union-attr]
    paths = [
        path
        for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(values, out_spec))[0]
    ]
    scalars = [
        i
        for i, v in enumerate(values)
        if isinstance(v, torch.Tensor) and v.ndim == 0 and v.is_floating_point()
    ]
    found = [i for i in scalars if len(paths[i]) == 1 and _name(paths[i][0]) == "loss"] or scalars
    if len(found) == 1:
        return found[0]
    shapes = (tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in values)
    outputs = ", ".join(
        f"{pytree.keystr(path).strip('.') or 'output'}: {shape}"
        for path, shape in zip(paths, shapes, strict=True)
    )
    problem = (
        "several scalar outputs, none called loss"
        if found
        else "no scalar output to use as the loss"
    )
    raise CaptureError(
        f"the model has {problem} (outputs: {outputs}); give labels in sample_input so that it "
        "computes one, or loss_fn="
    )


def _name(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "name", None))
