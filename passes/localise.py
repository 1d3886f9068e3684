"""Make shapes local: sizes written into the graph become those of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.fx as fx

from autopar.graph import arguments, set_argument, signature
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
            set_argument(node, rule.shape_argument, list(node.meta["local"]))
        if rule.localise:
            for name, new in rule.localise(arguments(node), _splits(node.meta["plan"], sizes)).items():
                set_argument(node, name, new)


def _splits(chosen: NodePlan, sizes: Sequence[int]) -> dict[str, int]:
    return {f: math.prod(n for g, n in zip(chosen.factors, sizes, strict=True) if g == f) for f in chosen.factors if f is not None}
