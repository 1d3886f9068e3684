"""Which ranks of a pipeline hold which tensors of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from autopar.errors import PlanError
from autopar.ir.captured import CapturedModel

if TYPE_CHECKING:
    from autopar.passes.lowering.lower import LoweredModel


class Holders:
    """Which pipeline ranks hold which tensors of the model's state.

    The ranks whose stages use a tensor hold it. A tensor that no stage uses goes to one rank, where
    its neighbours in the model are. Raises :class:`PlanError` for a rank that would have no
    parameter: no optimizer could be made there.
    """

    def __init__(self, captured: CapturedModel, lowered: LoweredModel, pipeline: int) -> None:
        stages: dict[str, set[int]] = defaultdict(set)
        for index in range(len(lowered.stages)):
            for name in _used_by(index, captured, lowered):
                stages[name].add(index)
        self._ranks = {
            name: tuple(sorted({stage % pipeline for stage in used}))
            for name, used in stages.items()
        }
        for name in captured.state:
            if name not in stages:
                self._ranks[name] = (_nearest(name, stages) % pipeline,)
        for rank in range(pipeline):
            if not any(isinstance(captured.state[n], nn.Parameter) for n in self.held_by(rank)):
                raise PlanError(
                    f"pipeline rank {rank} of {pipeline} would have no parameter, so that no "
                    "optimizer could be made there: cut the model elsewhere, or use fewer stages"
                )

    def held_by(self, rank: int) -> set[str]:
        """The names of the tensors that pipeline rank ``rank`` holds."""
        return {name for name, ranks in self._ranks.items() if rank in ranks}

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold ``name``."""
        return self._ranks[name]

    def shared_by(self) -> list[tuple[int, ...]]:
        """The sets of two or more ranks that hold the same tensor, in one order on all ranks."""
        return sorted({ranks for ranks in self._ranks.values() if len(ranks) > 1})


def _used_by(stage: int, captured: CapturedModel, lowered: LoweredModel) -> set[str]:
    """The names of the tensors that a stage reads or updates."""
    programs = lowered.stages[stage].train, lowered.stages[stage].evaluate
    taken = {i for program in programs for i in program.used_placeholders}
    names = {lowered.state[i] for i in taken if i < len(lowered.state)}
    if any(i >= len(lowered.state) + len(lowered.input_time_types) for i in taken):
        names |= _read_by_prologue(lowered)
    return names | {captured.updates[i] for i in programs[0].updates}


def _read_by_prologue(lowered: LoweredModel) -> set[str]:
    """The tensors of the state that the prologue reads, which takes the whole batch."""
    if lowered.prologue is None:
        return set()
    placeholders = [n for n in lowered.prologue.graph.nodes if n.op == "placeholder"][1:]
    return {name for name, n in zip(lowered.state, placeholders, strict=False) if n.users}


def _nearest(name: str, stages: Mapping[str, set[int]]) -> int:
    """The first stage that uses a tensor with the longest common prefix."""
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):
        prefix = ".".join(path[:length]) + "."
        near = [min(used) for other, used in stages.items() if other.startswith(prefix)]
        if near:
            return min(near)
    return 0
