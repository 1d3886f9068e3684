"""Local shapes that are wrong in one of several equal calls."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import parse_layout
from autopar.passes.lowering import verify_lowered
from autopar.passes.lowering.verify_lowered import verify_shapes

aten = torch.ops.aten
SIZES = (2, 2)
CPU = torch.device("cpu")


def node_of(node: fx.Node, shape: tuple[int, ...], layout: str) -> fx.Node:
    node.meta.update(val=torch.empty(shape), layout=parse_layout(layout), module="", source="")
    return node


def views(*second: int, layout: str = "S0 I") -> fx.Graph:
    """Two views of tensors of 8 x 6, of which two ranks hold a half each; the second view has the
    sizes ``second`` and claims ``layout``.
    """
    graph = fx.Graph()
    x, y = (node_of(graph.placeholder(name), (8, 6), "S0 I") for name in "xy")
    for source, sizes, claim in ((x, [4, 2, 3], "S0 I"), (y, list(second), layout)):
        node_of(graph.call_function(aten.view.default, (source, sizes)), (8, 2, 3), claim)
    graph.output(tuple(n for n in graph.nodes if n.op == "call_function"))
    return graph


def test_equal_calls_are_accepted() -> None:
    verify_shapes(views(4, 2, 3), SIZES, CPU)


def test_a_call_with_other_sizes_is_checked() -> None:
    with pytest.raises(PlanError, match="does not accept its local shapes"):
        verify_shapes(views(8, 2, 3), SIZES, CPU)
    with pytest.raises(PlanError, match=r"gives a local shape of \(4, 3, 2\)"):
        verify_shapes(views(4, 3, 2), SIZES, CPU)


@pytest.mark.parametrize("layout", ["I I", "S1 I", "S0 S1"])
def test_an_equal_call_with_another_layout_is_checked(layout: str) -> None:
    with pytest.raises(PlanError, match="where its layout"):
        verify_shapes(views(4, 2, 3, layout=layout), SIZES, CPU)


def test_an_equal_call_of_an_operand_with_another_layout_is_checked() -> None:
    graph = views(4, 2, 3)
    y = next(n for n in graph.nodes if n.name == "y")
    y.meta["layout"] = parse_layout("S0 S0")
    with pytest.raises(PlanError, match="does not accept its local shapes"):
        verify_shapes(graph, SIZES, CPU)


def test_equal_calls_are_run_once() -> None:
    graph = fx.Graph()
    x = node_of(graph.placeholder("x"), (8, 6), "S0 I")
    for _ in range(20):
        x = node_of(graph.call_function(aten.relu.default, (x,)), (8, 6), "S0 I")
    graph.output(x)
    run = verify_lowered._verify_local_shapes
    with mock.patch.object(verify_lowered, "_verify_local_shapes", side_effect=run) as counted:
        verify_shapes(graph, SIZES, CPU)
    assert counted.call_count == 1
