"""Write operators that have no rule with others that may have one: torch's composite operators as
torch writes them, some as we do.

``cdist``, ``tile``, ``kron``, ``bilinear`` or ``cosine_similarity`` are in torch itself programs of
simpler operators, which have rules and derivatives of their own. Here alone torch's decompositions
are traced.
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

Composed = Callable[..., Any]

# Torch writes these with an operator that takes indices to lie in memory one after the other; only
# they make sure of that.
_WHOLE = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)


def decompose(graph: fx.Graph, known: Collection[Any]) -> None:
    """Replace composite operators without a rule, but for those that are ``known``: other passes
    have something to do with them.
    """
    rest = [n for n in graph.nodes if n.op == "call_function"]
    while rest:
        node = rest.pop(0)
        if node.target in known or node.target in _WHOLE or not _makes_tensors(node):
            continue
        if (written := _OURS.get(node.target) or _torchs(node.target)) is None:
            continue
        if has_rule(node) and node.target not in _OURS:
            continue
        if (inner := _traced(node, written)) is not None:
            rest[:0] = _inline(graph, node, inner)


def _makes_tensors(node: fx.Node) -> bool:
    return all(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta["val"]))


def _torchs(target: Any) -> Composed | None:
    """How torch writes an operator that returns new tensors or views with others."""
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or not target._can_decompose()
    ):
        return None
    return target.decompose


def _traced(node: fx.Node, written: Composed) -> fx.Graph | None:
    """The calls that make up a call; None where its values decide which, or torch writes it with
    what is no operator.
    """
    tensors = [n.meta["val"] for n, _ in operands(node)]
    mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
    if mode is None or not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [k for k, value in enumerate(flat) if isinstance(value, fx.Node)]

    def run(*given: torch.Tensor) -> Any:
        values = list(flat)
        for place, tensor in zip(places, given, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        return call(*args, **kwargs)

    given = [_training(flat[place].meta["val"], mode) for place in places]
    table = {node.target: written} if isinstance(node.target, torch._ops.OpOverload) else {}
    call: Any = node.target
    try:
        inner = make_fx(run, decomposition_table=table, pre_dispatch=True)(*given).graph
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
        TypeError,
        ValueError,
    ):  # it reads values, which a trace has not
        return None
    calls = [n for n in inner.nodes if n.op not in ("placeholder", "output")]
    plain = all(
        n.op == "call_function"
        and _is_operator(n.target)
        and n.target is not node.target
        and "val" in n.meta
        for n in calls
    )
    return inner if plain else None


def _training(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """The same memory as a tensor that requires a gradient if it can: what torch writes without one
    may have no derivative.
    """
    with mode:
        alias = value.detach()
    return alias.requires_grad_(value.is_floating_point() or value.is_complex())


def _is_operator(target: Any) -> bool:
    return target is operator.getitem or isinstance(target, torch._ops.OpOverload)


def _inline(graph: fx.Graph, node: fx.Node, inner: fx.Graph) -> list[fx.Node]:
    """Put the calls where ``node`` was; returns them."""
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
    _give(node, pytree.tree_map_only(fx.Node, copies.__getitem__, results))
    return made


def _give(node: fx.Node, result: Any) -> None:
    """Put ``result``, a node or such in lists and tuples, in the place of what ``node`` makes."""
    if isinstance(result, fx.Node):
        replace_node(node, result)
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            _give(user, result[user.args[1]])  # type: ignore[index]
    if not node.users:
        node.graph.erase_node(node)


# -- Operators that torch does not write with others, or not with those that have rules


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> torch.Tensor:
    if mean is not None or var is not None:
        raise NotImplementedError("running statistics, which the operator updates")
    return aten.group_norm.default(x, x.shape[1], weight, bias, rest[2])


def _copied(name: str) -> dict[Any, Composed]:
    """``permute_copy`` and its like, overload by overload: the view, cloned."""
    copies, views = getattr(aten, f"{name}_copy"), getattr(aten, name)
    return {
        getattr(copies, o): _cloned(getattr(views, o))
        for o in copies.overloads()
        if o in views.overloads()
    }


def _cloned(view: Composed) -> Composed:
    return lambda *args, **kwargs: view(*args, **kwargs).clone()


_OURS: dict[Any, Composed] = {aten.glu.default: _glu, aten.instance_norm.default: _instance_norm}
for _name in (
    "alias",
    "diagonal",
    "expand",
    "permute",
    "select",
    "slice",
    "squeeze",
    "t",
    "transpose",
    "unfold",
    "unsqueeze",
):
    _OURS |= _copied(_name)
