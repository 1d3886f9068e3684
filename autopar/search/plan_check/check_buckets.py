"""Whether the parameters of each ZeRO bucket can be gathered by one collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import torch.fx as fx

from autopar.ir.zero_buckets import bucket_steps
from autopar.search.plan_check.plan_view import PlanView


def bucket_errors(view: PlanView) -> Iterator[str]:
    """What is wrong with the buckets of a plan."""
    parameters = {node.name: node for node in view.analysis.state}
    buckets = view.plan.zero_buckets
    names = Counter(name for bucket in buckets for name in bucket)
    if twice := [name for name, count in names.items() if count > 1]:
        yield f"{', '.join(twice[:5])} is in two ZeRO buckets"
    if unknown := [name for name in names if name not in parameters]:
        yield f"a ZeRO bucket has {', '.join(unknown[:5])}, which is no parameter of the graph"
        return
    for bucket in buckets:
        kinds = {name: _kind(view, parameters[name]) for name in bucket}
        if alone := [name for name, kind in kinds.items() if kind is None]:
            yield (
                f"{alone[0]} is in a ZeRO bucket, and is not gathered in the graph, in one stage, "
                "to one layout"
            )
        elif len(set(kinds.values())) > 1:
            first, other = bucket[0], next(n for n in bucket if kinds[n] != kinds[bucket[0]])
            yield (
                f"{first} and {other} are in one ZeRO bucket, and differ in their dtype, in the "
                "steps of their conversions, or in their stage"
            )


def _kind(view: PlanView, node: fx.Node) -> Hashable:
    """What the parameters of a bucket have in common; None for one that no bucket takes."""
    conversions = view.conversions(node)
    stages = {user.meta.get("stage") for user in node.users if user.op == "call_function"}
    if len(conversions) != 1 or len(stages) != 1:
        return None
    kind = bucket_steps(*conversions.values())
    return kind and (kind, *stages, node.meta["val"].dtype)
