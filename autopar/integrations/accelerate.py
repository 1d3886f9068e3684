"""accelerate's ``Accelerator`` for a compiled model.

accelerate gives every process other samples and wraps the model in DDP. A compiled model needs no
wrapper, and it is the *replicas* that pass other samples: the ranks of one replica pass the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader as split_over_replicas
from accelerate.utils import DistributedType, DynamoBackend, recursively_apply
from torch.utils._pytree import tree_leaves

from autopar.errors import RunError
from autopar.integrations.checkpoints import save_replacing
from autopar.integrations.full_batches import check_last_batch, with_full_batches
from autopar.integrations.replicas import Replicas
from autopar.runtime.module.compiled import Compiled
from autopar.runtime.optimizer.gradient_clipping import clip_grad_norm_

CHECKPOINT = "autopar"  # the folder in a trainer's checkpoint that ``compiled.save`` writes
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for one compiled model. Arguments as there.

    ``prepare`` takes the compiled model, and its loaders together with it or later. A loader's
    batch has the samples that a rank passes; with ``split_batches`` those of all replicas.
    ``gather`` and ``reduce`` count each replica once. ``save_state`` writes a checkpoint of
    ``compiled.save`` into its folder.
    """

    compiled: Compiled | None = None
    _replicas: Replicas
    _optimizers: list[Any]

    def use(self, compiled: Any) -> None:
        """Takes ``compiled`` as the model of this accelerator. All ranks must call it. ``prepare``
        does so by itself.

        Raises :class:`RunError` for another model, and for settings of the accelerator that a
        compiled model has in its plan.
        """
        if compiled is self.compiled:
            return
        if not isinstance(compiled, Compiled) or self.compiled is not None:
            raise RunError(
                f"prepare() was given a {type(compiled).__name__}: this Accelerator takes one "
                "model, which autopar.compile returned"
            )
        _check_settings(self)
        self.compiled, self._replicas = compiled, Replicas(compiled)
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As ``accelerate.Accelerator.prepare``."""
        for module in args:
            if isinstance(module, torch.nn.Module):
                self.use(module)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self,
        model: Any,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """The compiled model itself."""
        self.use(model)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, **kwargs: Any
    ) -> Any:
        """The part of a loader that this rank's replica passes. The last batch is full: as far as
        samples are missing, it repeats the first ones, which ``gather_for_metrics`` drops.
        """
        compiled = self._needs_model("prepare(loader)")
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        size = data_loader.batch_size or 1
        check_last_batch(data_loader, size if self.split_batches else size * compiled.data_size)
        if self.dispatch_batches:
            raise RunError("dispatch_batches=True: each rank of a compiled model reads its batches")
        if compiled.data_size == 1:
            data_loader = with_full_batches(data_loader)
        prepared = split_over_replicas(
            data_loader,
            self.device,
            num_processes=compiled.data_size,
            process_index=compiled.data_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's, which steps once for each batch of the loader as it was given."""
        compiled = self._needs_model("prepare(scheduler)")
        prepared = super().prepare_scheduler(scheduler)
        if compiled.data_size == 1:
            prepared.split_batches = True  # one batch of the loader a step
        elif compiled.data_size != self.num_processes and not self.split_batches:
            raise RunError(
                f"prepare(scheduler): accelerate steps a scheduler {self.num_processes} times a "
                f"step, once for each process, and the model has {compiled.data_size} replicas: "
                "pass dataloader_config=DataLoaderConfiguration(split_batches=True), with the "
                "global batch size in the loader, or step the scheduler yourself"
            )
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As accelerate's. Raises :class:`RunError` where the batch repeats samples."""
        if self.repeated_samples():
            raise RunError(
                f"the last batch of the loader has {self.gradient_state.remainder} samples, and "
                "repeats others up to a full batch: a backward would count those twice. Give "
                "the training loader drop_last=True"
            )
        super().backward(loss, **kwargs)

    def repeated_samples(self) -> int:
        """How many samples of the running batch, of all replicas, repeat others."""
        state = self.gradient_state
        if not state.in_dataloader or not state.end_of_dataloader or state.remainder < 1:
            return 0
        return state.active_dataloader.total_batch_size - state.remainder

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """``autopar.clip_grad_norm_``."""
        return clip_grad_norm_(parameters, max_norm, float(norm_type))

    def gather(self, tensor: Any) -> Any:
        """The values of all replicas, one after the other; a DTensor whole, which is the same."""
        return recursively_apply(self._gather_tensor, tensor, error_on_other_type=True)

    def _gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self._needs_model("gather")
        return torch.cat(self._replicas.gather(tensor[None] if tensor.ndim == 0 else tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's: :meth:`gather`, without the samples that the last batch repeats."""
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(input_data))
        if self.num_processes == 1 or (tensors and not use_gather_object):
            return super().gather_for_metrics(input_data, use_gather_object)
        everywhere: list[Any] = [None] * self.num_processes
        dist.all_gather_object(everywhere, input_data)
        objects = [one for rank in self._replicas.first_ranks for one in everywhere[rank]]
        return objects[: self.gradient_state.remainder] if self.repeated_samples() else objects

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The "sum" or "mean" over all replicas."""
        self._needs_model("reduce")
        return recursively_apply(lambda x: self._replicas.reduce(x, reduction), tensor)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; the model and the optimizers are in the folder ``autopar``, a checkpoint
        of ``compiled.save``. All ranks must call it.
        """
        with self._without_optimizers():
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, of a folder that :meth:`save_state` wrote. All ranks must call it."""
        with self._without_optimizers():
            return super().load_state(input_dir, *args, **kwargs)

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Within, accelerate knows no optimizers, whose state it would write on one rank."""
        self._saved_optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = self._saved_optimizers

    def _save(self, models: Any, weights: list[Any], output_dir: Any) -> None:
        weights.clear()
        path, optimizers = Path(output_dir) / CHECKPOINT, self._torch_optimizers()
        save_replacing(self._needs_model("save_state"), path, optimizer=optimizers)

    def _load(self, models: list[Any], input_dir: Any) -> None:
        models.clear()
        path, optimizers = Path(input_dir) / CHECKPOINT, self._torch_optimizers()
        self._needs_model("load_state").load(path, optimizer=optimizers)

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [prepared.optimizer for prepared in self._saved_optimizers]

    def _needs_model(self, call: str) -> Compiled:
        if self.compiled is None:
            raise RunError(
                f"{call} needs the compiled model, whose replicas pass different samples: give "
                "prepare() the model first, or together with the loader"
            )
        return self.compiled


def _check_settings(accelerator: accelerate.Accelerator) -> None:
    """Raises :class:`RunError` for what a plan decides, and the accelerator would do again."""
    state = accelerator.state
    found = [
        (accelerator.mixed_precision != "no", "mixed_precision", 'compile(precision="bf16")'),
        (
            state.dynamo_plugin.backend not in (DynamoBackend.NO, None),
            "dynamo_backend",
            'compile(backend="inductor")',
        ),
        (
            accelerator.distributed_type not in _PLAIN,
            f"{accelerator.distributed_type}",
            "compile(parallel=..., zero=...)",
        ),
    ]
    for wrong, what, instead in found:
        if wrong:
            raise RunError(
                f"the Accelerator was made with {what}, which would change a compiled model a "
                f"second time: leave it out, and use {instead}"
            )
