"""The program for ``eval()``: the same, with dropout off and BatchNorm on its running statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from autopar.runtime import kernels

aten = torch.ops.aten

# Which argument of an operator says that it trains, and what to put there.
_SWITCHES: dict[Any, tuple[int, Any]] = {
    aten.dropout.default: (2, False),
    aten.batch_norm.default: (5, False),
    aten.scaled_dot_product_attention.default: (4, 0.0),
    kernels.dropout: (2, False),
    kernels.sync_batch_norm: (5, False),
    kernels.attention: (4, 0.0),
}


def evaluation(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph`` that evaluates. Its new values of buffers are not for keeping."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copies))
    for node in copy.nodes:
        if node.target in _SWITCHES and node.op == "call_function":
            place, value = _SWITCHES[node.target]
            if len(node.args) > place:
                node.update_arg(place, value)
    return copy
