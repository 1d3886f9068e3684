"""Check that each ``torch.autograd.Function`` computes on chunks as on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from autopar.capture.function_operator import FunctionOperator
from autopar.ir.layout import local_shape
from autopar.ir.nodes import operands, result_tensors
from autopar.passes.canonical.function_rules import check_function


def check_functions(graph: fx.Graph, sizes: Sequence[int]) -> None:
    """:func:`check_function` of the Functions that the plan splits.

    Args:
        sizes: the number of ranks along each mesh axis.
    """
    for node in graph.nodes:
        is_function = isinstance(node.target, FunctionOperator)
        if not is_function or node.meta["plan"].factors == (None,) * len(sizes):
            continue
        tensors, layout = [n for n, _ in operands(node)], node.meta["layout"]
        check_function(
            node,
            [local_shape(n.meta["val"].shape, n.meta["layout"], sizes) for n in tensors],
            [local_shape(t.shape, layout, sizes) for t in result_tensors(node)],
        )
