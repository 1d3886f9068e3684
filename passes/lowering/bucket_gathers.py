"""Bucket gathers: the parameters of a ZeRO bucket are gathered by one collective, before the first
of their readers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch.fx as fx

from autopar.ir.zero_buckets import bucket_steps, is_gather
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.zero_buckets import gather_bucket
from autopar.runtime.pipeline.recompute import RecomputedOperator, operator_of


def bucket_gathers(graph: fx.Graph, buckets: Iterable[Sequence[str]]) -> None:
    """Replace the all-gathers of the parameters of each bucket by one all-gather. Conversions that
    the backward makes again stay so. Parameters that are not converted alike, because lowering has
    changed the plan's layouts (``admit_gradients``), share no collective.

    Args:
        buckets: the names of the parameters' placeholders.
    """
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for bucket in buckets:
        alike: dict[Any, dict[fx.Node, list[fx.Node]]] = defaultdict(dict)
        for parameter in map(placeholders.__getitem__, bucket):
            chain = _conversion(parameter)
            alike[_kind(chain)][parameter] = chain
        for kind, chains in alike.items():
            if kind is not None and len(chains) > 1:
                first = min((chain[0] for chain in chains.values()), key=place.__getitem__)
                with graph.inserting_before(first):
                    _join(graph, list(chains), list(chains.values()))


def _conversion(parameter: fx.Node) -> list[fx.Node]:
    """The steps of the conversion of a parameter; none if it has several conversions."""
    chain, current = list[fx.Node](), parameter
    while steps := [user for user in current.users if operator_of(user.target) is redistribute]:
        if len(steps) > 1:
            return []
        chain.append(current := steps[0])
    return chain


def _kind(chain: Sequence[fx.Node]) -> Any:
    """What the conversions of one bucket have in common; None for one that no bucket takes."""
    steps = bucket_steps(node.args[2:5] for node in chain)  # type: ignore[misc]
    each = tuple(
        (node.args[5:], isinstance(node.target, RecomputedOperator), node.meta["val"].dtype)
        for node in chain
    )
    return steps and (steps, each)


def _join(graph: fx.Graph, current: Sequence[fx.Node], chains: Sequence[Sequence[fx.Node]]) -> None:
    """Makes the conversions ``chains`` of the tensors ``current`` step by step, all together."""
    for steps in zip(*chains, strict=True):
        if is_gather(steps[0].args[2:5]):
            gathered = _gather(graph, current, steps)
            new = [graph.call_function(operator.getitem, (gathered, i)) for i in range(len(steps))]
        else:
            new = [
                graph.call_function(old.target, (x, *old.args[1:]))
                for x, old in zip(current, steps, strict=True)
            ]
        for old, node in zip(steps, new, strict=True):
            node.meta = dict(old.meta)
        current = new
    for chain, result in zip(chains, current, strict=True):
        chain[-1].replace_all_uses_with(result)
        for node in reversed(chain):
            graph.erase_node(node)


def _gather(graph: fx.Graph, current: Sequence[fx.Node], steps: Sequence[fx.Node]) -> fx.Node:
    """The all-gather of one step of each of several conversions."""
    old, target = steps[0], gather_bucket
    _, mesh, axis, _, dst, *others = old.args
    sources = tuple(step.args[3] for step in steps)
    if isinstance(old.target, RecomputedOperator):
        target = RecomputedOperator(gather_bucket, (), old.target.context)  # type: ignore[assignment]
    node = graph.call_function(target, (list(current), mesh, axis, sources, dst, *others))
    node.meta = {k: old.meta[k] for k in ("stage", "module", "source") if k in old.meta}
    node.meta["val"] = [step.meta["val"] for step in steps]
    return node
