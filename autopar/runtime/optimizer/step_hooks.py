"""What a program does at every step of one of torch's optimizers. Hooks do it, so that the user's
code does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError
from autopar.ir.state_buckets import keep_on_host
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import is_sharded
from autopar.runtime.optimizer.checkpoints import save_state_by_name
from autopar.runtime.optimizer.host_state import HostState, state_to_host
from autopar.runtime.optimizer.local_updates import install_local_updates
from autopar.runtime.optimizer.untrained_model import warn_where_saved
from autopar.runtime.parameters.waiting_gradients import sum_waiting

Groups = list[dict[str, Any]]


def install_step_hooks(
    owner: object,
    parameters: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    mesh: Mesh,
    on_step: Callable[[], None] | None = None,
    replaced: torch.nn.Module | None = None,
    on_host: Sequence[torch.Tensor] = (),
) -> None:
    """From now on every step of an optimizer that has one of ``parameters`` is hooked, as long as
    ``owner`` lives.

    Args:
        owner: the program. The hooks do not keep it alive.
        parameters: its parameters by their names.
        leaves: the leaves of its graph. A step writes to their memory, and on several ranks nothing
            counts these writes: fused and foreach kernels count none to DTensors. Counted here,
            they make autograd refuse the backward of a graph that saved old values.
        on_step: is called before each step.
        replaced: the model that was compiled, whose ``state_dict()`` warns after the first step.
        on_host: the parameters whose state the host keeps between steps.

    A step raises :class:`RunError` where the optimizer cannot do on several ranks what it does on
    one device, and where it has parameters of ``replaced`` and none of them has a gradient.
    """
    keep_on_host(on_host)
    install_local_updates()
    _watch_steps()
    recorder = mesh.recorder
    host_state = HostState(mesh.device, lambda: recorder.current_step) if on_host else None
    _HOOKS[owner] = _StepHooks(parameters, leaves, mesh, on_step, replaced, host_state)


@cache
def _watch_steps() -> None:
    """From now on each step calls the hooks of all programs. Torch's hooks are registered once and
    stay: hooks that go with their program could go while a step iterates over them.
    """
    register_optimizer_step_pre_hook(partial(_call_hooks, "before"))
    register_optimizer_step_post_hook(partial(_call_hooks, "after"))


def _call_hooks(name: str, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in list(_HOOKS.values()):
        getattr(hooks, name)(optimizer)


class _StepHooks:
    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        leaves: Sequence[torch.Tensor],
        mesh: Mesh,
        on_step: Callable[[], None] | None,
        replaced: torch.nn.Module | None,
        host_state: HostState | None,
    ) -> None:
        # Ids are valid as long as the owner lives, which holds the parameters.
        self._names = {id(p): name for name, p in parameters.items()}
        self._leaves, self._mesh, self._on_step = leaves, mesh, on_step
        self._host_state = host_state
        self._last_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )
        self._model = None if replaced is None else weakref.ref(replaced)
        self._replaced = WeakIdKeyDictionary(
            {} if replaced is None else dict.fromkeys(replaced.parameters())
        )
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._accepted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._set_to_foreach: weakref.WeakKeyDictionary[torch.optim.Optimizer, Groups] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._compared:
            self._check_not_replaced(optimizer)
            self._compared.add(optimizer)
        groups = self._own_groups(optimizer)
        if not groups:
            return
        if optimizer not in self._accepted:
            self._accept(optimizer)
        if self._on_step is not None:
            self._on_step()
        sum_waiting(p for group in groups for p in group["params"])
        for leaf in self._leaves if self._mesh.size > 1 else ():
            torch.autograd.graph.increment_version(leaf)
        self._set_foreach(optimizer, groups)
        self._hook_last(optimizer)
        self._mesh.recorder.optimizer_begins(optimizer)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        if self._host_state is not None:
            self._host_state.after(optimizer)
        if self._own_groups(optimizer):
            self._mesh.recorder.optimizer_ends()
        self._remove_last_hook(optimizer)
        self._restore_foreach(optimizer)

    def _hook_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks this step once more, after the user's hooks, which may change gradients."""
        self._remove_last_hook(optimizer)  # after a step that failed
        if self._host_state is not None:
            hook = optimizer.register_step_pre_hook(self._host_state.before)
            self._last_hooks[optimizer] = hook

    def _remove_last_hook(self, optimizer: torch.optim.Optimizer) -> None:
        if (hook := self._last_hooks.pop(optimizer, None)) is not None:
            hook.remove()

    def _own_groups(self, optimizer: torch.optim.Optimizer) -> Groups:
        return [
            group
            for group in optimizer.param_groups
            if any(id(p) in self._names for p in group["params"][:1])
        ]

    def _accept(self, optimizer: torch.optim.Optimizer) -> None:
        if (reason := _refusal(optimizer, self._mesh)) is not None:
            raise RunError(f"torch.optim.{type(optimizer).__name__} {reason}")
        self._accepted.add(optimizer)
        if self._model is not None and (model := self._model()) is not None:
            hook = warn_where_saved(model)
            weakref.finalize(self, hook.remove).atexit = False
            self._model = None
        if self._mesh.pipeline > 1:
            save_state_by_name(optimizer, self._names)
        if self._host_state is not None:
            optimizer.register_load_state_dict_post_hook(state_to_host)

    def _check_not_replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RunError for an optimizer of the model's own parameters that have no gradients: it
        was made before the model was compiled.
        """
        groups = optimizer.param_groups
        old = [p for group in groups for p in group["params"] if p in self._replaced]
        if old and all(p.grad is None for p in old):
            raise RunError(
                f"torch.optim.{type(optimizer).__name__} has parameters of the model that was "
                "compiled, which get no gradients from the compiled one: make the optimizer from "
                "compiled.parameters(), after compile"
            )

    def _set_foreach(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        """Sets the option ``foreach`` for this step, on several CPU ranks, in the groups that leave
        it to torch.

        torch would choose single tensors, at 15 us of dispatch for each operator on a DTensor;
        with foreach, ``local_updates`` needs none. The arithmetic is the same to the bit; of ASGD
        it is not, so ASGD stays as it is.
        """
        self._restore_foreach(optimizer)  # after a step that failed
        if (
            self._mesh.size == 1
            or self._mesh.device.type != "cpu"
            or isinstance(optimizer, torch.optim.ASGD)
        ):
            return
        undecided = [
            group
            for group in groups
            if group.get("foreach", False) is None
            and not group.get("fused")
            and not group.get("differentiable")
            and not isinstance(group.get("lr"), torch.Tensor)  # which foreach refuses
        ]
        for group in undecided:
            group["foreach"] = True
        self._set_to_foreach[optimizer] = undecided

    def _restore_foreach(self, optimizer: torch.optim.Optimizer) -> None:
        for group in self._set_to_foreach.pop(optimizer, []):
            group["foreach"] = None


_HOOKS: weakref.WeakKeyDictionary[object, _StepHooks] = weakref.WeakKeyDictionary()


def _refusal(optimizer: torch.optim.Optimizer, mesh: Mesh) -> str | None:
    """Why an optimizer cannot do on several ranks what it does on one device; None where it can."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = any(isinstance(p, DTensor) and any(map(is_sharded, p.placements)) for p in parameters)
    if isinstance(optimizer, torch.optim.LBFGS) and mesh.pipeline > 1:
        return (
            "takes all parameters as one vector, of which each rank of a pipeline has a part: "
            "compile without a pipeline, or use AdamW"
        )
    if isinstance(optimizer, torch.optim.Adafactor) and sharded:
        return (
            "divides by norms of whole rows and columns, which torch does not compute of "
            "parameters that are cut over ranks: compile with parallel=dict(data=...) and zero=0, "
            "which keeps parameters whole, or use AdamW"
        )
    if isinstance(optimizer, torch.optim.Rprop) and mesh.size > 1:
        return (
            "writes to parts of gradients as torch cannot on several ranks: train on one rank "
            "of a stage, or use AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and mesh.size * mesh.pipeline > 1:
        return "wants sparse gradients, which ranks sum as dense ones: use AdamW"
    return None
