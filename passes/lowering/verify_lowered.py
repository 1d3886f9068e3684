"""Check a lowered program between passes: every operand in the layout its consumer wants, every
shape what the layout says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.errors import PlanError
from autopar.ir.layout import Type, can_convert, format_layout, local_shape, parse_type
from autopar.ir.nodes import arguments, describe_node, operands, result_tensors
from autopar.runtime.communication.collectives import redistribute


def verify_layouts(graph: fx.Graph) -> None:
    """Every consumer reads its operands in the layouts of its plan, and every conversion changes
    one axis as it may.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is redistribute:
            _verify_step(node)
        else:
            tensors = [t for t, _ in operands(node) if t.meta.get("layout") is not None]
            for tensor, wanted in zip(tensors, node.meta["plan"].ins, strict=True):
                if tensor.meta["layout"] != wanted:
                    raise PlanError(
                        f"{describe_node(node)} wants {tensor.name} as {format_layout(wanted)}, it is "
                        f"{format_layout(tensor.meta['layout'])}: plan again"
                    )


def _verify_step(node: fx.Node) -> None:
    found = arguments(node)
    tensor, axis, src, dst = found["x"], found["axis"], found["src"], found["dst"]
    before = tensor.meta["layout"]
    target: Type = parse_type(str(dst))
    after = tuple(target if a == axis else t for a, t in enumerate(before))
    if (
        repr(before[axis]) != src
        or node.meta["layout"] != after
        or not can_convert(before, axis, target)
    ):
        raise PlanError(
            f"conversion of {tensor} from {format_layout(before)} along axis {axis} ({src} to {dst}) is "
            "not possible: plan again"
        )


def verify_shapes(graph: fx.Graph, sizes: Sequence[int], device: torch.device) -> None:
    """Run each operator on fake tensors of the local shapes: it accepts them, and returns the shape
    that its layout says.
    """
    # A mode of its own: the captured tensors' mode has other shapes under the same symbols.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}

    def value(n: fx.Node) -> Any:
        if n not in values:
            with fake:
                values[n] = tree_map_only(torch.Tensor, partial(local, n), n.meta["val"])
        return values[n]

    def local(n: fx.Node, t: torch.Tensor) -> torch.Tensor:
        return torch.empty(
            local_shape(t.shape, n.meta["layout"], sizes), dtype=t.dtype, device=device
        )

    for node in graph.nodes:
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or not (tensors := result_tensors(node))
        ):
            continue
        if not any(t.is_shard for n in (node, *node.all_input_nodes) for t in n.meta["layout"]):
            continue  # it was captured with these shapes, perhaps where fake tensors do not go
        args, kwargs = map_arg((node.args, node.kwargs), value)
        try:
            expected = [local_shape(t.shape, node.meta["layout"], sizes) for t in tensors]
            with fake, torch.no_grad():
                found = [
                    tuple(t.shape)
                    for t in tree_leaves(node.target(*args, **kwargs))
                    if isinstance(t, torch.Tensor)
                ]
        except (RuntimeError, ValueError, IndexError) as e:
            raise PlanError(f"{describe_node(node)} does not accept its local shapes: {e}") from e
        if found != expected:
            here, there = (", ".join(map(str, shapes)) for shapes in (found, expected))
            raise PlanError(
                f"{describe_node(node)} gives a local shape of {here} where its layout "
                f"{format_layout(node.meta['layout'])} says {there}"
            )
