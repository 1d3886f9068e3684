"""The parameters and buffers of each stage, as one rank holds them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.fx as fx

from autopar.cost_model.memory import ParameterMemory, allocated_bytes, parameter_memory
from autopar.ir.layout import local_shape
from autopar.ir.plan_data import ParameterPlan
from autopar.memory.gradient_memory import LocalParameter
from autopar.memory.staged_calls import StagedCalls
from autopar.memory.step_settings import StepSettings
from autopar.rules.analysis import Analysis


class LocalParameters:
    """The parameters and buffers of a program.

    Args:
        analysis: the analysis of the program's graph.
        calls: the calls of the graph.
        plans: the layouts of each parameter and buffer, by name.
        sizes: the mesh's axis sizes, inside one stage.
        settings: how the program runs.
    """

    def __init__(
        self,
        analysis: Analysis,
        calls: StagedCalls,
        plans: Mapping[str, ParameterPlan],
        sizes: tuple[int, ...],
        settings: StepSettings,
    ) -> None:
        self._analysis, self._plans, self._sizes = analysis, plans, sizes
        self._settings = settings
        self._allocated = allocated_bytes if settings.device_type == "cuda" else int
        self._nodes = {name: node for node, name in calls.names.items()}
        self._used: dict[int | None, dict[str, None]] = defaultdict(dict)
        self._ranks: dict[str, set[int]] = defaultdict(set)
        for stage, name in calls.uses:
            self._used[stage][name] = None
            if stage is not None:
                self._ranks[name].add(stage % settings.pipeline)
        elsewhere = {name for _, name in calls.uses}
        self._unused = [name for name in self._nodes if name not in elsewhere]

    def used(self, stage: int) -> list[str]:
        """The names of the parameters and buffers of a stage, in the order of first use.

        The first stage also has those that no stage uses.
        """
        used = self._used[stage]
        shared = [name for name in self._used[None] if name not in used]
        return [*used, *shared, *(self._unused if stage == 0 else ())]

    def in_order_of_model(self, names: Iterable[str]) -> list[str]:
        """``names`` in the order in which the model has its parameters and buffers."""
        among = set(names)
        return [name for name in self._nodes if name in among]

    def is_shared(self, name: str) -> bool:
        """Whether several ranks of the pipeline have the parameter."""
        return len(self._ranks[name]) > 1

    def is_offloaded(self, name: str) -> bool:
        """Whether the optimizer's state of the parameter is in the memory of the host."""
        return self._plans[name].offloaded

    def is_parameter(self, name: str) -> bool:
        return self._analysis.state[self._nodes[name]].kind == "parameter"

    def memory(self, name: str) -> ParameterMemory:
        """The bytes of a parameter or buffer that last from step to step, on the device or on the
        host.
        """
        node = self._nodes[name]
        shape = local_shape(node.meta["val"].shape, self._plans[name].stored, self._sizes)
        return parameter_memory(
            math.prod(shape),
            _stored_dtype(node).itemsize,
            self._settings.optimizer,
            node in self._analysis.differentiable,
            self._allocated,
        )

    def parameter(self, name: str, is_trainable: bool) -> LocalParameter:
        """The parameter on one rank."""
        node, plan = self._nodes[name], self._plans[name]
        val = node.meta["val"]
        return LocalParameter(
            name,
            tuple(val.shape),
            plan.stored,
            plan.used,
            self._sizes,
            _stored_dtype(node),
            val.dtype,
            is_trainable,
        )


def _stored_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a parameter between steps."""
    dtype: torch.dtype = node.meta.get("stored", node.meta["val"].dtype)
    return dtype
