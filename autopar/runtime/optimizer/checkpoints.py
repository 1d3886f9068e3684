"""The optimizer's state of a pipelined program in checkpoints: by the names of parameters, where
torch goes by their numbers.

A rank of a pipeline has the parameters of its stages, and each rank's optimizer counts them from 0.
Saved by number, the state of one stage would take the place of another's. Two things are done:

- ``optimizer.state_dict()`` keeps torch's numbers, which print as names. So
  ``torch.distributed.checkpoint`` files the state of each parameter under its name.
- ``get_state_dict`` and ``set_state_dict`` use the form in which each parameter has its options
  under its name. In the other form the groups of parameters would be those of one rank.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from autopar.errors import RunError
from autopar.runtime.dtensors.torch_private import set_verify_options, torch_verify_options

_LIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # pipelined programs


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
    """While the pipelined ``program`` lives, torch's functions for state dicts check the options
    that they get with it.

    These functions call no method of the module or the optimizer that sees the options, so their
    private first step is replaced.
    """
    _LIVE.add(program)
    set_verify_options(_verify_options)
    weakref.finalize(program, _restore)


def _restore() -> None:
    if not list(_LIVE):
        set_verify_options(torch_verify_options)


def _verify_options(
    model: nn.Module, optims: Any, optim_only: bool, *args: Any, options: Any = None, **kwargs: Any
) -> Any:
    if model in _LIVE:
        options = options or StateDictOptions()
        if options.full_state_dict or options.broadcast_from_rank0:
            raise RunError(
                "full_state_dict and broadcast_from_rank0: each rank of a pipeline has its own "
                "stages' parameters, so that no rank has a full state dict. Save with "
                "torch.distributed.checkpoint.save and convert the folder with "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save; load a whole model "
                "with compiled.load_state_dict"
            )
        if optims:
            options = dataclasses.replace(options, flatten_optimizer_state_dict=True)
    return torch_verify_options(model, optims, optim_only, *args, options=options, **kwargs)


def save_state_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """From now on the state dict of ``optimizer`` has the state of parameters under their names.
    ``names`` are by the parameters' ids.
    """

    def on_save(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        order = [names.get(id(p), str(i)) for i, p in enumerate(parameters)]
        named = {
            NamedIndex(i, order[i]) if isinstance(i, int) and i < len(order) else i: value
            for i, value in state["state"].items()
        }
        return {**state, "state": named}

    def on_load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        saved, own = state["param_groups"], optimizer.state_dict()["param_groups"]
        if len(saved) != len(own) or not all(isinstance(i, NamedIndex) for i in state["state"]):
            return None  # not saved here: torch compares it
        # The groups of a checkpoint have the numbers of one rank.
        groups = [
            {**group, "params": mine["params"]} for group, mine in zip(saved, own, strict=True)
        ]
        return {**state, "param_groups": groups}

    optimizer.register_state_dict_post_hook(on_save)
    optimizer.register_load_state_dict_pre_hook(on_load)
