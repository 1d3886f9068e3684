"""What a model read of its batch size in Python is a number in the graph, and a microbatch has another batch size.

``loss.sum() / len(x)`` divides by the whole batch, whatever part of it is run at a time. The same model traced on the whole batch tells
which numbers these are.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.graph import arguments, describe, set_argument

aten = torch.ops.aten

# Scalars that scale: a sum over microbatches of scaled parts is the scaled sum.
_SCALING = (aten.mul.Tensor, aten.div.Tensor)
# Operators whose numbers are sizes and positions, which are the microbatch's own.
_SHAPES = (
    aten.reshape.default, aten.expand.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.slice.Tensor,
    aten.zeros.default, aten.ones.default, aten.repeat.default, aten.slice_scatter.default,
)  # fmt: skip


def restore_batch_constants(part: fx.Graph, whole: fx.Graph) -> None:
    """Give the scalars of ``part``, the graph of a microbatch, that depend on the batch size their values in ``whole``.

    Raises:
        PlanError: the two differ in anything but sizes and scales.
    """
    ours, theirs = list(part.nodes), list(whole.nodes)
    if [n.target for n in ours] != [n.target for n in theirs]:
        raise PlanError("micro_batch_size: the model computes otherwise on a part of the batch; leave micro_batch_size out")
    for node, other in zip(ours, theirs, strict=True):
        if node.op != "call_function" or node.target in _SHAPES:
            continue
        mine, its = arguments(node), arguments(other)
        for name in (n for n, value in mine.items() if isinstance(value, (int, float)) and value != its[n]):
            if node.target not in _SCALING:
                raise PlanError(
                    f"micro_batch_size: {describe(node)} has {name}={its[name]} on the whole batch and {mine[name]} on a microbatch; "
                    "leave micro_batch_size out"
                )
            set_argument(node, name, its[name])
