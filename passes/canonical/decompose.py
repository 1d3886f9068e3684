"""Decompose operators that have no rule into operators that may have one.

Torch itself implements ``tile`` or ``kron`` with simpler operators, which have rules and
derivatives. This pass traces these decompositions of torch's, and a few that are written below. No
other pass traces decompositions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.ops import aten
from torch.utils import _pytree as pytree

from autopar.ir.nodes import operands, replace_node
from autopar.rules.registry import has_rule

Decomposition = Callable[..., Any]

# Torch decomposes these into an operator that expects contiguous indices, which the decomposition
# does not ensure.
_KEPT = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)


def decompose(graph: fx.Graph, known: Collection[Any]) -> None:
    """Replace composite operators that have no rule, except ``known`` ones, which other passes
    rewrite.
    """
    rest = [n for n in graph.nodes if n.op == "call_function"]
    while rest:
        node = rest.pop(0)
        if node.target in known or node.target in _KEPT or not _makes_tensors(node):
            continue
        if has_rule(node) and node.target not in _DECOMPOSITIONS:
            continue
        decomposition = _DECOMPOSITIONS.get(node.target) or _of_torch(node.target)
        if decomposition is None:
            continue
        if (inner := _traced(node, decomposition)) is not None:
            rest[:0] = _inline(graph, node, inner)


def _makes_tensors(node: fx.Node) -> bool:
    return all(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta["val"]))


def _of_torch(target: Any) -> Decomposition | None:
    """Torch's decomposition of an operator that returns new tensors or views."""
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or not target._can_decompose()
    ):
        return None
    return target.decompose


def _traced(node: fx.Node, decomposition: Decomposition) -> fx.Graph | None:
    """The calls into which a call decomposes; None where they depend on the values of tensors, or
    some of them call no operator.
    """
    tensors = [n.meta["val"] for n, _ in operands(node)]
    mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
    if mode is None or not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [k for k, value in enumerate(flat) if isinstance(value, fx.Node)]
    call: Any = node.target

    def run(*given: torch.Tensor) -> Any:
        values = list(flat)
        for place, tensor in zip(places, given, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        return call(*args, **kwargs)

    given = [_requiring_grad(flat[place].meta["val"], mode) for place in places]
    table = {node.target: decomposition} if isinstance(node.target, torch._ops.OpOverload) else {}
    try:
        inner = make_fx(run, decomposition_table=table, pre_dispatch=True)(*given).graph
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError):
        return None  # the decomposition reads values, which a trace does not have
    calls = [n for n in inner.nodes if n.op not in ("placeholder", "output")]
    plain = all(
        n.op == "call_function"
        and _is_operator(n.target)
        and n.target is not node.target
        and "val" in n.meta
        for n in calls
    )
    return inner if plain else None


def _requiring_grad(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor on the same memory that requires a gradient if its dtype allows: without this, torch
    may decompose into operators that have no derivative.
    """
    with mode:
        alias = value.detach()
    return alias.requires_grad_(value.is_floating_point() or value.is_complex())


def _is_operator(target: Any) -> bool:
    return target is operator.getitem or isinstance(target, torch._ops.OpOverload)


def _inline(graph: fx.Graph, node: fx.Node, inner: fx.Graph) -> list[fx.Node]:
    """Put the calls of ``inner`` in the place of ``node``; returns them."""
    sources = [n for n, _ in operands(node)]
    copies: dict[fx.Node, fx.Node] = dict(
        zip(inner.find_nodes(op="placeholder"), sources, strict=True)
    )
    made = []
    with graph.inserting_before(node):
        for each in inner.nodes:
            if each.op == "call_function":
                copies[each] = graph.node_copy(each, copies.__getitem__)
                copies[each].meta = {
                    **node.meta,
                    "val": pytree.tree_map_only(
                        torch.Tensor, torch.Tensor.detach, each.meta["val"]
                    ),
                }
                made.append(copies[each])
    results = inner.output_node().args[0]
    if isinstance(node.meta["val"], torch.Tensor) and isinstance(results, (list, tuple)):
        (results,) = results
    _replace_result(node, pytree.tree_map_only(fx.Node, copies.__getitem__, results))
    return made


def _replace_result(node: fx.Node, result: Any) -> None:
    """Replace the result of ``node`` by ``result``: a node, or nested lists and tuples of nodes."""
    if isinstance(result, fx.Node):
        replace_node(node, result)
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            _replace_result(user, result[user.args[1]])  # type: ignore[index]
    if not node.users:
        node.graph.erase_node(node)


# -- Operators that torch does not decompose, or decomposes into operators without rules


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> torch.Tensor:
    if mean is not None or var is not None:
        raise NotImplementedError("running statistics, which the operator updates")
    return aten.group_norm.default(x, x.shape[1], weight, bias, rest[2])


def _copying_views(name: str) -> dict[Any, Decomposition]:
    """The overloads of ``permute_copy`` and similar operators: the view, cloned."""
    copies, views = getattr(aten, f"{name}_copy"), getattr(aten, name)
    return {
        getattr(copies, o): _cloned(getattr(views, o))
        for o in copies.overloads()
        if o in views.overloads()
    }


def _cloned(view: Decomposition) -> Decomposition:
    return lambda *args, **kwargs: view(*args, **kwargs).clone()


_VIEWS = "alias diagonal expand permute select slice squeeze t transpose unfold unsqueeze"
_DECOMPOSITIONS: dict[Any, Decomposition] = {
    aten.glu.default: _glu,
    aten.instance_norm.default: _instance_norm,
}
for _name in _VIEWS.split():
    _DECOMPOSITIONS |= _copying_views(_name)
