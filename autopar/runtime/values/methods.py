"""What a compiled module has of its model's values: the methods that set and write all of them."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn

from autopar.errors import RunError
from autopar.runtime.values.initialise import initialise
from autopar.runtime.values.pretrained.load import LoadedKeys, load_pretrained
from autopar.runtime.values.pretrained.save import save_pretrained

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.runtime.module.compiled import Compiled
    from autopar.runtime.parameters.model_state import ModelState


class ModelValues(nn.Module):
    """The part of a compiled module that sets and writes the values of the model."""

    _captured: CapturedModel
    _state: ModelState
    _source: nn.Module | None = None
    _class_name: str | None = None
    _generation_config: Any = None

    def _remember(self, model: nn.Module | None) -> None:
        """Keeps the model that was compiled, where that takes no memory, and what describes it."""
        if model is None:
            return
        self.__dict__["_class_name"] = type(model).__name__
        self.__dict__["_generation_config"] = getattr(model, "generation_config", None)
        if all(p.is_meta for p in model.parameters()):
            self.__dict__["_source"] = model  # not as a part of this module

    def init_weights(self, seed: int, model: nn.Module | None = None) -> None:
        """Gives parameters and buffers the values that the model gives itself on one device after
        ``torch.manual_seed(seed)``, on the CPU: with its method ``init_weights``, if it has one;
        else with the ``reset_parameters`` of each of its modules, children first. The values do not
        depend on the layout. All ranks must call it.

        Each rank computes every tensor, one at a time, and keeps its part.

        Args:
            seed: the same on all ranks. The random generators stay as they are.
            model: the model that was compiled. It may be left out where its parameters were on the
                meta device.

        Raises:
            RunError: on every rank, for a parameter that no initialisation writes to.
        """
        source = self._code_of(model, "init_weights(seed, model)")
        initialise(cast("Compiled", self), source, seed, self._captured.aliases)

    def load_pretrained(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> LoadedKeys:
        """Gives parameters and buffers the values in a folder that ``save_pretrained`` wrote, of a
        compiled module or of a Hugging Face library. All ranks must call it, with a folder that all
        ranks see.

        Each rank reads its part of each tensor. Names and what is missing are as for
        ``from_pretrained``: a model of ``transformers`` follows that library's own rules (prefixes,
        old names, merged experts), any other has the names in the files. Values are converted to
        the model's dtypes. What no file holds is initialised as by :meth:`init_weights`, with a
        warning on rank 0 unless it is a buffer that files never hold.

        Args:
            folder: with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
                files that it lists.
            model: the model that was compiled. It may be left out where its parameters were on the
                meta device.
            seed: of the values that no file holds; the same on all ranks.
            progress: whether rank 0 shows a progress bar.

        Returns:
            The names of missing and unexpected tensors; the same on every rank.

        Raises:
            RunError: on every rank, for a folder without safetensors files, a tensor of another
                shape, quantised weights, or a rule of ``transformers`` that cannot be followed.
                Then values are as before. Also where reading fails half-way, and for a missing
                parameter that no initialisation writes to.
        """
        source = self._code_of(model, "load_pretrained(folder, model)")
        program = cast("Compiled", self)
        keys = load_pretrained(program, self._captured, source, folder, seed, progress)
        if dist.get_rank() == 0:
            _warn(folder, keys)
        return keys

    def _code_of(self, model: nn.Module | None, call: str) -> nn.Module:
        source = self._source if model is None else model
        if source is None:
            raise RunError(
                f"{call.partition('(')[0]} runs the model's own code, and a compiled module has "
                f"none: pass the model, {call}, or compile it from the meta device"
            )
        return source

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_file_bytes: int = 5 << 30
    ) -> None:
        """Writes the model for others: safetensors files of whole tensors under the model's names,
        an index where there are several files, and where the model has a ``config`` (and a
        ``generation_config``) their JSON files, with the class of the model and the dtype of its
        parameters. ``from_pretrained`` of Hugging Face libraries reads the folder, and so does
        :meth:`load_pretrained`, under any plan. All ranks must call it, with a folder on a disk
        that all ranks share.

        Tied tensors are written once, under the first of their names. The tensors pass one after
        the other, so that no rank holds more than its part and one tensor.

        Args:
            folder: is made, complete or not at all.
            max_file_bytes: the largest size of a file with several tensors.

        Raises:
            RunError: on every rank, if ``folder`` exists and is not empty, or cannot be written.
        """
        self._state.check_has_values()
        program = cast("Compiled", self)
        save_pretrained(program, folder, self._captured.aliases, max_file_bytes)


def _warn(folder: str | os.PathLike[str], keys: LoadedKeys) -> None:
    """Warns of the names that did not match."""
    if keys.missing_keys:
        warnings.warn(
            f"{os.fspath(folder)!s} does not hold {len(keys.missing_keys)} tensors of the model, "
            f"which were initialised anew: {', '.join(keys.missing_keys)}",
            stacklevel=3,
        )
    if keys.unexpected_keys:
        warnings.warn(
            f"{os.fspath(folder)!s} holds {len(keys.unexpected_keys)} tensors that the model does "
            f"not have: {', '.join(keys.unexpected_keys)}",
            stacklevel=3,
        )
