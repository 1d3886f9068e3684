"""The tensors of a program as they are saved and read, and what is needed to save and read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.plan_data import PlanData
from autopar.ir.plan_json import to_json_data
from autopar.runtime.dtensors.torch_private import local_tensor, wrap_local

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.runtime.module.compiled import Compiled

MODEL, OPTIMIZER = "model.", "optimizer."  # before the names of tensors in a checkpoint
_PLACES = (
    "fingerprint",
    "mesh_sizes",
    "mesh_names",
    "microbatches",
    "data_degree",
    "nodes",
    "parameters",
    "pipeline",
    "pipeline_place",
    "pipeline_order",
)


@dataclass(frozen=True)
class Program:
    """A compiled module as a save or a load sees it.

    Attributes:
        module: the compiled module.
        captured: the model that it was made of.
        plan_hash: says whether another run has the same plan.
    """

    module: Compiled
    captured: CapturedModel
    plan_hash: str

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state dict by their names in a checkpoint, tied ones once."""
        aliases, state = self.captured.aliases, self.module.state_dict()
        return {MODEL + name: tensor for name, tensor in state.items() if name not in aliases}

    @property
    def parameter_names(self) -> dict[int, str]:
        """The names of the parameters by their ids."""
        return {id(p): name for name, p in self.module.named_parameters()}


def host_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts in host memory, which later steps do not change."""
    copies = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor.detach()).to("cpu", copy=True)
        copies[name] = wrap_local(local, tensor) if isinstance(tensor, DTensor) else local
    return copies


def plan_hash(plan: PlanData) -> str:
    """A hash of what says which part of batch and model each rank has."""
    data = to_json_data(plan)
    for parameter in data["parameters"].values():
        del parameter["offloaded"]  # where state waits for the next step says nothing of its parts
    text = json.dumps({name: data[name] for name in _PLACES}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def listed(given: Any) -> list[Any]:
    """One thing, several, or None, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]
