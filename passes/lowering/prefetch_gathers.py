"""Prefetch: the gather of each ZeRO bucket starts where the bucket before has arrived, so that it
runs while that is computed with.

The backward makes recomputed gathers again, last bucket first: there too each starts when the one
that is made again before it has arrived (:class:`StartedGather`). The dual of a gather is the
reduce-scatter of the gradients. It starts where the backward of the gather runs, and is waited for
where that of the start does, which is behind the backward of all calls between the two.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from autopar.runtime.communication.zero_buckets import gather_bucket, start_gather
from autopar.runtime.pipeline.recompute import RecomputedOperator, operator_of


def prefetch_gathers(graph: fx.Graph) -> None:
    """Start the gathers of parameters one bucket ahead, within each pipeline stage. The first of a
    stage starts where it is needed. A bucket that is gathered along several axes is prefetched
    along the first of them.
    """
    is_staged = any("stage" in node.meta for node in graph.nodes)
    latest: dict[Any, tuple[fx.Node, fx.Node]] = {}  # of each stage, the gather and its start
    for gather in list(graph.nodes):
        if operator_of(gather.target) is not gather_bucket:
            continue
        if any(part.op != "placeholder" for part in gather.args[0]):
            continue
        stage = _stage(gather) if is_staged else None
        before, started = latest.get(stage, (None, None))
        again = before is not None and isinstance(before.target, RecomputedOperator)
        place = graph.inserting_before(gather) if before is None else graph.inserting_after(before)
        with place:
            start = graph.call_function(
                start_gather, (*gather.args[:3], started if again else None)
            )
        start.meta = {k: v for k, v in gather.meta.items() if k != "val"} | {"val": []}
        gather.kwargs = {**gather.kwargs, "started": start}
        latest[stage] = gather, start


def _stage(gather: fx.Node) -> Any:
    """The stage of the calls that read a bucket, which are in one."""
    seen, rest = {gather}, [gather]
    for node in rest:
        if (stage := node.meta.get("stage")) is not None:
            return stage
        rest += [user for user in node.users if user not in seen]
        seen.update(node.users)
    return None
