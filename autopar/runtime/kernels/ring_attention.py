"""Attention over a sequence that several ranks share: keys and values travel a ring (Liu, Zaharia
and Abbeel, 2023, "Ring Attention").

Each rank keeps its queries and meets every block of keys and values in turn, while the next one is
on its way. What a row makes of the blocks goes together by their log-sum-exp, so that no rank ever
has the scores of a whole row. In the backward the blocks go round again, and the sums of their
gradients after them, which end at their owners: a rank receives 2 (N - 1) blocks forward, of keys
and of values, and 4 (N - 1) backward, all in the dtype of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from autopar.errors import RunError
from autopar.runtime.communication.collectives import start_ring_shift
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.causal_tiles import CausalTile, SequenceSplit, causal_tiles, positions
from autopar.runtime.kernels.fused_attention import (
    AttentionSettings,
    accumulation_dtype,
    block_attention,
    block_attention_backward,
)

__all__ = ["positions", "ring_attention"]

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
    heads or fewer, length, width], whose lengths are cut on mesh axis ``ring``, as
    :func:`positions` says; ``axes`` are all that cut ``q``.

    ``mask``: broadcasts to [batch, heads, this rank's queries, all keys]; a bool, false where a key
    does not count, or numbers to add; its gradient is that of this rank's queries. Fewer heads of
    keys and values are each for as many of queries. A row that may look at nothing is 0. Dropout
    drops as :func:`kernels.dropout` does, on its own in each block of keys.
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
    # Without processes nothing says where a program will run, and the last rank is one of those
    # that have most to do.
    device_type = getattr(mesh, "device_type", "cpu") if q.is_meta else q.device.type
    rank = ranks - 1 if q.is_meta else mesh.coordinate[ring]
    look = AttentionSettings(
        1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        device_type,
        is_causal,
        dropout=dropout_p,
    )
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return _Ring.apply(
        q,
        k,
        v,
        mask,
        _Run(look, seeds, rank, SequenceSplit(ranks, zigzag), mesh.group(ring).group_name),
    )


class _Run(NamedTuple):
    look: AttentionSettings  # of whole sequences
    seeds: tuple[int, ...]  # of what dropout draws, one for each block
    rank: int
    cut: SequenceSplit
    group: str

    @property
    def ranks(self) -> int:
        return self.cut.ranks


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        run: _Run,
    ) -> torch.Tensor:
        kind = accumulation_dtype(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=kind, device=q.device)
        top = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)
        total = torch.zeros_like(top)
        for source, (keys, values) in _round(run, k, v):
            bias = _bias(run, mask, source, k.shape[-2], q.dtype)
            for tile, look in _meetings(run, q, k, source, bias):
                part, norm = block_attention(
                    q[:, :, tile.rows], keys[:, :, tile.keys], values[:, :, tile.keys], look
                )
                _include(
                    out[:, :, tile.rows], top[:, :, tile.rows], total[:, :, tile.rows], part, norm
                )
        unseen = total == 0.0
        result = out.div_(total.masked_fill_(unseen, 1.0)[..., None]).to(q.dtype)
        norm = top.masked_fill_(unseen, 0.0).add_(total.log_())
        ctx.save_for_backward(q, k, v, mask, result, norm)
        ctx.run = run
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, out, norm = ctx.saved_tensors
        run: _Run = ctx.run
        kind, grad = accumulation_dtype(q.dtype), grad.contiguous()
        q_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        mask_grad = (
            torch.zeros(mask.shape, dtype=accumulation_dtype(mask.dtype), device=q.device)
            if ctx.needs_input_grad[3]
            else None
        )

        def meet(source: int, block: Pair, sums: Pair) -> None:
            bias = _bias(run, mask, source, k.shape[-2], q.dtype)
            bias_grad = (
                None
                if bias is None or mask_grad is None
                else torch.zeros_like(bias, dtype=mask_grad.dtype)
            )
            for (rows, keys, _), look in _meetings(run, q, k, source, bias):
                here, there = (slice(None), slice(None), rows), (slice(None), slice(None), keys)
                given = (
                    grad[here],
                    q[here],
                    block[0][there],
                    block[1][there],
                    out[here],
                    norm[here],
                    look,
                )
                found = block_attention_backward(
                    *given, None if bias_grad is None else _cut(bias_grad, rows, keys)
                )
                for whole, part in zip(
                    (q_grad[here], sums[0][there], sums[1][there]), found, strict=True
                ):
                    whole += part
            if bias_grad is not None and mask_grad is not None:
                for own, part in _columns(run, mask_grad, source, k.shape[-2], bias_grad):
                    own += part

        k_grad, v_grad = _returning(run, k, v, meet)
        return (
            q_grad.to(q.dtype),
            k_grad,
            v_grad,
            None if mask_grad is None else mask_grad.to(mask.dtype),
            None,
        )


def _include(
    out: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    part: torch.Tensor,
    norm: torch.Tensor,
) -> None:
    """Adds one block's ``part`` to ``out``, which is to be divided by ``total``; this and ``out``
    are multiples of exp(-``top``).
    """
    now = torch.maximum(top, norm)
    base = now.masked_fill(now == -math.inf, 0.0)  # of rows that have seen nothing yet
    old, new = top.sub_(base).exp_(), norm.sub(base).exp_()
    out.mul_(old[..., None]).addcmul_(part, new[..., None])
    total.mul_(old).add_(new)
    top.copy_(now)


def _meetings(
    run: _Run, q: torch.Tensor, k: torch.Tensor, source: int, bias: torch.Tensor | None
) -> Iterator[tuple[CausalTile, AttentionSettings]]:
    """The tiles with one block, and how to look there; alike forward and backward."""
    generator = torch.Generator(q.device).manual_seed(run.seeds[source]) if run.seeds else None
    length, others = q.shape[-2], k.shape[-2]
    everything = [CausalTile(slice(0, length), slice(0, others), False)]
    for tile in (
        causal_tiles(run.cut, run.rank, length, source, others) if run.look.causal else everything
    ):
        part = None if bias is None else _cut(bias, tile.rows, tile.keys)
        yield tile, run.look._replace(causal=tile.causal, bias=part, generator=generator)


def _cut(bias: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    return bias[
        ...,
        rows if bias.shape[-2] > 1 else slice(None),
        keys if bias.shape[-1] > 1 else slice(None),
    ]


def _bias(
    run: _Run, mask: torch.Tensor | None, source: int, others: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What ``mask`` adds to scores with the keys of ``source``."""
    if mask is None:
        return None
    if mask.shape[-1] > 1:
        parts = [mask[..., first : first + n] for _, first, n in run.cut.pieces(source, others)]
        mask = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _columns(
    run: _Run, whole: torch.Tensor, source: int, others: int, block: torch.Tensor
) -> Iterator[Pair]:
    """The parts of ``whole`` that are of the keys of ``source``, and those of ``block``, which has
    just these.
    """
    if whole.shape[-1] == 1:
        yield whole, block
        return
    for own, first, n in run.cut.pieces(source, others):
        yield whole[..., first : first + n], block[..., own : own + n]


# The ring


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    block = torch.empty(k.numel() + v.numel(), dtype=k.dtype, device=k.device)
    for part, own in zip(_unpacked(block, k, v), (k, v), strict=True):
        part.copy_(own)
    return block


def _unpacked(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


def _round(run: _Run, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, Pair]]:
    """Every rank's block and its number, this one's first; the next is on its way meanwhile."""
    coming = (
        start_ring_shift(_packed(k, v), run.group, run.ranks, run.rank) if run.ranks > 1 else None
    )
    yield run.rank, (k, v)
    for step in range(1, run.ranks):
        assert coming is not None
        block = coming()
        coming = (
            start_ring_shift(block, run.group, run.ranks, run.rank)
            if step < run.ranks - 1
            else None
        )
        yield (run.rank - step) % run.ranks, _unpacked(block, k, v)


def _returning(
    run: _Run, k: torch.Tensor, v: torch.Tensor, meet: Callable[[int, Pair, Pair], None]
) -> Pair:
    """The sum of what all ranks add to the gradients of this one's block: sums follow their blocks,
    and come home with the last, which is its owner's. ``meet(source, block, sums)`` adds this
    rank's."""
    kind, sums = accumulation_dtype(k.dtype), None
    blocks = _round(run, k, v)
    next(blocks)
    for source, block in blocks:
        found = torch.zeros(k.numel() + v.numel(), dtype=kind, device=k.device)
        meet(source, block, _unpacked(found, k, v))
        sums = start_ring_shift(
            (found if sums is None else found.add_(sums())).to(k.dtype),
            run.group,
            run.ranks,
            run.rank,
        )
    own = (
        torch.zeros(k.shape, dtype=kind, device=k.device),
        torch.zeros(v.shape, dtype=kind, device=k.device),
    )
    meet(run.rank, (k, v), own)
    if sums is not None:
        for mine, other in zip(own, _unpacked(sums(), k, v), strict=True):
            mine += other
    return own[0].to(k.dtype), own[1].to(k.dtype)
