"""Into how many parts a plan's layouts split the batch over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.ir.plan_data import NodePlan
from autopar.rules.analysis import Analysis


def data_degree(analysis: Analysis, nodes: Mapping[str, NodePlan], sizes: tuple[int, ...]) -> int:
    """The number of parts of the batch at the node that splits it most finely, on a mesh of
    ``sizes``.
    """
    degree = 1
    for node in analysis.graph.nodes:
        dim = analysis.batch.dim(node) if node.op == "call_function" else None
        if dim is not None:
            cut = (
                n
                for t, n in zip(nodes[node.name].out, sizes, strict=True)
                if t.is_shard and t.dim == dim
            )
            degree = max(degree, math.prod(cut))
    return degree
