"""The model's own initialisation, on every rank, for its part: the same values in every layout, and
no more than one whole tensor at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.all_ranks import check_same_on_all_ranks, run_on_all_ranks
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import layout_of_placements
from autopar.runtime.dtensors.sharding import local_part
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.values.tensor_values import TensorValues, without_memory

if TYPE_CHECKING:
    from autopar.runtime.module.compiled import Compiled

_DONE = "_is_hf_initialized"  # transformers sets it on a module, and then leaves the module alone


def initialise(program: Compiled, model: nn.Module, seed: int, aliases: Mapping[str, str]) -> None:
    """Gives ``program`` the values that ``model``, which it was made of, gives itself after
    ``torch.manual_seed(seed)`` on one device. All ranks must call it.

    Raises :class:`RunError`, on every rank.
    """
    check_same_on_all_ranks(str(seed), "the seed of init_weights")
    twin = run_on_all_ranks("init_weights", partial(_twin_of, model))
    tensors = _tensors(twin, aliases)
    values = _Values(program, tensors)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        TensorValues(tensors, values.read, values.write) as mode,
    ):
        torch.manual_seed(seed)
        _run_own_initialisation(twin)
    parameters = {name for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    if left := sorted(parameters - mode.written):
        raise RunError(
            f"{len(left)} parameters have no initialisation: {', '.join(left[:5])}"
            f"{', …' if len(left) > 5 else ''}. Give their modules a method reset_parameters, or "
            "the model a method init_weights"
        )


def _twin_of(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {
        id(tensor): without_memory(tensor) for tensor in (*model.parameters(), *model.buffers())
    }
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as e:  # code of the user's, such as __deepcopy__, may raise anything
        raise RunError(f"the model cannot be copied, and init_weights runs a copy: {e!r}") from e
    for module in twin.modules():
        module.__dict__.pop(_DONE, None)
    return twin


def _tensors(twin: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    named = (*twin.named_parameters(), *twin.named_buffers())
    return {aliases.get(name, name): tensor for name, tensor in named}


def _run_own_initialisation(twin: nn.Module) -> None:
    own = getattr(twin, "init_weights", None)
    if callable(own):
        own()
        return
    for module in _children_first(twin, set()):
        reset: Callable[[], None] | None = getattr(
            module, "reset_parameters", getattr(module, "_reset_parameters", None)
        )
        if reset is not None:
            reset()


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Each module once, in the order in which constructors make them."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


class _Values:
    """Reads and writes the program's values of whole tensors by their names."""

    def __init__(self, program: Compiled, tensors: Mapping[str, torch.Tensor]) -> None:
        self._mesh: Mesh = program.mesh
        named = (*program.named_parameters(), *program.named_buffers())
        self._own = {name: tensor for name, tensor in named if name in tensors}

    def read(self, name: str) -> torch.Tensor:
        """The values that all ranks have of a tensor."""
        if self._mesh.pipeline > 1:
            raise RunError(
                f"the initialisation of {name} reads values that it wrote before those of another "
                "tensor, which not every rank of a pipeline has: write them in one go, or compile "
                "without a pipeline"
            )
        tensor = self._own[name].detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def write(self, name: str, value: torch.Tensor) -> None:
        """Keeps this rank's part."""
        target = self._own.get(name)
        if target is None:
            return  # of another stage
        if isinstance(target, DTensor):
            value = local_part(value, layout_of_placements(target.placements), self._mesh)
        local_tensor(target.detach()).copy_(value)
