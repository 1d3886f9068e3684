"""Parameters that several ranks of a pipeline hold, such as a tied embedding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopar.ir.parameter_collectives import shared_gradient_dtype
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.weight import Weight


class SharedParameters:
    """The parameters among ``weights`` that several pipeline ranks hold. Each rank has a tensor of
    its own, and all ranks get the sum of the gradients.

    ``dtype``: the dtype in which ranks sum; None for the parameter's own.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        mesh: Mesh,
        holders: Holders,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        members: dict[tuple[int, ...], list[Weight]] = defaultdict(list)
        for name, weight in weights.items():
            if len(ranks := holders.ranks_of(name)) > 1:
                members[ranks].append(weight)
        # All ranks take part in making a group, also those that are not in it.
        groups = {ranks: mesh.stage_replicas_group(ranks) for ranks in holders.shared_by()}
        self._groups = [(groups[ranks], shared) for ranks, shared in sorted(members.items())]
        self._names = {weight.name for _, shared in self._groups for weight in shared}

    @torch.no_grad()
    def add_up(self, gradients: Gradients) -> Gradients:
        """``gradients``, with the sums over ranks in the place of those of shared parameters."""
        if not self._groups:
            return gradients
        own: dict[str, torch.Tensor] = {}
        for weight, value in gradients:
            if weight.name in self._names:
                own[weight.name] = own[weight.name] + value if weight.name in own else value
        result = [(weight, value) for weight, value in gradients if weight.name not in self._names]
        for group, shared in self._groups:
            assert group is not None  # this rank holds the parameters
            by_dtype: dict[torch.dtype, list[Weight]] = defaultdict(list)
            for weight in shared:
                if weight.leaf.requires_grad:
                    by_dtype[weight.local.dtype].append(weight)
            for trained in by_dtype.values():
                result += self._sum(trained, own, group)
        return result

    def _sum(
        self, weights: list[Weight], own: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> Gradients:
        """One all-reduce of the gradients of ``weights``, which have one dtype. A rank whose stages
        made no gradient sends zeros.
        """
        dtype = weights[0].local.dtype
        parts = [own.get(w.name, torch.zeros_like(w.local)).reshape(-1) for w in weights]
        flat = torch.cat(parts).to(shared_gradient_dtype(dtype, self._dtype))
        dist.all_reduce(flat, group=group)
        pieces = flat.to(dtype).split([w.local.numel() for w in weights])
        return [(w, piece.view(w.local.shape)) for w, piece in zip(weights, pieces, strict=True)]
