"""The settings of a training step that decide its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.cost_model.schedule import Traits, actions, early_messages, traits
from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT, Action
from autopar.memory.folding import Program
from autopar.memory.local_operator import RANDOM_KERNELS


@dataclass(frozen=True)
class StepSettings:
    """How a program runs.

    Attributes:
        pipeline, stages, schedule, microbatches, data_degree: as in a plan.
        optimizer: the optimizer's name.
        reduction_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype
            of each gradient.
        device_type: where the program runs, "cpu" or "cuda".
        is_compiled: whether the memory is that of programs whose compiler fuses kernels.
    """

    pipeline: int
    stages: int
    schedule: str
    microbatches: int
    data_degree: int
    optimizer: str
    reduction_dtype: torch.dtype | None
    device_type: str
    is_compiled: bool = False

    @property
    def traits(self) -> Traits:
        """What torch makes of the schedule."""
        return traits(self.schedule, self.pipeline, self.stages // self.pipeline, self.microbatches)

    @property
    def is_looped(self) -> bool:
        """Whether each rank runs one of torch's schedules for several stages a rank."""
        return self.traits.is_looped and self.stages > 1

    @property
    def has_split_backward(self) -> bool:
        """Whether the inputs' part and the parameters' part of a backward are separate actions."""
        return self.traits.has_split_backward and self.is_looped

    @property
    def last_part(self) -> str:
        """The kind of action that ends a backward."""
        return WEIGHT if self.has_split_backward else BACKWARD

    @property
    def collects_outputs(self) -> bool:
        """Whether outputs of several microbatches, or of stages, are held until all are done."""
        return self.microbatches > 1 or self.stages > 1

    def orders(self) -> list[list[Action]]:
        """The actions of each pipeline rank, in order."""
        if self.stages == 1:
            kinds = (FORWARD, BACKWARD)
            return [[Action(kind, 0, m) for m in range(self.microbatches) for kind in kinds]]
        return actions(
            self.schedule, self.pipeline, self.stages // self.pipeline, self.microbatches
        )

    def early_messages(self) -> list[list[list[Action]]]:
        """By rank, by action: the later actions that already have a receive buffer."""
        if not self.is_looped:
            return [[[] for _ in order] for order in self.orders()]
        return early_messages(
            self.schedule, self.pipeline, self.stages // self.pipeline, self.microbatches
        )


def is_fused(backend: str, program: Program, graph: fx.Graph) -> bool:
    """Whether the memory of a program counts as that of fused kernels: a compiler runs it, nothing
    is recomputed, and ranks exchange no activations but single numbers.

    Args:
        graph: the program's, with nodes of the same names.
    """
    if backend != "inductor" or program.recomputed:
        return False
    calls = [node for node in graph.nodes if node.op == "call_function"]
    kernels = {kernel for node in calls for kernel in program.nodes[node.name].kernels if kernel}
    converted = [n.meta["val"] for n in calls if any(program.conversions.get(n.name, {}).values())]
    exchanges = any(val.ndim and val.is_floating_point() for val in converted)
    return RANDOM_KERNELS.issuperset(kernels) and not exchanges
