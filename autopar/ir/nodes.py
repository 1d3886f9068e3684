"""Reading and editing graph nodes: arguments by name, tensor operands in order, new nodes with
their ``val``.

Every node of a captured graph has ``meta["val"]`` (a fake tensor of the global shape, or a tuple of
fake tensors), ``meta["module"]`` (a module path) and ``meta["source"]`` (file and line). Nodes made
with :func:`new_node` have them, too.
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
"""The place of an operand: position or keyword, then the index inside a list argument."""

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
    """The arguments of a call by name, with defaults, in the order of the operator's schema."""
    names = signature(node.target)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for i, (name, default, keyword_only) in enumerate(names):
        if i < len(node.args) and not keyword_only:
            found[name] = node.args[i]
        else:
            found[name] = node.kwargs.get(name, default)
    return found


def operands(node: fx.Node) -> list[tuple[fx.Node, Path]]:
    """The nodes that a call reads, in order, each with its path. Lists such as cat's are
    flattened.
    """
    found: list[tuple[fx.Node, Path]] = []
    _add_operands(found, enumerate(node.args))
    if node.kwargs:
        _add_operands(found, node.kwargs.items())
    return found


def _add_operands(
    found: list[tuple[fx.Node, Path]], places: Iterable[tuple[int | str, Any]]
) -> None:
    for place, value in places:
        if isinstance(value, fx.Node):
            found.append((value, (place,)))
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, fx.Node):
                    found.append((item, (place, i)))


def set_operand(node: fx.Node, index: int, new: fx.Node) -> None:
    """Replace operand number ``index`` of :func:`operands` by ``new``. Other uses of the old
    operand stay.
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
    """Set the argument ``name`` of a call."""
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
    """The tensors that a node returns, in order."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


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

    Args:
        like: the node whose ``module``, ``source`` and ``no_grad`` the call gets.
        val: the fake result; by default :func:`infer_value` computes it.
    """
    # "reshape" in place of fx's "reshape_default".
    name = getattr(target, "__name__", "call").partition(".")[0]
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
    """The fake result of a call on the ``val`` of its operands. Nothing is computed or
    allocated.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    values = [n.meta["val"] for n, _ in operands(node)] + (
        [like.meta["val"]] if like is not None else []
    )
    modes = (getattr(v, "fake_mode", None) for v in values)
    with next(filter(None, modes), None) or nullcontext(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Let all readers of ``node`` read ``new``, and erase ``node``."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


Rewrite = Callable[[fx.Graph, fx.Node], fx.Node | None]
"""Returns the node that replaces a call; None if the call stays."""


def rewrite_calls(graph: fx.Graph, table: Mapping[Any, Rewrite]) -> None:
    """Apply the rewrites of ``table``, by operator, to the calls in order."""
    for node in graph.nodes:
        rule = table.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        with graph.inserting_before(node):
            new = rule(graph, node)
        if new is not None and new is not node:
            replace_node(node, new)


def eliminate_dead_code(graph: fx.Graph, keep: Callable[[fx.Node], bool]) -> None:
    """Erase the calls that nothing reads, except those that ``keep`` returns True for.

    fx's own pass is not used, because it keeps random calls that nothing reads.
    """
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not keep(node):
            graph.erase_node(node)


def updates_statistics(node: fx.Node) -> bool:
    """Whether a call updates running statistics of BatchNorm in place."""
    batch_norm = torch.ops.aten.batch_norm.default
    return node.target is batch_norm and bool(arguments(node)["training"])


def needing_grad(nodes: Iterable[fx.Node], sources: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes through which a gradient flows back to ``sources``, the placeholders that require a
    gradient.
    """
    found = set(sources)
    for node in nodes:
        if node.op == "call_function" and carries_grad(node, found):
            found.add(node)
    return found


def gradient_sources(
    nodes: Iterable[fx.Node], sources: Mapping[fx.Node, int]
) -> dict[fx.Node, frozenset[int]]:
    """The nodes through which a gradient flows back to ``sources``, each with the numbers of the
    sources that the gradient reaches.

    Args:
        sources: the placeholders that may require a gradient, with their numbers.
    """
    found = {node: frozenset((number,)) for node, number in sources.items()}
    for node in nodes:
        if node.op == "call_function" and carries_grad(node, found):
            found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes if n in found))
    return found


def with_operands(results: Iterable[fx.Node]) -> set[fx.Node]:
    """``results``, and all nodes that they are computed from."""
    found, rest = set[fx.Node](), list(results)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.all_input_nodes
    return found


def carries_grad(node: fx.Node, needing: Collection[fx.Node]) -> bool:
    """Whether autograd records a call, given the earlier nodes that need a gradient."""
    if node.meta.get("no_grad") or node.target is torch.ops.aten.detach.default:
        return False
    dtypes = [v.dtype for v in result_tensors(node)]
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return False
    return any(n in needing for n in node.all_input_nodes)


def permutation(node: fx.Node) -> list[int]:
    """For each output dim of a permute, transpose, movedim or the like, the operand's dim."""
    rank = len(shape(node.args[0]))  # type: ignore[arg-type]
    # The sizes 2, 3, ... are distinct, so that the result's sizes tell the dims apart.
    probe = torch.empty(tuple(range(2, 2 + rank)), device="meta")
    return [n - 2 for n in node.target(probe, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]


def set_device(graph: fx.Graph, device: torch.device) -> None:
    """Let the calls that make new tensors, such as arange and zeros, make them on ``device``."""
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", device)


def describe_node(node: fx.Node) -> str:
    """A node in a message for the user: operator, module path and source line."""
    module, source = node.meta.get("module", ""), node.meta.get("source", "")
    is_printable = isinstance(node.target, (str, torch._ops.OpOverload))
    name = node.target if is_printable else getattr(node.target, "__name__", node.target)
    return f"{name} in module {module or '(root)'!r}" + (f" at {source}" if source else "")


def numel(node: fx.Node) -> int:
    """The number of elements of a node that holds one tensor."""
    return math.prod(shape(node))


def covers(slices: Sequence[fx.Node], length: int) -> bool:
    """Whether slices of one tensor along a dim of size ``length`` cover the dim without overlap."""
    bounds = sorted((arguments(n)["start"], arguments(n)["end"]) for n in slices)
    whole = bounds[0][0] == 0 and min(bounds[-1][1], length) == length
    return len(slices) > 1 and whole and all(a[1] == b[0] for a, b in pairwise(bounds))


def slices_of(source: fx.Node) -> list[list[fx.Node]]:
    """The slices that together cover a tensor: a list for each dim that is sliced so."""
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
