"""Values that a step computes from the whole batch, before and for all its microbatches: the number
of targets, for example, by which each microbatch divides its share of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.model_state import ModelState

if TYPE_CHECKING:
    from autopar.passes.lowering.lower import LoweredModel


class Prologue:
    """Runs the prologue of ``lowered``, which has none if nothing is computed from the whole batch.

    Arguments: ``microbatches``, their number; ``names``, those of the inputs, for messages.
    """

    def __init__(
        self,
        lowered: LoweredModel,
        mesh: Mesh,
        state: ModelState,
        microbatches: int,
        names: Sequence[str],
    ) -> None:
        self._lowered, self._mesh, self._state = lowered, mesh, state
        self._microbatches, self._names = microbatches, names

    @torch.no_grad()
    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, computed from the whole batch ``inputs``."""
        prologue = self._lowered.prologue
        if prologue is None:
            return []
        placeholders = [n for n in prologue.graph.nodes if n.op == "placeholder"][1:]
        state = [
            self._whole(name) if placeholder.users else None
            for name, placeholder in zip(self._lowered.state, placeholders, strict=False)
        ]
        return list(prologue(self._mesh, *state, *inputs))

    def _whole(self, name: str) -> torch.Tensor:
        """A tensor of the state in the dtype of the graph: whole, as the batch is whole on every
        rank, also where the graph takes a shard of it.
        """
        if name in self._state.buffers:
            return self._state.buffers[name]
        weight = self._state.weights[name]
        parameter = weight.parameter.detach().to(weight.leaf.dtype)
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises :class:`RunError`, on every rank, if an input would lose a gradient: the prologue
        computes without gradients.
        """
        prologue = self._lowered.prologue
        if prologue is None or not torch.is_grad_enabled():
            return
        if not any(x.requires_grad for x in inputs):
            return
        placeholders = [n for n in prologue.graph.nodes if n.op == "placeholder"]
        reads = placeholders[1 + len(self._lowered.state) :]
        for x, read, name in zip(inputs, reads, self._names, strict=True):
            if x.requires_grad and read.users:
                raise RunError(
                    f"{name} requires a gradient, and the program computes something of the whole "
                    f"batch from it before its {self._microbatches} microbatches, without "
                    f"gradient: compile with a sample in which {name} requires one, or pass it "
                    "detached"
                )
