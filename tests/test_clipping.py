"""The gradient norm where an axis shards a dim within the chunks of other axes, as in mode 3d.
torch's strided shards count as sharded.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import RunError
from autopar.ir.layout import parse_layout
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import is_sharded
from autopar.runtime.dtensors.sharding import dtensor_of_part, local_part

LAYOUTS = ("s0 S0", "s0 S1", "s1 S1", "S0 I", "I I", "I s0", "S0 S0")


def _mixed() -> None:
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    mesh = Mesh((2, 2), ("a", "b"), device="cpu")
    generator = torch.Generator().manual_seed(0)
    parameters, wholes = [], []
    for text in LAYOUTS:
        whole, layout = (
            torch.randn(8, 8, dtype=torch.float64, generator=generator),
            parse_layout(text),
        )
        placed = dtensor_of_part(local_part(whole, layout, mesh).clone().contiguous(), layout, mesh)
        assert torch.equal(placed.full_tensor(), whole), text
        assert [is_sharded(p) for p in placed.placements] == [t.is_shard for t in layout], text
        parameters.append(nn.Parameter(torch.zeros_like(placed)))
        parameters[-1].grad = placed
        wholes.append(whole)
    together = torch.cat(wholes).flatten()
    for order in (2.0, 1.0, 3.0, float("inf")):
        norm = autopar.clip_grad_norm_(parameters, 1e9, order)
        torch.testing.assert_close(
            norm, torch.linalg.vector_norm(together, order), rtol=1e-12, atol=0
        )
    autopar.clip_grad_norm_(parameters, 1.0)
    scale = float(1.0 / (torch.linalg.vector_norm(together) + 1e-6))
    for p, whole in zip(parameters, wholes, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), whole * scale, rtol=1e-12, atol=0)
    if dist.get_rank() == 3:  # one element on one rank is not finite
        parameters[0].grad.to_local()[0, 0] = float("nan")
    assert not autopar.clip_grad_norm_(parameters, 1.0).isfinite()
    with pytest.raises(RunError, match=r"norm of order 2\.0 is nan"):
        autopar.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def test_the_norm_of_any_placements(ranks: Pools) -> None:
    """The norm is equal on all ranks, also where it is not finite."""
    ranks(4).run(_mixed)
