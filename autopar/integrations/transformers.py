"""transformers' ``Trainer`` for a compiled model.

The Trainer does its distributed work through accelerate, so most of this is the ``Accelerator`` of
``autopar.integrations.accelerate``. What is left: the Trainer looks at the model's class for the
names of its inputs and for its loss, and writes checkpoints on one rank.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers.utils import can_return_loss, find_labels

from autopar.errors import RunError
from autopar.integrations.accelerate import CHECKPOINT, Accelerator
from autopar.integrations.checkpoints import save_replacing
from autopar.runtime.communication.all_ranks import run_on_all_ranks
from autopar.runtime.module.compiled import Compiled

# A class to name before a Trainer's has no other base.
_Base: Any = transformers.Trainer if TYPE_CHECKING else object
_COUNT = "num_items_in_batch"
# Arguments that would change the model or its loss a second time: the values that do not, and what
# to write instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bf16": ((False, None), 'compile(precision="bf16")'),
    "fp16": ((False, None), 'compile(precision="bf16"), or a loop with autopar.LossScaler'),
    "bf16_full_eval": ((False, None), 'compile(precision="bf16")'),
    "fp16_full_eval": ((False, None), 'compile(precision="bf16")'),
    "torch_compile": ((False, None), 'compile(backend="inductor")'),
    "gradient_checkpointing": ((False, None), 'compile(recompute="full")'),
    "activation_checkpointing": ((False, None), 'compile(recompute="full")'),
    "label_smoothing_factor": ((0, None), "compile(loss_fn=...)"),
    "auto_find_batch_size": ((False, None), "compile(memory_budget=...)"),
    "neftune_noise_alpha": ((None,), "a model that adds the noise in its forward"),
    "use_liger_kernel": ((False, None), "apply_liger_kernel before compile"),
    "optim_target_modules": ((None,), "another optimizer"),
}


class CompiledTrainer(_Base):
    """The part of a Trainer that a compiled model needs; to be named before another Trainer's class
    (``class MyTrainer(CompiledTrainer, SFTTrainer)``). :class:`Trainer` is one with transformers'.

    ``per_device_train_batch_size`` are the samples that a rank passes: those of the sample with
    ``batch="global"``, and its share with ``batch="local"``. All ranks call all methods.

    Raises :class:`RunError` for a model that is not compiled, and for arguments that would change
    it a second time, with what to write instead.
    """

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if not isinstance(model, Compiled):
            raise RunError(
                f"Trainer(model={type(model).__name__}): give model=, what autopar.compile "
                "returned; a model_init would have to compile for each trial"
            )
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        names = model.input_names
        _check_arguments(model, args, names, kwargs.get("compute_loss_func"))
        super().__init__(model, args, *rest, **kwargs)
        self.model_accepts_loss_kwargs = _COUNT in names
        if args.label_names is None:
            self.label_names = find_labels(model.model_class)
        self.can_return_loss = can_return_loss(model.model_class)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', with an ``Accelerator`` for the compiled model."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.use(self.model)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [*self.model.input_names, *self.label_names]

    def get_train_dataloader(self) -> Any:
        """As transformers'. Raises :class:`RunError` for a last batch that is not full."""
        loader = super().get_train_dataloader()
        size = loader.total_batch_size
        if not self.args.dataloader_drop_last and (left := loader.total_dataset_length % size):
            raise RunError(
                f"the training set ends with a batch of {left} samples out of {size}, and a "
                "compiled model takes batches of one size: set dataloader_drop_last=True"
            )
        return loader

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As transformers'; the loss is that of the global batch, so no number of processes scales
        it.
        """
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch.float()
        self.args.average_tokens_across_devices = False
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.args.average_tokens_across_devices = True

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """As transformers'; logits are those of the samples that this rank passes. Samples that the
        last batch repeats do not count in the loss.
        """
        repeated = self.accelerator.repeated_samples()
        counted = self._without_loss_of(repeated, inputs) if repeated else inputs
        loss, logits, labels = super().prediction_step(
            model, counted, prediction_loss_only, ignore_keys
        )
        if labels is not None and counted is not inputs:
            labels = tuple(inputs[name] for name in self.label_names)
            labels = labels[0] if len(labels) == 1 else labels
        return loss, tree_map_only(DTensor, self._own_samples, logits), labels

    def _own_samples(self, output: DTensor) -> torch.Tensor:
        return self.model.samples_of(output.full_tensor(), self.model.data_rank)

    def _without_loss_of(self, repeated: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """``inputs`` with labels of -100 in the last ``repeated`` samples of all replicas."""
        size, rank = self.model.data_size, self.model.data_rank
        masked = dict(inputs)
        for name in self.label_names:
            labels = inputs[name]
            if labels.is_floating_point():
                raise RunError(
                    f"the last batch of the evaluation set repeats {repeated} samples to be full, "
                    f"and {name} is {labels.dtype}, for which -100 leaves none out of the loss: "
                    "set dataloader_drop_last=True, or give a set of whole batches"
                )
            kept = max(0, min(len(labels), len(labels) * (size - rank) - repeated))
            masked[name] = labels.clone()
            masked[name][kept:] = -100
        return masked

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as ``compiled.save_pretrained`` does, and the processing class, into a
        folder that ``from_pretrained`` reads. Other files in the folder stay.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        written = folder / "autopar-new-model"
        run_on_all_ranks("save_model", functools.partial(self._on_writer, _empty, written))
        self.model.save_pretrained(written)
        run_on_all_ranks("save_model", functools.partial(self._on_writer, self._move, written))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _on_writer(self, work: Any, folder: Path) -> None:
        if self.args.should_save:
            work(folder)

    def _move(self, written: Path) -> None:
        """Gives the files of ``written`` to the folder around it, with those of the Trainer."""
        for file in written.iterdir():
            os.replace(file, written.parent / file.name)
        written.rmdir()
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(written.parent)
        torch.save(self.args, written.parent / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        given = dict(optimizer=self._torch_optimizer(), scheduler=self.lr_scheduler)
        save_replacing(self.model, Path(output_dir) / CHECKPOINT, **given)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model is loaded with the optimizer, after both are prepared."""
        if not (Path(resume_from_checkpoint) / CHECKPOINT).is_dir():
            raise RunError(
                f"{resume_from_checkpoint} has no folder {CHECKPOINT}, so it was saved with "
                "save_only_model, or by another Trainer: give a checkpoint of this Trainer, or "
                "compile from_pretrained of its model and begin anew"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            path, optimizer = Path(checkpoint) / CHECKPOINT, self._torch_optimizer()
            self.model.load(path, optimizer=optimizer, scheduler=self.lr_scheduler)

    def _load_best_model(self) -> None:
        self.model.load(Path(self.state.best_model_checkpoint) / CHECKPOINT)

    def _torch_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)


class Trainer(CompiledTrainer, transformers.Trainer):
    """``transformers.Trainer`` for a compiled model (:class:`CompiledTrainer`)."""


def _check_arguments(model: Compiled, args: Any, names: list[str], loss: Any) -> None:
    for name, (allowed, instead) in _REFUSED.items():
        if (value := getattr(args, name, allowed[0])) not in allowed:
            raise RunError(
                f"{name}={value!r} would change a model that is compiled already: leave it out, "
                f"and use {instead}"
            )
    if loss is not None:
        raise RunError("compute_loss_func: the loss is part of the program, compile(loss_fn=...)")
    if not args.average_tokens_across_devices:
        raise RunError("average_tokens_across_devices=False: the loss is that of all replicas")
    if args.save_only_model and args.load_best_model_at_end:
        raise RunError(f"load_best_model_at_end reads {CHECKPOINT}/, which save_only_model omits")
    if _takes_count(model.model_class) and _COUNT not in names:
        raise RunError(
            "the Trainer gives this model the number of labels in all accumulated batches, by "
            "which it divides its loss, and the program does not take it: compile with "
            f"{_COUNT}=torch.tensor(1.0) in the sample input"
        )


def _takes_count(kind: Any) -> bool:
    """Whether the Trainer gives the number of labels to a model of this class."""
    given = inspect.signature(kind.forward).parameters.values()
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given)
    return getattr(kind, "accepts_loss_kwargs", any_keyword)


def _empty(folder: Path) -> None:
    """Removes what an interrupted save left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
