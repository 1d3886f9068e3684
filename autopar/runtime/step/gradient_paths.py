"""Which outputs of a pipelined program have a gradient in a call, and through which tensors between
its stages the gradient comes back.

It depends on the parameters that are frozen now, and on the inputs that require a gradient. All
ranks of the pipeline must find the same: each receives the gradients that the next stage sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.model_state import Weight

if TYPE_CHECKING:
    from autopar.passes.lowering.lower import LoweredModel
    from autopar.passes.lowering.split_stages import BoundaryTensor


class GradientPaths:
    """Finds the gradients of each call.

    The sources of a tensor are the places of the program's arguments for which the loss may have a
    gradient through it. Arguments: ``weights``, the parameters of this rank; ``trained``, the names
    of the parameters, of all stages, that were not frozen when the model was compiled.
    """

    def __init__(
        self,
        lowered: LoweredModel,
        mesh: Mesh,
        weights: Mapping[str, Weight],
        trained: Collection[str],
    ) -> None:
        self._lowered, self._mesh, self._weights = lowered, mesh, weights
        stages = [stage.train for stage in lowered.stages]
        self._boundaries = [tensor for stage in stages for tensor in stage.received]
        self._sources: dict[int, frozenset[int]] = {}  # of each output
        for stage in stages:
            self._sources |= zip(stage.results, stage.sources, strict=True)
        places = {i for i, name in enumerate(lowered.state) if name in trained}
        every = (*(tensor.sources for tensor in self._boundaries), *self._sources.values())
        # Without a gradient when compiled: they get one if an input requires it, or by unfreezing.
        self._idle = {sources for sources in every if sources.isdisjoint(places)}
        # Of these the ones with parameters, which other ranks may hold and have unfrozen.
        self._doubtful = sorted(
            (s for s in self._idle if any(i < len(lowered.state) for i in s)), key=sorted
        )

    def find(self, inputs: Collection[int]) -> tuple[list[bool], set[BoundaryTensor]]:
        """For each output whether it has a gradient, and the tensors between stages for which one
        comes back; the same on all ranks of the pipeline, which must all call it. ``inputs``: the
        numbers of the inputs that require a gradient.
        """
        outputs = range(len(self._lowered.output_layouts))
        if not torch.is_grad_enabled():
            return [False for _ in outputs], set()
        idle = self._idle_now(inputs)
        returned = {tensor for tensor in self._boundaries if tensor.sources not in idle}
        return [self._sources[i] not in idle for i in outputs], returned

    def _idle_now(self, inputs: Collection[int]) -> set[frozenset[int]]:
        """The sources that all have no gradient in this call."""
        state, weights = self._lowered.state, self._weights
        live = {
            i
            for i, name in enumerate(state)
            if name in weights and weights[name].parameter.requires_grad
        }
        live.update(len(state) + i for i in inputs)
        idle = {sources for sources in self._idle if sources.isdisjoint(live)}
        if self._doubtful:
            flags = torch.tensor(
                [s not in idle for s in self._doubtful], dtype=torch.uint8, device=self._mesh.device
            )
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.pipeline_group())
            idle -= {s for s, flag in zip(self._doubtful, flags.tolist(), strict=True) if flag}
        return idle
