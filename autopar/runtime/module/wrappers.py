"""What a compiled module says to a wrapper that would synchronise its gradients a second time."""

from __future__ import annotations

from typing import NoReturn

from autopar.errors import RunError


class Unwrapped:
    """The part of a compiled module that refuses torch's ``DistributedDataParallel``, which reads
    the attribute of this name before it does anything.
    """

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        raise RunError(
            "DistributedDataParallel was given a compiled model, which synchronises its gradients "
            "itself: leave it out. For a trainer that wraps every model, take the adapter in "
            "autopar.integrations: transformers.Trainer, accelerate.Accelerator, or "
            "lightning.FabricStrategy and lightning.TrainerStrategy"
        )
