"""Optimizer state of pipelined programs in checkpoints: by the names of parameters, where torch
goes by their numbers.

A rank of a pipeline has the parameters of its stages, and its optimizer counts these from 0, as
every other rank's does. Saved by number, the state of one stage would take the place of another's.
Here ``optimizer.state_dict()`` keeps torch's numbers, which print as names, so that
``torch.distributed.checkpoint`` files each parameter's state under its own; and ``get_state_dict``
and its like, whose groups of parameters would be those of one rank, use the form that has each
parameter's options under its name.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs

from autopar.errors import RunError

_LIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # pipelined programs
_torchs_check = torchs._verify_options  # what each of the functions there calls first


class NamedIndex(int):
    """The number that an optimizer has for a parameter; prints as the parameter's name."""

    name: str

    def __new__(cls, number: int, name: str) -> NamedIndex:
        made = super().__new__(cls, number)
        made.name = name
        return made

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def install_state_dict_checks(program: nn.Module) -> None:
    """As long as ``program``, which is pipelined, lives, torch's functions for the state of models
    and optimizers see to it.
    """
    _LIVE.add(program)
    torchs._verify_options = _checked  # type: ignore[assignment]
    weakref.finalize(program, _let_go)


def _let_go() -> None:
    if not list(_LIVE):
        torchs._verify_options = _torchs_check  # type: ignore[assignment]


def _checked(
    model: nn.Module, optims: Any, optim_only: bool, *args: Any, options: Any = None, **kwargs: Any
) -> Any:
    if model in _LIVE:
        options = options or torchs.StateDictOptions()
        if options.full_state_dict or options.broadcast_from_rank0:
            raise RunError(
                "full_state_dict and broadcast_from_rank0: each rank of a pipeline has its own "
                "stages' parameters, so that no rank has a "
                "full state dict. Save with torch.distributed.checkpoint.save and convert the "
                "folder with "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save; load a whole model "
                "with compiled.load_state_dict"
            )
        if optims:
            options = dataclasses.replace(options, flatten_optimizer_state_dict=True)
    return _torchs_check(model, optims, optim_only, *args, options=options, **kwargs)


def save_state_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """From now on the state dict of ``optimizer`` has its parameters under their names; ``names``
    are by their ids.
    """

    def saves(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order = [
            names.get(id(p), str(i))
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        ]
        named = {
            NamedIndex(i, order[i]) if isinstance(i, int) and i < len(order) else i: value
            for i, value in state["state"].items()
        }
        return {**state, "state": named}

    def loads(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        groups, own = state["param_groups"], optimizer.state_dict()["param_groups"]
        if len(groups) != len(own) or not all(isinstance(i, NamedIndex) for i in state["state"]):
            return None  # none of ours: torch compares it
        # What a checkpoint has of groups is one rank's, with its numbers.
        mine = [{**group, "params": its["params"]} for group, its in zip(groups, own, strict=True)]
        return {**state, "param_groups": mine}

    optimizer.register_state_dict_post_hook(saves)
    optimizer.register_load_state_dict_pre_hook(loads)
