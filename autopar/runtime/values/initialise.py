"""The model's own initialisation, on every rank, for its part: the same values in every layout, and
no more than one whole tensor at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
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
from autopar.runtime.values.transformers_models import own_initialisation

if TYPE_CHECKING:
    from autopar.runtime.module.compiled import Compiled

_DONE = "_is_hf_initialized"  # transformers leaves a module or a tensor alone that has it


def initialise(
    program: Compiled,
    model: nn.Module,
    seed: int,
    aliases: Mapping[str, str],
    only: Collection[str] | None = None,
) -> None:
    """Gives ``program`` the values that ``model``, which it was made of, gives itself after
    ``torch.manual_seed(seed)`` on one device. All ranks must call it.

    With ``only``, names of tensors, the others keep their values. Then a model of ``transformers``
    draws nothing for them, and of other models those modules alone are initialised that have one of
    ``only`` in them.

    Raises :class:`RunError`, on every rank.
    """
    check_same_on_all_ranks(str(seed), "the seed of the initialisation")
    twin = run_on_all_ranks("init_weights", partial(_twin_of, model))
    tensors = _tensors(twin, aliases)
    wanted = tensors.keys() if only is None else tensors.keys() & set(only)
    for name in tensors.keys() - wanted:
        setattr(tensors[name], _DONE, True)
    values = _Values(program, wanted)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        TensorValues(tensors, values.read, values.write) as mode,
    ):
        torch.manual_seed(seed)
        _run_own_initialisation(twin, {id(tensors[name]) for name in wanted})
    parameters = {name for name in wanted if isinstance(tensors[name], nn.Parameter)}
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


def _run_own_initialisation(twin: nn.Module, wanted: set[int]) -> None:
    """``wanted`` are the identities of the tensors that shall have values."""
    own = own_initialisation(twin) or getattr(twin, "init_weights", None)
    if callable(own):
        own()
        return
    for module in _children_first(twin, set()):
        reset: Callable[[], None] | None = getattr(
            module, "reset_parameters", getattr(module, "_reset_parameters", None)
        )
        own_tensors = (*module.parameters(), *module.buffers())
        if reset is not None and not wanted.isdisjoint(map(id, own_tensors)):
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

    def __init__(self, program: Compiled, names: Collection[str]) -> None:
        self._mesh: Mesh = program.mesh
        named = (*program.named_parameters(), *program.named_buffers())
        self._own, self._wanted = dict(named), names

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
        """Keeps this rank's part of a tensor that is wanted."""
        target = self._own.get(name)
        if target is None or name not in self._wanted:
            return  # of another stage, or with values
        if isinstance(target, DTensor):
            value = local_part(value, layout_of_placements(target.placements), self._mesh)
        local_tensor(target.detach()).copy_(value)
