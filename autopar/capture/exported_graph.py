"""Turns the graph that torch.export made into a captured model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autopar.capture.export_program import source_line
from autopar.capture.function_tracer import is_transformed
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel, GraphInput
from autopar.ir.nodes import describe_node

_KINDS = {  # the kinds of GraphInput
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def captured_model(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    prefix: str,
    in_spec: pytree.TreeSpec,
    notes: tuple[str, ...],
) -> CapturedModel:
    """The captured model of an exported program, whose graph is changed in place.

    Args:
        program: the exported program.
        model: the user's model, whose tensors the captured model refers to.
        prefix: the prefix of the model's names in the program.
        in_spec: the structure of the sample's arguments.
        notes: notes for the report.

    Raises:
        CaptureError: the graph has an input of an unsupported kind, shapes that depend on data, or
            no loss.
    """
    graph, out_spec = program.graph, program.call_spec.out_spec
    assert out_spec is not None
    _clean(graph, prefix)
    _check_shapes(graph)
    state, aliases = state_of(model)
    entries = _entries(program, prefix, aliases, input_paths(in_spec))
    specs = zip(entries.values(), program.graph_signature.input_specs, strict=True)
    known = program.state_dict | program.constants
    state.update((e.target, known[str(spec.target)]) for e, spec in specs if e.kind == "constant")
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
    """The input that each placeholder stands for.

    Of tied parameters, the placeholder of the first name takes over all uses.
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
        if kind in ("parameter", "buffer") and not str(spec.target).startswith(prefix):
            kind = "constant"  # of the loss function
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
    """Erases the placeholders of unused state and of inputs that are no tensors.

    Returns the other inputs, and the values of the inputs that are no tensors, by position. The
    first ``given`` inputs are the user's; the capture itself may have added ``use_cache=False``.
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
            if not is_tensor and position < given:
                constants[position] = node.meta["val"]
            position += 1
    return tuple(kept), constants


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by their first name, and the first name of each further name."""
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


def input_paths(in_spec: pytree.TreeSpec) -> list[str]:
    """The name of each flat input in messages: ``labels``, ``args[0]``, ``args[0]['mask']``."""
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
    """Reduces each node's meta to the entries that passes read, also in the graphs of regions."""
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
    """Raises CaptureError for values under a transform, and for shapes that depend on data."""
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
                    f"{describe_node(node)} makes a number or a shape that depends on tensor "
                    "values; a "
                    "plan needs shapes that are known "
                    "beforehand: use torch.where or a mask instead of selecting"
                )


def _find_loss(graph: fx.Graph, out_spec: pytree.TreeSpec) -> int:
    """The number of the output named ``loss``, or else of the only floating-point scalar."""
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
