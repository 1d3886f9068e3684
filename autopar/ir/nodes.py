"""Reading and editing graph nodes: arguments by name, tensor operands in order, new nodes with
their ``val``.

Every node of a captured graph carries ``meta["val"]`` (a fake tensor with the global shape, or a
tuple of them), ``meta["module"]`` and ``meta["source"]``; nodes made with :func:`new_node` do too.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

Path = tuple[int | str, ...]
"""Where an operand sits: position or keyword, then the index inside a list argument."""

REQUIRED: Any = inspect.Parameter.empty


@cache
def signature(target: Callable[..., Any]) -> tuple[tuple[str, Any, bool], ...]:
    """``(name, default, keyword only)`` of each parameter of an operator or a function; the default
    may be ``REQUIRED``.
    """
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        return tuple(
            (a.name, a.default_value if a.has_default_value() else REQUIRED, a.kwarg_only)
            for a in schema
        )
    parameters = inspect.signature(target).parameters.values()
    return tuple((p.name, p.default, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in parameters)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, in the order of the operator's schema, defaults filled
    in.
    """
    names = signature(node.target)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for i, (name, default, keyword_only) in enumerate(names):
        if i < len(node.args) and not keyword_only:
            found[name] = node.args[i]
        else:
            found[name] = node.kwargs.get(name, default)
    return found


def operands(node: fx.Node) -> list[tuple[fx.Node, Path]]:
    """The nodes that a call reads, in order (lists such as cat's flattened), each with its path."""
    found: list[tuple[fx.Node, Path]] = []
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for place, value in places:
        if isinstance(value, fx.Node):
            found.append((value, (place,)))
        elif isinstance(value, (list, tuple)):
            found.extend(
                (item, (place, i)) for i, item in enumerate(value) if isinstance(item, fx.Node)
            )
    return found


def set_operand(node: fx.Node, index: int, new: fx.Node) -> None:
    """Replace the ``index``-th of :func:`operands` by ``new``; other uses of the old operand
    stay.
    """
    place, *rest = operands(node)[index][1]
    value: Any = new
    if rest:
        value = list(node.args[place] if isinstance(place, int) else node.kwargs[place])  # type: ignore[arg-type]
        value[rest[0]] = new
    if isinstance(place, int):
        node.update_arg(place, value)
    else:
        node.update_kwarg(place, value)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give the argument ``name`` of a call another value."""
    for place, (parameter, _, keyword_only) in enumerate(signature(node.target)):  # type: ignore[arg-type]
        if parameter == name:
            if place < len(node.args) and not keyword_only:
                node.update_arg(place, value)
            else:
                node.update_kwarg(name, value)


def shape(node: fx.Node) -> tuple[int, ...]:
    """The global shape of a node that holds one tensor."""
    return tuple(node.meta["val"].shape)


def result_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns: one, or those of an operator with several, in their
    order.
    """
    value = node.meta.get("val")
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    )


def new_node(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
    val: Any = None,
) -> fx.Node:
    """Insert a call at the graph's insertion point.

    ``val`` is computed from those of the arguments unless given; ``module``, ``source`` and
    ``no_grad`` are those of ``like``.
    """
    name = getattr(target, "__name__", "call").partition(".")[
        0
    ]  # "reshape", where fx would write "reshape_default"
    node = graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name)  # type: ignore[arg-type]
    node.meta = {**like.meta, "val": infer_value(node, like) if val is None else val}
    return node


def substitute(
    graph: fx.Graph,
    node: fx.Node,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Insert a call that returns what ``node`` returns."""
    return new_node(graph, target, args, kwargs, like=node, val=node.meta["val"])


def infer_value(node: fx.Node, like: fx.Node | None = None) -> Any:
    """What a call returns on the ``val`` of its operands; nothing is computed or allocated."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    values = [n.meta["val"] for n, _ in operands(node)] + (
        [like.meta["val"]] if like is not None else []
    )
    modes = (getattr(v, "fake_mode", None) for v in values)
    with next(filter(None, modes), None) or nullcontext(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Let ``new`` take over all uses of ``node``, and erase ``node``."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


Rewrite = Callable[[fx.Graph, fx.Node], fx.Node | None]


def rewrite_calls(graph: fx.Graph, table: Mapping[Any, Rewrite]) -> None:
    """Visit the calls in order; where the table's entry for an operator returns a node, that node
    takes its place.
    """
    for node in graph.nodes:
        rule = table.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        with graph.inserting_before(node):
            new = rule(graph, node)
        if new is not None and new is not node:
            replace_node(node, new)


def eliminate_dead_code(graph: fx.Graph, keep: Callable[[fx.Node], bool]) -> None:
    """Erase the calls that nothing reads, except those that ``keep`` wants (fx's own pass keeps
    unused random calls).
    """
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not keep(node):
            graph.erase_node(node)


def updates_statistics(node: fx.Node) -> bool:
    """Whether a call updates the running statistics of BatchNorm, beside returning its result."""
    batch_norm = torch.ops.aten.batch_norm.default
    return node.target is batch_norm and bool(arguments(node)["training"])


def needing_grad(nodes: Iterable[fx.Node], sources: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes through which a gradient flows back to ``sources`` (placeholders that require
    one).
    """
    found = set(sources)
    for node in nodes:
        if node.op == "call_function" and carries_grad(node, found):
            found.add(node)
    return found


def gradient_sources(
    nodes: Iterable[fx.Node], sources: Mapping[fx.Node, int]
) -> dict[fx.Node, frozenset[int]]:
    """The nodes through which a gradient flows back to ``sources`` (placeholders that may require
    one), with the numbers of these.
    """
    found = {node: frozenset((number,)) for node, number in sources.items()}
    for node in nodes:
        if node.op == "call_function" and carries_grad(node, found):
            found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes if n in found))
    return found


def carries_grad(node: fx.Node, needing: Collection[fx.Node]) -> bool:
    """Whether autograd would record this call, given the nodes before it that need a gradient."""
    if node.meta.get("no_grad") or node.target is torch.ops.aten.detach.default:
        return False
    if not any(v.is_floating_point() or v.is_complex() for v in result_tensors(node)):
        return False
    return any(n in needing for n in node.all_input_nodes)


def permutation(node: fx.Node) -> list[int]:
    """Which operand dim each output dim of a permute, transpose, movedim or the like is: read off a
    meta tensor of distinct sizes.
    """
    rank = len(shape(node.args[0]))  # type: ignore[arg-type]
    probe = torch.empty(tuple(range(2, 2 + rank)), device="meta")
    return [n - 2 for n in node.target(probe, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]


def set_device(graph: fx.Graph, device: torch.device) -> None:
    """Let the calls that make tensors out of nothing (arange, zeros) make them on ``device``."""
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", device)


def describe_node(node: fx.Node) -> str:
    """The place of a node for a message: operator, module path and source line."""
    module, source = node.meta.get("module", ""), node.meta.get("source", "")
    name = (
        node.target
        if isinstance(node.target, (str, torch._ops.OpOverload))
        else getattr(node.target, "__name__", node.target)
    )
    return f"{name} in module {module or '(root)'!r}" + (f" at {source}" if source else "")


def numel(node: fx.Node) -> int:
    """The number of elements of a node that holds one tensor."""
    return math.prod(shape(node))


def covers(slices: Sequence[fx.Node], length: int) -> bool:
    """Whether these slices of one tensor along one dim, of ``length``, leave nothing out and do not
    overlap.
    """
    bounds = sorted((arguments(n)["start"], arguments(n)["end"]) for n in slices)
    whole = bounds[0][0] == 0 and min(bounds[-1][1], length) == length
    return len(slices) > 1 and whole and all(a[1] == b[0] for a, b in pairwise(bounds))


def slices_of(source: fx.Node) -> list[list[fx.Node]]:
    """The slices that take a tensor apart, each list along one dim."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in source.users:
        if (
            node.target is torch.ops.aten.slice.Tensor
            and node.args[0] is source
            and arguments(node)["step"] == 1
        ):
            found[arguments(node)["dim"]].append(node)
    return [
        slices for dim, slices in found.items() if covers(slices, source.meta["val"].shape[dim])
    ]
