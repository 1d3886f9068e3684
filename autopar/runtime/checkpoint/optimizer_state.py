"""The state of optimizers by the names of parameters, so that each rank, stage and layout finds its
part of it.

A tensor of the shape of its parameter, such as a moment of AdamW, is saved as the parameter is: in
chunks. All else (numbers of steps, learning rates) is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar.errors import RunError
from autopar.runtime.checkpoint.files.plain_state import same
from autopar.runtime.dtensors.torch_private import local_tensor, wrap_local
from autopar.runtime.optimizer.host_state import state_to_host

Optimizers = Sequence[torch.optim.Optimizer]
_NOT_OPTIONS = ("params", "param_names")


def saved_state(
    optimizers: Optimizers, names: Mapping[int, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of ``optimizers``: the tensors that are laid as their parameters, by name, and the
    rest as plain data. ``names`` are by the parameters' ids.

    Raises :class:`RunError` for a parameter that is none of the program.
    """
    tensors: dict[str, torch.Tensor] = {}
    options: dict[str, dict[str, Any]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for group, p, name in _parameters(optimizer, names):
            options[name] = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            rest[name] = {}
            for key, value in optimizer.state.get(p, {}).items():
                if _is_laid_as(p, key, value):
                    tensors[f"{name}.{key}"] = value
                    rest[name][key] = None
                else:
                    rest[name][key] = pytree.tree_map_only(DTensor, _whole, value)
    laid = {name: [k for k in kept if f"{name}.{k}" in tensors] for name, kept in rest.items()}
    return tensors, {"options": options, "rest": rest, "laid": laid}


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks in one: ranks of a pipeline have different parameters."""
    found: dict[str, Any] = {"options": {}, "rest": {}, "laid": {}}
    for state in reversed(states):
        for kind in found:
            found[kind].update(state[kind])
    return found


def empty_tensors(
    optimizers: Optimizers,
    names: Mapping[int, str],
    state: Mapping[str, Any],
    dtype_of: Callable[[str], torch.dtype],
) -> dict[str, torch.Tensor]:
    """Tensors to read the saved ones to, in the layouts that the parameters have now.

    Raises :class:`RunError` where the optimizers have other parameters, or other groups of them,
    than when their state was saved.
    """
    tensors = {}
    _check_same_parameters(optimizers, names, state["options"])
    for optimizer in optimizers:
        _groups(optimizer, names, state["options"])
        for _, p, name in _parameters(optimizer, names):
            for key in state["laid"][name]:
                local = local_tensor(p.detach())
                made = torch.empty_like(local, dtype=dtype_of(f"{name}.{key}"))
                tensors[f"{name}.{key}"] = wrap_local(made, p) if isinstance(p, DTensor) else made
    return tensors


def restore(
    optimizers: Optimizers,
    names: Mapping[int, str],
    state: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Gives ``optimizers`` the saved ``state``, with the ``tensors`` that were read."""
    for optimizer in optimizers:
        values: dict[torch.Tensor, dict[str, Any]] = {}
        for _, p, name in _parameters(optimizer, names):
            own = {
                key: tensors.get(f"{name}.{key}") if key in state["laid"][name] else _placed(v, p)
                for key, v in state["rest"][name].items()
            }
            if own:
                values[p] = own
        numbers = {p: i for i, (_, p, _) in enumerate(_parameters(optimizer, names))}
        loaded = {
            "state": {numbers[p]: own for p, own in values.items()},
            "param_groups": _groups(optimizer, names, state["options"]),
        }
        optimizer.load_state_dict(loaded)
        for p, own in values.items():
            _keep_dtypes(optimizer.state[p], own)
        state_to_host(optimizer)


def _check_same_parameters(
    optimizers: Optimizers, names: Mapping[int, str], options: Mapping[str, Any]
) -> None:
    own = {name for optimizer in optimizers for _, _, name in _parameters(optimizer, names)}
    saved = set(options) & set(names.values())  # of those that this rank holds
    for name in sorted(own ^ saved):
        has, lacks = ("optimizer", "checkpoint") if name in own else ("checkpoint", "optimizer")
        raise RunError(
            f"the {has} has optimizer state of {name}, and the {lacks} has none: make optimizers "
            "of the parameters that they had when they were saved, or leave optimizer= out"
        )


def _groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    groups = []
    for group, current in zip(
        optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True
    ):
        members = [names[id(p)] for p in current["params"]]
        for name in members[1:]:
            if not same(options[name], options[members[0]]):
                raise RunError(
                    f"the optimizer has {members[0]} and {name} in one group, and they were saved "
                    f"with different options ({options[members[0]]} and {options[name]}): make "
                    "the groups that it had when it was saved"
                )
        saved = options[members[0]] if members else {}
        groups.append({**group, **saved})
    return groups


def _keep_dtypes(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """torch casts state to the dtype of its parameter; a saved tensor of another comes back."""
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and state[key].dtype != value.dtype:
            state[key] = value


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[dict[str, Any], torch.Tensor, str]]:
    """Each parameter with its group and its name."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise RunError(
                    f"torch.optim.{type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(p.shape)} that is none of the compiled model: make the optimizer "
                    "from compiled.parameters(), and save the state of others in extra="
                )
            yield group, p, names[id(p)]


def _is_laid_as(p: torch.Tensor, key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step"


def _whole(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor()


def _placed(value: Any, p: torch.Tensor) -> Any:
    """Plain data for a parameter ``p``: tensors with dims go where the parameter is, whole."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        if not isinstance(p, DTensor):
            return tensor.to(p.device)
        mesh, local = p.device_mesh, tensor.to(local_tensor(p).device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return pytree.tree_map_only(torch.Tensor, place, value)
