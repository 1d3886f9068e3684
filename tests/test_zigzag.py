"""Tensors whose pieces are not in the order of the dim: every conversion moves the right pieces,
and plans of causal attention use zigzag order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import zoo
from equivalence import TOLERANCE, check
from pool import Pools

import autopar
from autopar.errors import RunError
from autopar.ir.layout import Z, can_convert, local_shape, parse_layout, parse_type
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.ring_attention import sequence_positions

SHAPE = (16, 8, 24)


def part(whole: torch.Tensor, text: str, rank: int, n: int) -> torch.Tensor:
    """A rank's part of a tensor in one layout; for a pending sum its share of the sum."""
    t = parse_type(text)
    if text == "P":
        return whole * (rank + 1) / sum(range(1, n + 1))
    if not t.is_shard:
        return whole
    if t.pieces > 1 and not t.is_zigzag:
        return torch.cat(
            [each.chunk(n, t.dim)[rank] for each in whole.chunk(t.pieces, t.dim)], t.dim
        )
    return whole.index_select(
        t.dim, sequence_positions(rank, n, whole.shape[t.dim] // n, t.is_zigzag)
    )


def summed(share: torch.Tensor) -> torch.Tensor:
    total = share.detach().contiguous().clone()
    torch.distributed.all_reduce(total)
    return total


def _conversions() -> None:
    n = torch.distributed.get_world_size()
    mesh = Mesh((n,), ("ring",))
    rank, whole = (
        mesh.coordinate[0],
        torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    types = ("I", "R", "P", "S0", "S1", "S2", "Z0", "Z1", "Z2", "S0/4", "S1/2", "S2/3")
    for src, dst in itertools.product(types, types):
        source, target = parse_type(src), parse_type(dst)
        if max(source.pieces, target.pieces) == 1:
            continue
        if source.dim == target.dim and source.pieces > 1 < target.pieces and src != dst:
            with pytest.raises(RunError, match="no conversion"):
                redistribute(part(whole, src, rank, n), mesh, 0, src, dst)
            continue
        x = part(whole, src, rank, n).clone().requires_grad_()
        y = redistribute(x, mesh, 0, src, dst)
        shares = summed(y) if dst == "P" else None
        found, expected = (
            (y.detach(), part(whole, dst, rank, n)) if shares is None else (shares, whole)
        )
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, s=src, d=dst: f"{s} -> {d}: {m}"
        )
        above, below = (repr(parse_type(t).dual) for t in (dst, src))
        y.backward(part(whole, above, rank, n).clone())
        assert x.grad is not None
        gradient = x.grad
        if below == "P":
            gradient = summed(gradient)
        torch.testing.assert_close(
            gradient,
            whole if below == "P" else part(whole, below, rank, n),
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m, s=src, d=dst: f"gradient of {s} -> {d}: {m}",
        )


@pytest.mark.parametrize("n", [2, 4])
def test_conversions(ranks: Pools, n: int) -> None:
    ranks(n).run(_conversions)


def test_layouts() -> None:
    assert local_shape((16, 3), (Z(0),), (4,)) == (4, 3)
    with pytest.raises(ValueError, match="not divisible by 8"):
        local_shape((12, 3), (Z(0),), (4,))
    # An axis that cuts within the chunks of all others is gathered first.
    assert can_convert(parse_layout("s0 S0"), 0, parse_type("R"))
    assert not can_convert(parse_layout("s0 S0"), 1, parse_type("R"))
    assert not can_convert(parse_layout("S0 S0"), 0, parse_type("R"))


def test_causal_rings_are_cut_in_zigzag_order(ranks: Pools) -> None:
    parallel = dict(tensor=dict(size=4, mode="sequence", ring=4))
    plan = autopar.plan(*zoo.causal(), 4, cluster="cpu", parallel=parallel, progress=False)
    attentions = [node for node in plan.nodes.values() if "ring" in node.kernels]
    assert attentions
    assert all(t.is_zigzag for node in attentions for t in node.out)
    found = ranks(4).run(
        check,
        "causal",
        torch.float64,
        {"zigzag": dict(cluster="cpu", parallel=parallel)},
        timeout=120,
    )
    assert max(each["zigzag"].worst for each in found)[0] < TOLERANCE[torch.float64]
    assert any(t.is_zigzag for node in found[0]["zigzag"].plan.nodes.values() for t in node.out)
