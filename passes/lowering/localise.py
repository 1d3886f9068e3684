"""Make shapes local: sizes written into the graph become those of one rank's part."""

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
    """Rewrite shape arguments, and what else a rule says, for the split that each node's plan
    makes; sets ``meta["local"]``.
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
    """Give a call's argument another value; one of ``call_random_operator`` is its operator's."""
    if node.target is not graph_kernels.call_random_operator:
        set_argument(node, name, value)
        return
    its = signature(node.args[0])  # type: ignore[arg-type]
    before = len(signature(graph_kernels.call_random_operator)) - 2  # all but *args and **kwargs
    place = [parameter for parameter, _, _ in its].index(name)
    node.update_arg(before + place, value) if before + place < len(
        node.args
    ) else node.update_kwarg(name, value)


def _splits(chosen: NodePlan, sizes: Sequence[int]) -> dict[str, int]:
    return {
        f: math.prod(n for g, n in zip(chosen.factors, sizes, strict=True) if g == f)
        for f in chosen.factors
        if f is not None
    }
