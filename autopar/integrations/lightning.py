"""Lightning's strategies for a compiled model: ``Fabric(strategy=FabricStrategy())`` and
``Trainer(strategy=TrainerStrategy())``.

They launch processes as Lightning's own for DDP do, wrap nothing, give each replica its samples,
clip by the norm over all ranks, and write checkpoints of ``compiled.save``: folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from autopar.errors import RunError
from autopar.integrations.checkpoints import save_replacing
from autopar.integrations.full_batches import check_whole_batches
from autopar.integrations.replicas import Replicas
from autopar.runtime.module.compiled import Compiled
from autopar.runtime.optimizer.gradient_clipping import clip_grad_norm_


class _OfReplicas:
    """What both strategies have: the compiled model, and its replicas in place of processes."""

    compiled: Compiled | None = None
    _replicas: Replicas

    def use(self, compiled: Compiled) -> None:
        """Takes ``compiled`` as the model of this strategy. All ranks must call it. The strategy
        does so itself where Lightning gives it the model.
        """
        if self.compiled is not compiled:
            self.compiled, self._replicas = compiled, Replicas(compiled)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of ``DistributedSampler``."""
        compiled = self._needs_model()
        return dict(num_replicas=compiled.data_size, rank=compiled.data_rank, drop_last=True)

    def process_dataloader(self, dataloader: Any) -> Any:
        """``dataloader``. Raises :class:`RunError` where its last batch is not full."""
        check_whole_batches(dataloader, self._needs_model().data_size)
        return dataloader

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of all replicas, along a new first dim."""
        if sync_grads:
            raise RunError("all_gather(sync_grads=True): the loss of a compiled model is global")
        _check_group(group)
        return torch.stack(self._with_replicas().gather(tensor.detach()))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The "mean" or "sum" over all replicas."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check_group(group)
        given = str(reduce_op or "sum").rpartition(".")[2].lower()
        return self._with_replicas().reduce(tensor, "mean" if given == "avg" else given)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As :meth:`reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any."""
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, bool(decision))
        return False not in everywhere if all else True in everywhere

    def _with_replicas(self) -> Replicas:
        self._needs_model()
        return self._replicas

    def _needs_model(self) -> Compiled:
        if self.compiled is None:
            raise RunError(
                "the strategy needs the compiled model, whose replicas pass different samples: "
                "call fabric.setup(compiled) before the loaders are set up, or give the "
                "LightningModule its compiled model in __init__ or configure_model"
            )
        return self.compiled


class _NoSync:
    """Gradients of several backwards are summed over ranks in the last one."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()  # type: ignore[operator, return-value]


class FabricStrategy(_OfReplicas, DDPStrategy):
    """A strategy of Fabric for one compiled model. Arguments as of Lightning's ``DDPStrategy``.

    ``fabric.save`` writes a folder of ``compiled.save``: the model, the optimizers, and of the rest
    ``state_dict()`` or plain data.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: Any) -> Any:
        """The compiled model itself."""
        if not isinstance(module, Compiled):
            raise RunError(
                f"fabric.setup was given a {type(module).__name__}: give it what autopar.compile "
                "returned"
            )
        _check_precision(self.precision, FabricPrecision)
        self.use(module)
        return module

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of ``DistributedSampler``; None where every rank passes the global batch, in
        the order of the loader.
        """
        given = super().distributed_sampler_kwargs
        return given if given and given["num_replicas"] > 1 else None

    def module_to_device(self, module: nn.Module) -> None:
        """A compiled model is on its device."""

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """``autopar.clip_grad_norm_``."""
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, float(norm_type), error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves the compiled model in ``state``, with the rest of it."""
        if filter or storage_options:
            raise RunError("fabric.save(filter=...): compiled.save writes all that a run needs")
        compiled, optimizers, rest = _parts(state)
        extra = {name: _state_of(value) for name, value in rest.items()}
        save_replacing(compiled, Path(path), optimizer=optimizers, extra=extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` wrote to the objects in ``state``."""
        single = isinstance(state, nn.Module)
        compiled, optimizers, rest = _parts({"model": state} if single else state or {})
        extra = compiled.load(path, optimizer=optimizers or None)
        if strict and (missing := rest.keys() - extra.keys()):
            raise RunError(f"{path} was saved without {', '.join(sorted(missing))}")
        for name in rest.keys() & extra.keys():
            value = extra.pop(name)
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(value)
            else:
                state[name] = value
        return extra


class _ClippingOverRanks(Precision):
    """Lightning's plugin of full precision, which also clips."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)


class TrainerStrategy(_OfReplicas, ModelParallelStrategy):
    """A strategy of Lightning's ``Trainer`` for a LightningModule with one compiled model, which
    has all its parameters. The module makes it in ``__init__`` or in ``configure_model``.
    """

    def setup_environment(self) -> None:
        """Joins the process group."""
        self._setup_distributed()

    @property
    def precision_plugin(self) -> Precision:
        """Full precision: that of a compiled model is part of its program."""
        return _ClippingOverRanks()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        _check_precision(Precision() if plugin is None else plugin, Precision)

    def setup(self, trainer: Any) -> None:
        """Takes the compiled model in the LightningModule, and makes the optimizers."""
        self.accelerator.setup(trainer)
        self._use_model_of(self.lightning_module)
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _use_model_of(self, module: nn.Module) -> None:
        found = [part for part in module.modules() if isinstance(part, Compiled)]
        if len(found) != 1:
            raise RunError(
                f"{type(module).__name__} has {len(found)} compiled models: give it one, "
                "self.compiled = autopar.compile(...), in __init__ or configure_model"
            )
        own = {id(p) for p in found[0].parameters()}
        if more := [name for name, p in module.named_parameters() if id(p) not in own]:
            raise RunError(
                f"{type(module).__name__} has parameters outside its compiled model, whose "
                f"gradients nothing synchronises: {', '.join(more[:3])}; compile one model with "
                "all of them"
            )
        self.use(found[0])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: :meth:`save_checkpoint` saves the compiled model."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: :meth:`save_checkpoint` saves the optimizers."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves the compiled model, the optimizers, and what else Lightning has in
        ``checkpoint``.
        """
        path = Path(self.broadcast(filepath))
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        save_replacing(self._needs_model(), path, optimizer=optimizers, extra=checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` wrote, and returns what else Lightning had."""
        path = self.broadcast(checkpoint_path)
        return self._needs_model().load(path, optimizer=self.optimizers or None)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the folder of a checkpoint."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)


def _check_precision(plugin: Any, plain: type) -> None:
    if type(plugin) is not plain:
        raise RunError(
            f"precision: {type(plugin).__name__} would change a model that is compiled already: "
            'leave it out, and use compile(precision="bf16")'
        )


def _check_group(group: Any) -> None:
    if group not in (None, torch.distributed.group.WORLD):
        raise RunError("a process group: the strategy gathers and reduces over all replicas")


def _parts(
    state: dict[str, Any],
) -> tuple[Compiled, list[torch.optim.Optimizer], dict[str, Any]]:
    """The compiled model, the optimizers and the rest of what a user saves."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(models) != 1 or not isinstance(models[0], Compiled):
        raise RunError(
            f"the state has {len(models)} models ({_names(models)}): give one compiled model, "
            '{"model": model, "optimizer": optimizer, ...}'
        )
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    kinds = nn.Module, torch.optim.Optimizer
    rest = {name: value for name, value in state.items() if not isinstance(value, kinds)}
    return models[0], optimizers, rest


def _names(values: Iterable[Any]) -> str:
    return ", ".join(type(value).__name__ for value in values) or "none"


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
