"""Which parameters may share a ZeRO bucket: those of one block, or those read first between two
blocks, in one dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch.fx as fx

from autopar.ir.plan_data import ConversionStep
from autopar.ir.zero_buckets import bucket_steps
from autopar.rules.analysis import Analysis
from autopar.search.space.repeated_blocks import block_of


def gather_groups(analysis: Analysis) -> dict[fx.Node, Hashable]:
    """The group of each parameter that a call reads and that has elements, in the order of their
    first readers. Parameters of one group have one dtype, and all or none of them have a gradient.
    """
    found: dict[fx.Node, Hashable] = {}
    changing, before = analysis.captured.updates, None
    for reader in analysis.graph.nodes:
        if reader.op != "call_function":
            continue
        block = block_of(reader)
        before = block or before
        for node in reader.all_input_nodes:
            state = analysis.state.get(node)
            if state is None or node in found or state.target in changing:
                continue
            if not node.meta["val"].numel():
                continue
            kind = node.meta["val"].dtype, node in analysis.differentiable
            found[node] = (block is not None, before, *kind)
    return found


def group_elements(analysis: Analysis) -> dict[fx.Node, float]:
    """For each parameter the elements of its group: no bucket has more."""
    groups, total = analysis.cached(gather_groups), dict[Hashable, float]()
    for node, group in groups.items():
        total[group] = total.get(group, 0.0) + node.meta["val"].numel()
    return {node: total[group] for node, group in groups.items()}


def zero_buckets(
    analysis: Analysis,
    conversions: Mapping[str, Mapping[str, tuple[ConversionStep, ...]]],
    stage_of: Mapping[fx.Node, Collection[int]],
) -> tuple[tuple[str, ...], ...]:
    """The largest buckets of a program: the parameters of each group that are gathered by the same
    steps, in one stage.

    Args:
        conversions: as in a plan.
        stage_of: the stages that hold each parameter.
    """
    buckets: dict[Hashable, list[str]] = {}
    for node, group in analysis.cached(gather_groups).items():
        converted = conversions.get(node.name, {})
        kind = bucket_steps(*converted.values()) if len(converted) == 1 else None
        if kind is not None and len(stage_of[node]) == 1:
            buckets.setdefault((group, *stage_of[node], kind), []).append(node.name)
    return tuple(tuple(names) for names in buckets.values() if len(names) > 1)
