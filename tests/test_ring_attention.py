"""Ring attention compared with torch's attention on one device, in float64, over masks, lengths,
heads, orders of pieces and dropout; the bytes that it sends; its price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pools
from test_kernels import close, draw, make_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import RunError
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.runtime.kernels import plain_attention, ring_attention
from autopar.runtime.kernels.causal_tiles import SequenceSplit, causal_tiles
from autopar.runtime.kernels.fused_attention import (
    AttentionSettings,
    block_attention,
    block_attention_backward,
)

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
    whole = [
        draw(BATCH, h, length, w, seed=s)
        for s, (h, length, w) in enumerate(
            ((several, n, WIDTH), (fewer, m, WIDTH), (fewer, m, width))
        )
    ]
    local = [
        t[:, :, place].requires_grad_() for t, place in zip(whole, (at, there, there), strict=True)
    ]
    # torch does not always take a mask and is_causal together.
    both = None if mask is None or not causal else mask & torch.ones(n, m, dtype=torch.bool).tril()
    given = (mask, 0.0, causal) if both is None else (both, 0.0, False)
    y = F.scaled_dot_product_attention(
        *[t.requires_grad_() for t in whole], *given, enable_gqa=several != fewer
    )
    above = draw(*y.shape, seed=9)
    (y * above).sum().backward()

    part = mask
    if mask is not None:
        part = (
            (mask if mask.shape[-2] == 1 else mask[..., at, :])
            .detach()
            .requires_grad_(mask.requires_grad)
        )
    x = ring_attention.ring_attention(*local, part, 0.0, causal, None, mesh, 0, (0,), 0, zigzag)
    (x * above[:, :, at]).sum().backward()
    close(x, y[:, :, at])
    for one, other, place in zip(local, whole, (at, there, there), strict=True):
        close(one.grad, other.grad[:, :, place])  # type: ignore[index]
    if mask is not None and mask.requires_grad:
        assert part is not None
        assert part.grad is not None
        assert mask.grad is not None
        if mask.shape[-2] == 1:
            torch.distributed.all_reduce(part.grad)
        close(part.grad, mask.grad if mask.shape[-2] == 1 else mask.grad[..., at, :])


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
    q, k, v = (
        draw(BATCH, heads, n, WIDTH),
        draw(BATCH, fewer, n, WIDTH, seed=1),
        draw(BATCH, fewer, n, WIDTH, seed=2),
    )
    leaves = [t[:, :, at].requires_grad_() for t in (q, k, v)]

    def attention(values: torch.Tensor) -> torch.Tensor:
        return ring_attention.ring_attention(
            leaves[0],
            leaves[1],
            values,
            None,
            p,
            causal,
            None,
            mesh,
            3,
            axes,
            len(sizes) - 1,
            zigzag,
        )

    # Values that are unit vectors show the weights, and dropped weights as 0.
    kept = (
        attention(torch.eye(n, dtype=torch.float64).expand(BATCH, fewer, n, n)[:, :, at]).detach()
        != 0
    )
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


class _Received(TorchDispatchMode):
    """Counts the bytes that this rank receives, and lists all other communication."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.others = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "_c10d_functional::all_to_all_single":
            assert sum(n > 0 for n in args[1]) == 1
            self.nbytes += sum(args[1]) * args[0].dtype.itemsize
        elif "c10d" in name and not name.endswith("wait_tensor"):
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def _count(dtype: torch.dtype, zigzag: bool) -> None:
    world = torch.distributed.get_world_size()
    mesh, _ = make_mesh((world,))
    q, k, v = (draw(BATCH, h, 4, w).to(dtype).requires_grad_() for h, w in ((4, 6), (2, 6), (2, 6)))
    block = k.numel() * dtype.itemsize
    with _Received() as received:
        x = ring_attention.ring_attention(q, k, v, None, 0.0, True, None, mesh, 0, (0,), 0, zigzag)
        assert received.nbytes == 2 * (world - 1) * block
        x.sum().backward()
    assert received.nbytes == 6 * (world - 1) * block
    assert not received.others


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_receives_every_other_block_once_and_three_times_a_step(
    ranks: Pools, world: int, zigzag: bool
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        ranks(world).run(_count, dtype, zigzag)


def _priced(ranks: int, zigzag: bool, mask: bool = False, dropout: float = 0.0) -> OperatorTrace:
    q, k, v = (contiguous_spec((BATCH, h, 64, 8), torch.float32, True) for h in (4, 2, 2))
    added = contiguous_spec((64, 64 * ranks), torch.float32, True) if mask else None
    mesh = FakeMesh((2, ranks))
    return OperatorTracer("cpu").trace(
        ring_attention.ring_attention,
        [q, k, v, added, dropout, not mask, None, mesh, 0, (0, 1), 1, zigzag],
        {},
    )


@pytest.mark.parametrize(("ranks", "zigzag"), [(1, False), (2, True), (4, False), (4, True)])
def test_is_priced_without_data(ranks: int, zigzag: bool) -> None:
    answer = _priced(ranks, zigzag)
    for launches, shifts in ((answer.forward, ranks - 1), (answer.backward, 2 * (ranks - 1))):
        sent = [launch.operator for launch in launches if launch.sends]
        assert (
            sent.count("_c10d_functional::all_to_all_single")
            == sent.count("_c10d_functional::wait_tensor")
            == shifts
        )
        assert len(sent) == 2 * shifts
        # Blocks that are masked as a whole are not computed.
        assert sum(launch.kind == "attention" for launch in launches) == ranks
    # The price is that of the last rank. With zigzag it attends to half of each block, and without
    # to all of the blocks before its own.
    square, part = 2.0 * BATCH * 4 * 64 * 64 * 2 * 8, 0.5 if zigzag else 1.0
    (diagonal,) = [
        launch.flops for launch in _priced(1, False).forward if launch.kind == "attention"
    ]
    assert sum(launch.flops for launch in answer.forward) == diagonal + (ranks - 1) * part * square
    assert answer.operands == {0, 1, 2}
    assert answer.internal == (BATCH * 4 * 64 * 4,)  # one number for each row


def test_all_it_can_do_is_priced() -> None:
    for answer in (_priced(2, True, mask=True), _priced(2, False, dropout=0.1)):
        assert any(launch.kind == "matmul" for launch in answer.backward)
        assert sum(g is not None for g in answer.footprint.gradients) >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_cuda_take_what_they_are_given(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (
        torch.empty(BATCH, h, n, 16, dtype=dtype, device="meta")
        for h, n in ((4, 40), (2, 24), (2, 24))
    )
    bias = torch.empty(BATCH, 1, 40, 24, device="meta") if masked else None
    look = AttentionSettings(0.25, "cuda", False, bias)
    out, norm = block_attention(q, k, v, look)
    assert (out.shape, out.dtype, norm.shape, norm.dtype) == (
        q.shape,
        dtype,
        q.shape[:-1],
        torch.float32,
    )
    for given, gradient in zip(
        (q, k, v), block_attention_backward(out, q, k, v, out, norm, look), strict=True
    ):
        assert (gradient.shape, gradient.dtype) == (given.shape, dtype)


@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_hold_what_is_seen_and_no_more(zigzag: bool) -> None:
    for ranks, length, others in itertools.product((1, 2, 3, 5), (2, 4, 6), (2, 4, 6)):
        cut = SequenceSplit(ranks, zigzag)
        for rank, source in itertools.product(range(ranks), repeat=2):
            here, there = (
                ring_attention.sequence_positions(r, ranks, n, zigzag)
                for r, n in ((rank, length), (source, others))
            )
            seen, found = here[:, None] >= there, torch.zeros(length, others)
            made = causal_tiles(cut, rank, length, source, others)
            for rows, keys, causal in made:
                part = torch.ones_like(found[rows, keys])
                assert not causal or part.shape[0] == part.shape[1]
                found[rows, keys] += part.tril() if causal else part
            assert torch.equal(found, seen.float())
            assert len(made) <= 1 or length != others


def test_two_pieces_need_an_even_length() -> None:
    q = torch.empty(1, 1, 3, 4, device="meta")
    with pytest.raises(RunError, match="its 3 queries and 3 keys must be even"):
        ring_attention.ring_attention(
            q, q, q, None, 0.0, True, None, FakeMesh((2,)), 0, (0,), 0, True
        )  # type: ignore[arg-type]
