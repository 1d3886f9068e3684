"""Ring attention compared with torch's attention on one device, in float64, over masks, lengths,
heads, orders of pieces and dropout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import close, draw, make_mesh
from pool import Pools

from autopar.runtime.kernels import plain_attention, ring_attention

BATCH, WIDTH = 2, 6
MASKS: dict[str, Callable[[int, int, int], torch.Tensor | None]] = {  # of queries, keys, heads
    "": lambda n, m, h: None,
    "padding": lambda n, m, h: (torch.arange(m) < torch.tensor([m, max(1, m - 3)])[:, None])[
        :, None, None, :
    ],
    # All keys of the last row are masked.
    "rows": lambda n, m, h: (draw(n, m, seed=7) > -0.3) & (torch.arange(n) < n - 1)[:, None],
    "added": lambda n, m, h: draw(BATCH, h, n, m, seed=8),
    "infinite": lambda n, m, h: draw(BATCH, 1, n, m, seed=8).where(
        draw(n, m, seed=7) > 0, -math.inf
    ),
    "trained": lambda n, m, h: draw(BATCH, h, n, m, seed=8).requires_grad_(),
    "trained of heads": lambda n, m, h: draw(h, n, m, seed=8).requires_grad_(),
    "trained of keys": lambda n, m, h: draw(1, h, 1, m, seed=8).requires_grad_(),
    "trained of queries": lambda n, m, h: draw(n, 1, seed=8).requires_grad_(),
}
# Mask, causal, heads, lengths, zigzag, width of the values.
Case = tuple[str, bool, tuple[int, int], tuple[int, int], bool, int]


def _check(cases: list[Case]) -> None:
    world = torch.distributed.get_world_size()
    mesh, _ = make_mesh((world,))
    for case in cases:
        try:
            _compare(mesh, *case)
        except BaseException as e:
            raise AssertionError(f"{case}") from e


def _compare(
    mesh: Any,
    name: str,
    causal: bool,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    zigzag: bool,
    width: int,
) -> None:
    world, me = mesh.sizes[0], mesh.coordinate[0]
    at, there = (ring_attention.sequence_positions(me, world, n, zigzag) for n in lengths)
    (n, m), (several, fewer) = (world * length for length in lengths), heads
    mask = MASKS[name](n, m, several)
    shapes = ((several, n, WIDTH), (fewer, m, WIDTH), (fewer, m, width))
    whole = [draw(BATCH, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    places = (at, there, there)
    local = [t[:, :, place].requires_grad_() for t, place in zip(whole, places, strict=True)]
    # torch does not always take a mask and is_causal together.
    both = None if mask is None or not causal else mask & torch.ones(n, m, dtype=torch.bool).tril()
    given = (mask, 0.0, causal) if both is None else (both, 0.0, False)
    leaves = [t.requires_grad_() for t in whole]
    y = F.scaled_dot_product_attention(*leaves, *given, enable_gqa=several != fewer)
    above = draw(*y.shape, seed=9)
    (y * above).sum().backward()

    part = None if mask is None else _rows_of(mask, at).detach()
    if part is not None:
        part.requires_grad_(mask.requires_grad)  # type: ignore[union-attr]
    x = ring_attention.ring_attention(*local, part, 0.0, causal, None, mesh, 0, (0,), 0, zigzag)
    (x * above[:, :, at]).sum().backward()
    close(x, y[:, :, at])
    for one, other, place in zip(local, whole, places, strict=True):
        close(one.grad, other.grad[:, :, place])  # type: ignore[index]
    if mask is not None and mask.requires_grad:
        assert part is not None
        assert part.grad is not None
        assert mask.grad is not None
        if mask.shape[-2] == 1:
            torch.distributed.all_reduce(part.grad)
        close(part.grad, _rows_of(mask.grad, at))


def _rows_of(mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows ``at`` of a mask that may be the same for all rows."""
    return mask if mask.shape[-2] == 1 else mask[..., at, :]


def cases() -> list[Case]:
    every: list[Any] = [
        *itertools.product(
            ["", "rows"],
            [False],
            [(4, 4), (4, 2), (3, 1)],
            [(3, 3), (5, 2), (2, 7), (1, 1)],
            [False],
            [6],
        )
    ]
    every += itertools.product(
        [""], [True], [(4, 4), (3, 1)], [(3, 3), (5, 2), (2, 7), (1, 1)], [False], [6]
    )
    every += itertools.product([""], [True], [(4, 2)], [(4, 4), (2, 6), (6, 2)], [True], [6, 5])
    every += itertools.product(MASKS, [False], [(4, 2)], [(3, 5)], [False], [6, 5])
    every += itertools.product(MASKS, [False], [(3, 3)], [(2, 4)], [True], [6])
    return every + [("rows", True, (4, 2), (4, 4), True, width) for width in (6, 5)]


@pytest.mark.parametrize(
    "world", [1, 2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 8))]
)
def test_equals_attention_on_one_device(ranks: Pools, world: int) -> None:
    ranks(world).run(_check, cases()[:: 1 if world < 4 else 3])


def _lowest() -> None:
    mesh, _ = make_mesh((2,))
    q, k, v = draw(3, BATCH, 2, 8, WIDTH).unbind(0)
    mask = draw(8, 8).where(torch.arange(8)[:, None] % 4 > 0, torch.finfo(torch.float64).min)
    here = slice(4 * mesh.coordinate[0], 4 + 4 * mesh.coordinate[0])
    for values in (v, v[..., :5]):
        x = ring_attention.ring_attention(
            q[:, :, here],
            k[:, :, here],
            values[:, :, here],
            mask[here],
            0.0,
            False,
            None,
            mesh,
            0,
            (0,),
            0,
        )
        close(x, F.scaled_dot_product_attention(q, k, values, mask)[:, :, here])


def test_rows_that_see_all_alike_little_have_the_mean(ranks: Pools) -> None:
    ranks(2).run(_lowest)


def test_equals_attention_on_one_device_over_several_blocks_of_a_kernel(ranks: Pools) -> None:
    some = [
        ("", True, (2, 1), (700, 700), True, 6),
        ("rows", False, (2, 1), (300, 600), False, 6),
        ("", True, (2, 2), (300, 600), False, 5),
    ]
    ranks(2).run(_check, [*some, ("trained of heads", False, (2, 1), (300, 100), True, 6)])


def _attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(WIDTH)
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) * keep / (1 - p)) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _dropped(
    sizes: tuple[int, ...], causal: bool, zigzag: bool, p: float, length: int
) -> tuple[torch.Tensor, float]:
    """The attention weights of this rank's rows that dropout kept, and the share that it kept of
    those that count.
    """
    plain_attention.ROWS, rows = 3, plain_attention.ROWS
    mesh, axes = make_mesh(sizes)
    ranks, me, heads, fewer = sizes[-1], mesh.coordinate[-1], 4, 2
    n = length * ranks
    at = ring_attention.sequence_positions(me, ranks, length, zigzag)
    q, k, v = (draw(BATCH, h, n, WIDTH, seed=s) for s, h in enumerate((heads, fewer, fewer)))
    leaves = [t[:, :, at].requires_grad_() for t in (q, k, v)]

    def attention(values: torch.Tensor) -> torch.Tensor:
        last = len(sizes) - 1
        return ring_attention.ring_attention(
            *leaves[:2], values, None, p, causal, None, mesh, 3, axes, last, zigzag
        )

    # Values that are unit vectors show the weights, and dropped weights as 0.
    units = torch.eye(n, dtype=torch.float64).expand(BATCH, fewer, n, n)
    kept = attention(units[:, :, at]).detach() != 0
    mask = torch.ones(n, n).tril().bool() if causal else torch.ones(n, n).bool()
    x = attention(leaves[2])
    close(x, attention(leaves[2]))  # the same draws when it is recomputed
    (x * draw(*q.shape, seed=9)[:, :, at]).sum().backward()

    group = mesh.group(len(sizes) - 1)
    everywhere = [torch.empty_like(kept) for _ in range(ranks)]
    torch.distributed.all_gather(everywhere, kept, group)
    keep = torch.zeros(BATCH, heads, n, n, dtype=torch.bool)
    for rank, part in enumerate(everywhere):
        keep[:, :, ring_attention.sequence_positions(rank, ranks, length, zigzag)] = part
    whole = [t.requires_grad_() for t in (q, k, v)]
    y = _attended(*whole, keep, mask, p)
    (y * draw(*y.shape, seed=9)).sum().backward()
    close(x, y[:, :, at])
    for one, other in zip(leaves, whole, strict=True):
        close(one.grad, other.grad[:, :, at])  # type: ignore[index]
    plain_attention.ROWS = rows
    return kept, kept[..., mask[at]].double().mean().item()


@pytest.mark.parametrize(("causal", "zigzag"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2)])
def test_dropout_is_that_of_the_weights_it_shows(
    ranks: Pools, sizes: tuple[int, ...], causal: bool, zigzag: bool
) -> None:
    found = ranks(math.prod(sizes)).run(_dropped, sizes, causal, zigzag, 0.25, 8)
    rates = [rate for _, rate in found]
    assert abs(sum(rates) / len(rates) - 0.75) < 0.03
    if not causal:  # no two blocks are alike
        blocks = [block for kept, _ in found for block in kept.chunk(sizes[-1], -1)]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(blocks, 2))


def _halves(zigzag: bool) -> None:
    world = torch.distributed.get_world_size()
    mesh, _ = make_mesh((world,))
    at = ring_attention.sequence_positions(mesh.coordinate[0], world, 32, zigzag)
    parts = [draw(BATCH, h, 32 * world, 8, seed=h).bfloat16() for h in (4, 2, 2)]
    whole = [t.double().requires_grad_() for t in parts]
    y = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    above = draw(*y.shape, seed=9).bfloat16()
    (y * above).sum().backward()
    local = [t[:, :, at].requires_grad_() for t in parts]
    # Without a mask both kernels are fused; with one that has a gradient only the forward's is.
    for mask in (None, torch.zeros(32, 32 * world, dtype=torch.bfloat16).requires_grad_()):
        x = ring_attention.ring_attention(*local, mask, 0.0, True, None, mesh, 0, (0,), 0, zigzag)
        gradients = torch.autograd.grad(x, local, above[:, :, at])
        for one, other in zip((x, *gradients), (y, *(t.grad for t in whole)), strict=True):
            assert one.dtype is torch.bfloat16
            assert other is not None
            expected = other[:, :, at]
            assert (one - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.parametrize("zigzag", [False, True])
def test_halves_are_within_their_rounding(ranks: Pools, zigzag: bool) -> None:
    ranks(4).run(_halves, zigzag)
