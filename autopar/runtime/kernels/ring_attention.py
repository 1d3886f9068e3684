"""Attention over a sequence that several ranks share: keys and values travel around a ring (Liu,
Zaharia and Abbeel, 2023, "Ring Attention").

Each rank keeps its queries. Every block of keys and values arrives in turn, while the next one is
on its way. The results of a row for the blocks are combined by their log-sum-exp, so that no rank
ever has the scores of a whole row. In the backward the blocks travel again. The sums of their
gradients travel after them and end at the owners of the blocks. A rank receives 2 (N - 1) blocks in
the forward, of keys and of values, and 4 (N - 1) in the backward, all in the dtype of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from autopar.errors import RunError
from autopar.runtime.communication.kernel_collectives import start_ring_shift
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.accumulation import accumulation_dtype
from autopar.runtime.kernels.causal_tiles import (
    CausalTile,
    SequenceSplit,
    causal_tiles,
    sequence_positions,
)
from autopar.runtime.kernels.fused_attention import (
    AttentionSettings,
    block_attention,
    block_attention_backward,
)

__all__ = ["ring_attention", "sequence_positions"]

Axes = tuple[int, ...]
Pair = tuple[torch.Tensor, torch.Tensor]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    mesh: Mesh,
    node_id: int,
    axes: Axes,
    ring: int,
    zigzag: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention of ``q`` [batch, heads, length, width] and ``k``, ``v`` [batch,
    heads or fewer, length, width]. The lengths are cut on mesh axis ``ring``, as
    :func:`sequence_positions` says; ``axes`` are all mesh axes that cut ``q``.

    ``mask`` broadcasts to [batch, heads, this rank's queries, all keys]. It is a bool, false where
    a key does not count, or a number that is added to the score. Its gradient is the gradient from
    this rank's queries. Where there are fewer heads of keys and values, each serves as many heads
    of queries. The result of a row whose keys are all masked is 0. Dropout draws as
    :func:`graph_kernels.dropout` does, with a draw of its own for each block of keys.
    """
    ranks, index = mesh.sizes[ring], mesh.index(axes)
    if zigzag and (q.shape[-2] % 2 or k.shape[-2] % 2):
        raise RunError(
            f"zigzag=True gives each rank two pieces: its {q.shape[-2]} queries and {k.shape[-2]} "
            "keys must be even numbers"
        )
    seeds: tuple[int, ...] = ()
    if dropout_p and not q.is_meta:
        seeds = tuple(
            mesh.random_streams.draw_seed(node_id, index * ranks + source)
            for source in range(ranks)
        )
    # With meta tensors, only the mesh can say where the program will run, and this stands for the
    # last rank, one of those that compute most.
    device_type = getattr(mesh, "device_type", "cpu") if q.is_meta else q.device.type
    rank = ranks - 1 if q.is_meta else mesh.coordinate[ring]
    settings = AttentionSettings(
        1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        device_type,
        is_causal,
        dropout=dropout_p,
    )
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    split, group = SequenceSplit(ranks, zigzag), mesh.group(ring).group_name
    return _RingAttention.apply(q, k, v, mask, _Ring(settings, seeds, rank, split, group))


class _Ring(NamedTuple):
    settings: AttentionSettings  # of whole sequences
    seeds: tuple[int, ...]  # of dropout's draws, one for each block
    rank: int  # this rank's place
    split: SequenceSplit
    group: str  # name of the process group

    @property
    def ranks(self) -> int:
        return self.split.ranks


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        ring: _Ring,
    ) -> torch.Tensor:
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
        top = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
        total = torch.zeros_like(top)
        for source, (keys, values) in _travelling_blocks(ring, k, v):
            bias = _bias(ring, mask, source, k.shape[-2], q.dtype)
            for tile, settings in _tiles_of_block(ring, q, k, source, bias):
                part, lse = block_attention(
                    q[:, :, tile.rows], keys[:, :, tile.keys], values[:, :, tile.keys], settings
                )
                _add_part(
                    out[:, :, tile.rows], top[:, :, tile.rows], total[:, :, tile.rows], part, lse
                )
        unseen = total == 0.0
        result = out.div_(total.masked_fill_(unseen, 1.0)[..., None]).to(q.dtype)
        lse = top.masked_fill_(unseen, 0.0).add_(total.log_())
        ctx.save_for_backward(q, k, v, mask, result, lse)
        ctx.ring = ring
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad = grad.contiguous()
        q_grad = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        mask_grad = (
            torch.zeros(mask.shape, dtype=accumulation_dtype(mask.dtype), device=q.device)
            if ctx.needs_input_grad[3]
            else None
        )

        def add_gradients(source: int, block: Pair, sums: Pair) -> None:
            bias = _bias(ring, mask, source, k.shape[-2], q.dtype)
            bias_grad = (
                None
                if bias is None or mask_grad is None
                else torch.zeros_like(bias, dtype=mask_grad.dtype)
            )
            for (rows, keys, _), settings in _tiles_of_block(ring, q, k, source, bias):
                here, there = (slice(None), slice(None), rows), (slice(None), slice(None), keys)
                row_tensors = grad[here], q[here], block[0][there], block[1][there]
                found = block_attention_backward(
                    *row_tensors,
                    out[here],
                    lse[here],
                    settings,
                    None if bias_grad is None else _cut(bias_grad, rows, keys),
                )
                for whole, part in zip(
                    (q_grad[here], sums[0][there], sums[1][there]), found, strict=True
                ):
                    whole += part
            if bias_grad is not None and mask_grad is not None:
                for own, part in _columns(ring, mask_grad, source, k.shape[-2], bias_grad):
                    own += part

        k_grad, v_grad = _sum_around_ring(ring, k, v, add_gradients)
        mask_result = None if mask_grad is None else mask_grad.to(mask.dtype)
        return q_grad.to(q.dtype), k_grad, v_grad, mask_result, None


def _add_part(
    out: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    part: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Adds one block's result ``part``, with the log-sum-exp ``lse`` of its scores, to ``out``,
    which is divided by ``total`` at the end. Both sums are multiples of exp(-``top``), where
    ``top`` is the largest ``lse`` so far.
    """
    now = torch.maximum(top, lse)
    base = now.masked_fill(now == -math.inf, 0.0)  # 0 for rows that have seen no key yet
    old, new = top.sub_(base).exp_(), lse.sub(base).exp_()
    out.mul_(old[..., None]).addcmul_(part, new[..., None])
    total.mul_(old).add_(new)
    top.copy_(now)


def _tiles_of_block(
    ring: _Ring, q: torch.Tensor, k: torch.Tensor, source: int, bias: torch.Tensor | None
) -> Iterator[tuple[CausalTile, AttentionSettings]]:
    """The tiles of this rank's queries and the keys of ``source``, each with its settings. They are
    the same in forward and backward.
    """
    generator = torch.Generator(q.device).manual_seed(ring.seeds[source]) if ring.seeds else None
    length, others = q.shape[-2], k.shape[-2]
    tiles = [CausalTile(slice(0, length), slice(0, others), False)]
    if ring.settings.causal:
        tiles = causal_tiles(ring.split, ring.rank, length, source, others)
    for tile in tiles:
        part = None if bias is None else _cut(bias, tile.rows, tile.keys)
        yield tile, ring.settings._replace(causal=tile.causal, bias=part, generator=generator)


def _cut(bias: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    return bias[
        ...,
        rows if bias.shape[-2] > 1 else slice(None),
        keys if bias.shape[-1] > 1 else slice(None),
    ]


def _bias(
    ring: _Ring, mask: torch.Tensor | None, source: int, others: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The numbers that ``mask`` adds to the scores of the ``others`` keys of ``source``."""
    if mask is None:
        return None
    if mask.shape[-1] > 1:
        parts = [mask[..., first : first + n] for _, first, n in ring.split.pieces(source, others)]
        mask = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _columns(
    ring: _Ring, whole: torch.Tensor, source: int, others: int, block: torch.Tensor
) -> Iterator[Pair]:
    """The columns of ``whole`` for the ``others`` keys of ``source``, piece by piece, each with the
    columns of ``block``, which has the columns of these keys alone.
    """
    if whole.shape[-1] == 1:
        yield whole, block
        return
    for own, first, n in ring.split.pieces(source, others):
        yield whole[..., first : first + n], block[..., own : own + n]


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``k`` and ``v`` in one flat tensor, which is sent in one message."""
    block = torch.empty(k.numel() + v.numel(), dtype=k.dtype, device=k.device)
    for part, own in zip(_unpack(block, k, v), (k, v), strict=True):
        part.copy_(own)
    return block


def _unpack(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


def _travelling_blocks(ring: _Ring, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, Pair]]:
    """The number of every rank, this rank's first, and its keys and values; the next block is on
    its way meanwhile.
    """
    here = ring.group, ring.ranks, ring.rank
    coming = start_ring_shift(_pack(k, v), *here) if ring.ranks > 1 else None
    yield ring.rank, (k, v)
    for step in range(1, ring.ranks):
        assert coming is not None
        block = coming()
        coming = start_ring_shift(block, *here) if step < ring.ranks - 1 else None
        yield (ring.rank - step) % ring.ranks, _unpack(block, k, v)


def _sum_around_ring(
    ring: _Ring, k: torch.Tensor, v: torch.Tensor, add: Callable[[int, Pair, Pair], None]
) -> Pair:
    """The gradients of this rank's keys and values, summed over all ranks. The sums of a block
    follow it around the ring, and the last rank that adds to them is the block's owner.
    ``add(source, block, sums)`` adds this rank's part for the block of ``source``.
    """
    dtype = accumulation_dtype(k.dtype)
    sums: Callable[[], torch.Tensor] | None = None
    blocks = _travelling_blocks(ring, k, v)
    next(blocks)
    for source, block in blocks:
        found = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
        add(source, block, _unpack(found, k, v))
        if sums is not None:
            found.add_(sums())
        sums = start_ring_shift(found.to(k.dtype), ring.group, ring.ranks, ring.rank)
    own = (
        torch.zeros(k.shape, dtype=dtype, device=k.device),
        torch.zeros(v.shape, dtype=dtype, device=k.device),
    )
    add(ring.rank, (k, v), own)
    if sums is not None:
        for mine, other in zip(own, _unpack(sums(), k, v), strict=True):
            mine += other
    return own[0].to(k.dtype), own[1].to(k.dtype)
