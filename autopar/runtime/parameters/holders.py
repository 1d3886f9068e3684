"""Which ranks of a pipeline hold which of a model's tensors, and parameters that several hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import PlanError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.model_state import Weight

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.passes.lowering.lower import LoweredModel


class Holders:
    """Which pipeline ranks hold which of the model's tensors: those whose stages use it; one rank,
    if none does.

    What no stage uses goes where its neighbours in the model are. Raises :class:`PlanError` for a
    rank that would have no parameter: no optimizer could be made there.
    """

    def __init__(self, captured: CapturedModel, lowered: LoweredModel, pipeline: int) -> None:
        used: dict[str, set[int]] = defaultdict(set)
        counts = len(lowered.state) + len(lowered.input_time_types)
        for index, stage in enumerate(lowered.stages):
            takes = {i for graph in (stage.train, stage.evaluate) for i in graph.used_placeholders}
            names = {lowered.state[i] for i in takes if i < len(lowered.state)}
            if any(i >= counts for i in takes):
                names |= counted_from(lowered)
            names |= {captured.updates[i] for i in stage.train.updates}
            for name in names:
                used[name].add(index)
        self._ranks = {
            name: tuple(sorted({stage % pipeline for stage in stages}))
            for name, stages in used.items()
        }
        for name in captured.state:
            if name not in used:
                self._ranks[name] = (_nearest(name, used) % pipeline,)
        for rank in range(pipeline):
            if not any(isinstance(captured.state[name], nn.Parameter) for name in self.of(rank)):
                raise PlanError(
                    f"pipeline rank {rank} of {pipeline} would have no parameter, so that no "
                    "optimizer could be made there: "
                    "cut the model elsewhere, or use fewer stages"
                )

    def of(self, rank: int) -> set[str]:
        """The names of what pipeline rank ``rank`` holds."""
        return {name for name, ranks in self._ranks.items() if rank in ranks}

    def several(self) -> list[tuple[int, ...]]:
        """The sets of several ranks that hold a tensor, in an order that is every rank's."""
        return sorted({ranks for ranks in self._ranks.values() if len(ranks) > 1})

    def ranks(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold ``name``."""
        return self._ranks[name]


def counted_from(lowered: LoweredModel) -> set[str]:
    """The tensors of the state from which the number of targets is counted."""
    if lowered.prologue is None:
        return set()
    placeholders = [n for n in lowered.prologue.graph.nodes if n.op == "placeholder"][1:]
    return {name for name, n in zip(lowered.state, placeholders, strict=False) if n.users}


def _nearest(name: str, used: Mapping[str, set[int]]) -> int:
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):
        prefix = ".".join(path[:length]) + "."
        if near := [min(stages) for other, stages in used.items() if other.startswith(prefix)]:
            return min(near)
    return 0


class SharedParameters:
    """Parameters among ``weights`` that several pipeline ranks hold: each has one of its own, and
    all get the sum of the gradients, added up in ``dtype`` (None: as they are)."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        mesh: Mesh,
        holders: Holders,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        together: dict[tuple[int, ...], list[Weight]] = defaultdict(list)
        for name, weight in weights.items():
            if len(holders.ranks(name)) > 1:
                together[holders.ranks(name)].append(weight)
        # Ranks that hold none of them take part in making the groups.
        groups = {ranks: mesh.stage_replicas_group(ranks) for ranks in holders.several()}
        self._groups = [(groups[ranks], members) for ranks, members in sorted(together.items())]
        self._names = {weight.name for _, members in self._groups for weight in members}

    @torch.no_grad()
    def add_up(self, gradients: Gradients) -> Gradients:
        """``gradients`` with those of the shared parameters replaced by the sums over the ranks
        that hold them.
        """
        if not self._groups:
            return gradients
        own: dict[str, torch.Tensor] = {}
        for weight, value in gradients:
            if weight.name in self._names:
                own[weight.name] = own[weight.name] + value if weight.name in own else value
        result = [(weight, value) for weight, value in gradients if weight.name not in self._names]
        for group, members in self._groups:
            by_dtype: dict[torch.dtype, list[Weight]] = defaultdict(list)
            for weight in members:
                if weight.leaf.requires_grad:
                    by_dtype[weight.local.dtype].append(weight)
            for trained in by_dtype.values():
                flat = torch.cat(
                    [own.get(w.name, torch.zeros_like(w.local)).reshape(-1) for w in trained]
                )
                flat = flat.to(self._dtype or flat.dtype)
                dist.all_reduce(flat, group=group)
                pieces = flat.to(trained[0].local.dtype).split([w.local.numel() for w in trained])
                result += [
                    (w, piece.view(w.local.shape)) for w, piece in zip(trained, pieces, strict=True)
                ]
        return result
