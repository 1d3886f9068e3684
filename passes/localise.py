"""Make shapes local: sizes written into the graph become those of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.graph import arguments, signature
from autopar.layout import local_shape
from autopar.plan import NodePlan
from autopar.rules import Rule


def localise(graph: fx.Graph, rules: Mapping[str, Rule | None], sizes: Sequence[int]) -> None:
    """Rewrite shape arguments, and what else a rule says, for the split that each node's plan makes; sets ``meta["local"]``."""
    for node in graph.nodes:
        value, layout = node.meta.get("val"), node.meta.get("layout")
        if layout is None or not isinstance(value, torch.Tensor):
            continue
        node.meta["local"] = local_shape(value.shape, layout, sizes)
        rule = rules.get(node.meta.get("plan_name", ""))
        if rule is None or node.meta["plan"].factors == (None,) * len(sizes):
            continue
        if rule.shape_argument and any(name == rule.shape_argument for name, _, _ in signature(node.target)):
            _set(node, rule.shape_argument, list(node.meta["local"]))
        if rule.localise:
            for name, new in rule.localise(arguments(node), _splits(node.meta["plan"], sizes)).items():
                _set(node, name, new)


def _splits(chosen: NodePlan, sizes: Sequence[int]) -> dict[str, int]:
    return {f: math.prod(n for g, n in zip(chosen.factors, sizes, strict=True) if g == f) for f in chosen.factors if f is not None}


def _set(node: fx.Node, name: str, value: Any) -> None:
    for place, (parameter, _, keyword_only) in enumerate(signature(node.target)):  # type: ignore[arg-type]
        if parameter == name:
            if place < len(node.args) and not keyword_only:
                node.update_arg(place, value)
            else:
                node.update_kwarg(name, value)
