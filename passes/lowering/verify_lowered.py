"""Check a lowered program between passes: every operand has the layout that its consumer wants, and
every result has the local shape that its layout says.
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
from autopar.ir.call_keys import CallKeys
from autopar.ir.layout import Type, can_convert, format_layout, local_shape, parse_type
from autopar.ir.nodes import arguments, describe_node, operands, result_tensors
from autopar.runtime.communication.collectives import redistribute


def verify_layouts(graph: fx.Graph) -> None:
    """Check that every consumer reads its operands in the layouts of its plan, and that every
    conversion is possible in one step along one axis.

    Raises:
        PlanError: a layout differs, or a conversion is not possible.
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
                        f"{describe_node(node)} wants {tensor.name} as {format_layout(wanted)}, "
                        f"it is {format_layout(tensor.meta['layout'])}: plan again"
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
            f"conversion of {tensor} from {format_layout(before)} along axis {axis} "
            f"({src} to {dst}) is not possible: plan again"
        )


def verify_shapes(graph: fx.Graph, sizes: Sequence[int], device: torch.device) -> None:
    """Run each operator on fake tensors of the local shapes, to check that it accepts them and
    returns the local shape that its layout says.

    Args:
        sizes: the number of ranks along each mesh axis.
        device: the device of the fake tensors.

    Raises:
        PlanError: an operator refuses its local shapes, or returns another shape.
    """
    # A new mode: the mode of the captured tensors knows other shapes under the same symbols.
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

    keys, accepted = CallKeys(), set[Any]()
    for node in graph.nodes:
        if not _is_split_operator(node):
            continue
        # Equal calls with equal layouts have equal local shapes; a deep model has many.
        layouts = (node.meta["layout"], *(n.meta["layout"] for n in node.all_input_nodes))
        if (key := (keys.of(node), layouts)) not in accepted:
            _verify_local_shapes(node, *map_arg((node.args, node.kwargs), value), fake, sizes)
            accepted.add(key)


def _is_split_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator on a split tensor, or one that returns a split tensor.

    The capture ran other operators with the same shapes, and some of them refuse fake tensors.
    """
    if (
        node.op != "call_function"
        or not isinstance(node.target, torch._ops.OpOverload)
        or not result_tensors(node)
    ):
        return False
    return any(t.is_shard for n in (node, *node.all_input_nodes) for t in n.meta["layout"])


def _verify_local_shapes(
    node: fx.Node, args: Any, kwargs: Any, fake: FakeTensorMode, sizes: Sequence[int]
) -> None:
    layout = node.meta["layout"]
    try:
        expected = [local_shape(t.shape, layout, sizes) for t in result_tensors(node)]
        with fake, torch.no_grad():
            made = tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        found = [tuple(t.shape) for t in made if isinstance(t, torch.Tensor)]
    except (RuntimeError, ValueError, IndexError) as e:
        raise PlanError(f"{describe_node(node)} does not accept its local shapes: {e}") from e
    if found != expected:
        here, there = (", ".join(map(str, shapes)) for shapes in (found, expected))
        raise PlanError(
            f"{describe_node(node)} gives a local shape of {here} where its layout "
            f"{format_layout(layout)} says {there}"
        )
