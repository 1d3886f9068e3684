"""One parameter on one rank: the user's tensor, this rank's part, and the leaf of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.parameter_collectives import ParameterSpec
from autopar.runtime.dtensors.torch_private import local_tensor, wrap_local, write_count


@dataclass(frozen=True)
class NormGroup:
    """The ranks of a pipeline over which the norm of gradients is summed.

    A pipelined program sets one as the attribute ``norm_group`` of its parameters, where clipping
    finds it.

    Attributes:
        group: the ranks along the pipeline.
        device: where the norm is computed.
        counts: whether this rank counts the parameter. Of the ranks that share one, the first does.
    """

    group: dist.ProcessGroup
    device: torch.device
    counts: bool


@dataclass(eq=False)
class Weight:
    """One parameter on this rank.

    Attributes:
        parameter: the user's tensor: a DTensor, or a plain tensor on one device.
        local: this rank's part of it, in the same memory.
        leaf: the leaf of autograd that the graph takes, with the dtype of the graph. It shares the
            memory of ``local`` unless ``spec.is_copied``; then it is empty between steps.
        version: the parameter's write count when it was last seen.
        summed: the gradient of the microbatches so far, in the parameter's dtype, where that is not
            the dtype of the graph.
    """

    spec: ParameterSpec
    parameter: nn.Parameter
    local: torch.Tensor
    leaf: torch.Tensor
    version: int = 0
    summed: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.spec.name

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient that the backward has left so far."""
        return self.leaf.grad if self.summed is None else self.summed

    @torch.no_grad()
    def accumulate(self) -> None:
        """Moves the leaf's gradient into ``summed``."""
        gradient, self.leaf.grad = self.leaf.grad, None
        if gradient is not None:
            gradient = gradient.to(self.local.dtype)
            self.summed = gradient if self.summed is None else self.summed.add_(gradient)

    def drop_gradient(self) -> None:
        """Forgets the gradient that the backward has left."""
        self.leaf.grad = self.summed = None

    def take_gradient(self) -> torch.Tensor:
        """The gradient that the backward has left, as a dense tensor; drops it here."""
        gradient = self.gradient
        assert gradient is not None
        self.drop_gradient()
        return gradient.to_dense() if gradient.is_sparse else gradient

    def put_gradient(self, gradient: torch.Tensor) -> None:
        """Puts back what :meth:`take_gradient` took, in the parameter's dtype: the next backward
        adds to it.
        """
        if self.spec.is_cast:
            self.summed = gradient
        else:
            self.leaf.grad = gradient

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A gradient for the user: ``local``, of the shape of this rank's part, as a DTensor where
        the parameter is one.
        """
        return wrap_local(local, self.parameter) if isinstance(self.parameter, DTensor) else local

    def refresh(self) -> None:
        """Makes the leaf follow the parameter: writes to it, other memory, freezing."""
        parameter = self.parameter
        if self.leaf is parameter:
            return
        local = local_tensor(parameter)
        if local.data_ptr() != self.local.data_ptr():
            self.local = parameter.data if local is parameter else local
            if not self.spec.is_copied:
                self.leaf.data = self.local
        if self.version != (version := write_count(parameter)):
            # Writes to a DTensor are counted on the DTensor and not on its local tensor. Counted on
            # the leaf, they make autograd refuse the backward of a graph that saved old values.
            self.version = version
            torch.autograd.graph.increment_version(self.leaf)
        if self.leaf.requires_grad != parameter.requires_grad:
            self.leaf.requires_grad_(parameter.requires_grad)
