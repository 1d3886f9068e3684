"""Kernels that communicate are composed of many: those that are priced are those that run on two
ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.fx as fx
import zoo
from pool import Pools
from small_graphs import analyse
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost_model import Cluster, ComputeCosts, ConversionCosts, collective_seconds
from autopar.ir.layout import I, R, S
from autopar.ir.plan_data import NodePlan
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.memory.local_operator import trace_kernel
from autopar.memory.saved_tensors import trace_saved_tensors
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels import graph_kernels
from autopar.search.pricing.costs import Costs
from autopar.search.space.strategies import Strategy

SHAPE = (8, 4, 6, 6)
PASSES = {"mul", "sub", "add", "sum", "square", "mean", "var_mean", "rsqrt", "div"}


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _run() -> tuple[Counter[str], Counter[str]]:
    mesh, (n, channels, *rest) = Mesh((2,), ("data",)), SHAPE
    x = torch.randn(n // 2, channels, *rest, requires_grad=True)
    weight, bias = (torch.ones(channels, requires_grad=True) for _ in range(2))
    with Names() as forward:
        out = graph_kernels.sync_batch_norm(
            x,
            weight,
            bias,
            torch.zeros(channels),
            torch.ones(channels),
            True,
            0.1,
            1e-5,
            mesh,
            (0,),
        )
    with Names() as backward:
        out.backward(torch.ones_like(out))
    return forward.seen, backward.seen


def test_a_batch_norm_of_two_ranks(ranks: Pools) -> None:
    analysis = analyse(*zoo.cnn(batch=8, layers=1))
    node = next(n for n in analysis.graph.nodes if "batch_norm" in str(n.target))
    shape = node.meta["val"].shape
    split = Strategy(((S(0),), (R,), (R,), (I,), (I,)), (S(0),), ("n",), ("batch_norm",))
    chosen = NodePlan(split.ins, split.out, split.factors, split.kernels)
    per_channel = contiguous_spec((shape[1],), torch.float32, True)
    tensors = [
        contiguous_spec((shape[0] // 2, *shape[1:]), torch.float32, True),
        per_channel,
        per_channel,
    ]
    answer = trace_kernel(
        OperatorTracer("cpu"),
        node,
        chosen,
        FakeMesh((2,)),
        [*tensors, *[per_channel._replace(grad=False)] * 2],
    )

    def passes(launches: tuple[KernelLaunch, ...]) -> Counter[str]:
        return Counter(n.operator for n in launches if n.operator in PASSES)

    for seen in ranks(2).run(_run):
        for launches, names in zip((answer.forward, answer.backward), seen, strict=True):
            assert passes(launches) == Counter(
                {name: count for name, count in names.items() if name in PASSES}
            )
    _check_price(analysis, node, split, answer.backward)


def _check_price(
    analysis: Analysis, node: fx.Node, split: Strategy, backward: tuple[KernelLaunch, ...]
) -> None:
    """The backward costs its launches and one all-reduce."""
    cluster = Cluster.load("cpu")
    held = trace_saved_tensors(
        analysis.graph.nodes, analysis.differentiable, "cpu", rules=analysis.rules
    )
    costs = Costs(analysis, held, ConversionCosts((2,), cluster), ComputeCosts(cluster), "adamw")
    prices = costs.node_costs(node, analysis.rules[node], [split])
    kernels = ComputeCosts(cluster)
    by_hand = sum(
        float(kernels.seconds(n.kind, "float32", 0.0, n.nbytes, operator=n.operator))
        for n in backward
        if not n.sends
    )
    sums = 2 * 4.0 * node.meta["val"].shape[1]  # bytes of two sums for each channel
    by_hand += collective_seconds("all_reduce", sums, ConversionCosts((2,), cluster).axes[0])
    assert prices.backward[0] == by_hand
    alone = costs.node_costs(
        node, analysis.rules[node], [Strategy(((I,),) * 5, (I,), (None,), (None,))]
    )
    assert (
        prices.backward[0] > alone.backward[0]
    )  # half of the batch in many passes takes longer than the whole in few
