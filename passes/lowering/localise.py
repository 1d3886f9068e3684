"""Make shapes local: sizes among the arguments of calls become the sizes of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.ir.layout import local_shape
from autopar.ir.nodes import arguments, result_tensors, set_argument, signature
from autopar.ir.plan_data import NodePlan
from autopar.rules import Rule
from autopar.runtime.kernels import graph_kernels


def localise(graph: fx.Graph, rules: Mapping[str, Rule | None], sizes: Sequence[int]) -> None:
    """Rewrite the shape argument of each call, and the arguments that its rule localises, for the
    split that the node's plan makes. Sets ``meta["local"]``, the local shape.

    Args:
        rules: by node name.
        sizes: the number of ranks along each mesh axis.
    """
    for node in graph.nodes:
        value, layout = node.meta.get("val"), node.meta.get("layout")
        if layout is None or not result_tensors(node):
            continue
        if isinstance(value, torch.Tensor):
            node.meta["local"] = local_shape(value.shape, layout, sizes)
        rule = rules.get(node.meta.get("plan_name", ""))
        if rule is None or node.meta["plan"].factors == (None,) * len(sizes):
            continue
        if rule.shape_argument:
            _set(node, rule.shape_argument, list(node.meta["local"]))
        if rule.localise:
            for name, new in rule.localise(
                arguments(node), _splits(node.meta["plan"], sizes)
            ).items():
                _set(node, name, new)


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Give the argument ``name`` of a call another value. For the kernel ``call_random_operator``
    this is an argument of the operator that the kernel calls.
    """
    if node.target is not graph_kernels.call_random_operator:
        set_argument(node, name, value)
        return
    operator: Any = node.args[0]
    parameters = [parameter for parameter, _, _ in signature(operator)]
    # The kernel has its own parameters before *args and **kwargs.
    before = len(signature(graph_kernels.call_random_operator)) - 2
    place = before + parameters.index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _splits(chosen: NodePlan, sizes: Sequence[int]) -> dict[str, int]:
    """By factor: how many ranks split it."""
    return {
        f: math.prod(n for g, n in zip(chosen.factors, sizes, strict=True) if g == f)
        for f in chosen.factors
        if f is not None
    }
